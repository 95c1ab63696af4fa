"""Compile every DDTree kernel for every supported GPU architecture; no GPU needed. Prints one line a kernel.

usage: compile_kernels.py [CAPABILITY...]      (default: 80 89 90 100 120)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ddtree.kernels import account, attention, build, kv_move, lse, mask, penalties, walk, window

TREE_OUT = {"tokens": "*i64", "parents": "*i32", "depths": "*i32", "positions": "*i64", "scores": "*fp32",
            "counts": "*i32", "stats": "*fp32"}  # fmt: skip
WALK = {"tokens": "*i64", "parents": "*i32", "target": "*i64", "prefix": "*i64", "accept_index": "*i32",
        "accept_len": "*i32", "commit_lens": "*i32", "bonus": "*i64", "out_tokens": "*i64", "new_seq_lens": "*i64",
        "Q": "i32", "D": "i32"}  # fmt: skip
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a block
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 188}  # A100, L40S, H200, B200, RTX PRO 6000
Case = tuple[Any, dict[str, str], dict[str, Any], int]  # kernel, runtime arguments, constants, warps
CASES: dict[str, Case] = {}
for dtype in ("fp32", "bf16"):
    for lanes in (16, 64, 256):
        CASES[f"build {dtype} {lanes} lanes"] = (
            build._build_kernel,
            {"vals": f"*{dtype}", "ids": "*i64", "lse": "*fp32", "root": "*i64", "prefix": "*i64", **TREE_OUT,
             "L": "i32", "K": "i32", "Q": "i32", "root_stride": "i32", "prefix_stride": "i32"},
            {"S": lanes, "SPINE": dtype == "fp32", "HAS_LSE": (dtype, lanes) != ("fp32", 64)},
            1,
        )  # fmt: skip
for lanes in (16, 64, 256):
    CASES[f"full mask {lanes} lanes"] = (
        mask._full_kernel,
        {"parents": "*i32", "seq_lens": "*i64", "out": "*u8", "Q": "i32", "batch": "i32", "DEPTH": "i32"},
        {"S": lanes, "ROWS": 16, "BATCH": 32, "PREFIX": True, "FILL": lanes == 64},
        4,
    )
    CASES[f"walk {lanes} lanes"] = (walk._walk_kernel, WALK, {"S": lanes, "P": 16}, 1)
CASES["packed mask"] = (
    mask._packed_kernel,
    {"parents": "*i32", "out": "*i32", "Q": "i32", "W": "i32", "DEPTH": "i32"},
    {"S": 64},
    4,
)
CASES["links"] = (
    walk._links_kernel,
    {"parents": "*i32", "first_child": "*i64", "next_sibling": "*i64", "Q": "i32"},
    {"S": 64},
    1,
)
for word in (8, 4, 2, 1):
    CASES[f"kv move, {word}-byte words"] = (
        kv_move._move_kernel,
        {
            "pointers": "*u64",
            "row_bytes": "*i64",
            "window": "*i64",
            "accept_index": "*i32",
            "Q": "i32",
            "D": "i32",
            "stride": "i32",
        },
        {"P": 16, "CHUNK": 1024 // word, "WORD": word},
        4,
    )
STRIDES = ("sq", "sqh", "sk", "skh", "sv", "svh", "so", "soh", "skc", "skch", "svc", "svch")


def attention_case(
    capability: int, batch: int, width: int, heads: int, kv_heads: int, dim: int, tree: bool, slots: str
) -> Case:
    """The launch that ``plan`` cuts on a GPU of this kind. slots: type of the prefix lists, 32 bits under FA3."""
    shape = attention.plan(batch, width, heads, kv_heads, dim, PROCESSORS[capability], SHARED[capability])
    signature = {
        **dict.fromkeys(("q", "k_new", "v_new", "o", "k_cache", "v_cache"), "*bf16"),
        "indptr": "*i32",
        "indices": f"*{slots}",
        "words": "*i32" if tree else "*bf16",  # without a tree the queries stand in for the words that are not read
        "part": "*fp32",
        "part_ml": "*fp32",
        "arrived": "*i32",
        "scale": "fp32",
        **dict.fromkeys(("Q", "W", "splits", *STRIDES), "i32"),
    }
    constants = {
        "G": heads // kv_heads, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)), "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n, "TREE_N": shape.tree_n, "TREE": tree, "SPLIT": shape.splits > 1,
        "MIN": attention.MIN_SPLIT, "STAGES": shape.stages,
    }  # fmt: skip
    return attention._verify_kernel, signature, constants, shape.warps


# the heads of SmolLM2, of an 8B model with heads of 64 and of Qwen3-8B, and the widest heads there may be
ATTENTION = {
    f"attention of {heads} heads of {dim}, {batch} x {width} {'tree' if tree else 'block'}": (
        batch, width, heads, kv_heads, dim, tree, slots,
    )
    for batch, width, heads, kv_heads, dim, tree, slots in (
        (1, 16, 9, 3, 64, True, "i64"),
        (32, 64, 9, 3, 64, True, "i32"),
        (1, 8, 64, 8, 64, True, "i32"),
        (32, 16, 64, 8, 64, True, "i64"),
        (1, 16, 32, 8, 128, True, "i32"),
        (8, 16, 32, 8, 128, False, "i64"),
        (32, 64, 32, 8, 128, True, "i64"),
        (1, 8, 16, 2, 256, True, "i32"),
    )
}  # fmt: skip
CASES["list prefixes"] = (
    attention._prefix_kernel,
    {"table": "*i32", "rows": "*i64", "lens": "*i64", "indptr": "*i32", "indices": "*i64", "stride": "i32",
     "batch": "i32"},
    {"BATCH": 32, "BLOCK": 512},
    4,
)  # fmt: skip
CASES["list prefixes for FA3"] = (
    attention._prefix_kernel, CASES["list prefixes"][1] | {"indices": "*i32"}, *CASES["list prefixes"][2:],
)  # fmt: skip
CASES["account"] = (
    account._account_kernel,
    {"scores": "*fp32", "depths": "*i32", "counts": "*i32", "stats": "*fp32", "accept_len": "*i32", "slots": "*i64",
     "sums": "*fp64", **dict.fromkeys(("Q", "D", "stride"), "i32")},
    {"S": 64, "P": 16},
    1,
)  # fmt: skip
CASES["open window"] = (
    window._open_kernel,
    {"table": "*i32", **dict.fromkeys(("rows", "lens", "roots", "slots", "ids", "positions"), "*i64"),
     **dict.fromkeys(("stride", "N", "B", "mask_id"), "i32")},
    {"S": 64},
    1,
)  # fmt: skip
for lanes in (16, 64, 256):
    CASES[f"penalties {lanes} lanes"] = (
        penalties._weigh_kernel,
        {"logits": "*fp32", "counts": "*i32", "slots": "*i64", "tokens": "*i64", "parents": "*i32",
         **dict.fromkeys(("frequency", "presence", "repetition"), "*fp32"),
         **dict.fromkeys(("V", "Q", "D", "tiles", "step"), "i32")},
        {"TILE": penalties._TILE, "NODES": penalties._NODES, "S": lanes},
        4,
    )  # fmt: skip
CASES["log-sum-exp"] = (
    lse._lse_kernel,
    {"logits": "*bf16", "out": "*fp32", "V": "i32", "stride": "i32", "P": "i32"},
    {"TILE": lse._TILE, "TILES": lse._TILES},
    8,
)


def uncovered() -> set[str]:
    """Kernels that the package launches and that no case compiles."""
    launched: set[str] = set()
    for path in Path(attention.__file__).parents[1].rglob("*.py"):
        launched |= set(re.findall(r"^\s*(\w+)\[\(", path.read_text(), re.MULTILINE))
    covered = {kernel.fn.__name__ for kernel, *_ in CASES.values()} | {attention._verify_kernel.fn.__name__}
    return launched - covered


def main(capabilities: list[int]) -> int:
    """Compile; return the number of failures."""
    failed = 0
    for name in sorted(uncovered()):
        failed += 1
        print(f"{name} FAILED: launched by the package and compiled by no case here", flush=True)
    for name in (*CASES, *ATTENTION):
        line = f"{name:24}"
        for capability in capabilities:
            kernel, signature, constants, warps = CASES.get(name) or attention_case(capability, *ATTENTION[name])
            types = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            try:
                done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
                spills = getattr(done.metadata, "n_spills", 0) or 0
                if done.metadata.shared > SHARED[capability]:
                    raise ValueError(f"{done.metadata.shared} bytes of shared memory")
                line += f"  sm_{capability} {len(done.asm['cubin']):6d} B"
                if spills:
                    line += f" ({spills} spills)"
            except Exception as error:  # whatever the compiler throws is the finding
                failed += 1
                line += f"  sm_{capability} FAILED {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        print(line, flush=True)
    return failed


if __name__ == "__main__":
    wanted = [int(a) for a in sys.argv[1:]] or list(SHARED)
    if unknown := set(wanted) - set(SHARED):
        print(f"no such GPU here: sm_{min(unknown)}; there are {', '.join(map(str, SHARED))}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if main(wanted) else 0)
