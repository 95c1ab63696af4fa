"""Compile every DDTree kernel for every supported GPU architecture; no GPU needed. Prints one line a kernel.

usage: compile_kernels.py [CAPABILITY...]      (default: 80 89 90 100 120)
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ddtree.kernels import account, attention, build, kv_move, lse, mask, walk, window

TREE_OUT = {"tokens": "*i64", "parents": "*i32", "depths": "*i32", "positions": "*i64", "scores": "*fp32",
            "counts": "*i32", "stats": "*fp32"}  # fmt: skip
WALK = {"tokens": "*i64", "parents": "*i32", "target": "*i64", "prefix": "*i64", "accept_index": "*i32",
        "accept_len": "*i32", "commit_lens": "*i32", "bonus": "*i64", "out_tokens": "*i64", "new_seq_lens": "*i64",
        "Q": "i32", "D": "i32"}  # fmt: skip
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a block; 101,376 on the others
# name: kernel, runtime arguments, constants, warps
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {}
for dtype in ("fp32", "bf16"):
    for lanes in (16, 64, 256):
        CASES[f"build {dtype} {lanes} lanes"] = (
            build._build_kernel,
            {"vals": f"*{dtype}", "ids": "*i64", "lse": "*fp32", "root": "*i64", "prefix": "*i64", **TREE_OUT,
             "L": "i32", "K": "i32", "Q": "i32", "root_stride": "i32", "prefix_stride": "i32"},
            {"S": lanes, "SPINE": True, "HAS_LSE": True},
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
for dim, group, stages, block_n, block_m, warps, split, tree in (
    (64, 4, 2, 64, 16, 4, True, True),
    (64, 4, 2, 64, 64, 4, True, True),
    (64, 4, 2, 64, 128, 8, False, True),
    (128, 4, 2, 64, 64, 4, True, True),
    (128, 4, 2, 64, 64, 4, False, False),
    (128, 4, 2, 64, 128, 8, False, True),
    (256, 8, 2, 32, 64, 4, True, True),
):
    CASES[f"attention {dim}, {block_m} rows {'split' if split else 'whole'} {'tree' if tree else 'block'}"] = (
        attention._verify_kernel,
        {
            **dict.fromkeys(("q", "k_new", "v_new", "o", "k_cache", "v_cache"), "*bf16"),
            "indptr": "*i32",
            "indices": "*i64",
            "words": "*i32",
            "part": "*fp32",
            "part_ml": "*fp32",
            "arrived": "*i32",
            "scale": "fp32",
            **dict.fromkeys(("Q", "W", "splits", *STRIDES), "i32"),
        },
        {"G": group, "D": dim, "BLOCK_D": dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "TREE_N": 32, "TREE": tree,
         "SPLIT": split, "MIN": attention.MIN_SPLIT, "STAGES": stages},
        warps,
    )  # fmt: skip
CASES["list prefixes"] = (
    attention._prefix_kernel,
    {"table": "*i32", "rows": "*i64", "lens": "*i64", "indptr": "*i32", "indices": "*i64", "stride": "i32",
     "batch": "i32"},
    {"BATCH": 32, "BLOCK": 512},
    4,
)  # fmt: skip
CASES["account"] = (
    account._account_kernel,
    {"scores": "*fp32", "depths": "*i32", "counts": "*i32", "accept_len": "*i32", "slots": "*i64", "sums": "*fp64",
     "Q": "i32", "D": "i32", "stride": "i32"},
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
CASES["log-sum-exp"] = (
    lse._lse_kernel,
    {"logits": "*bf16", "out": "*fp32", "V": "i32", "stride": "i32", "P": "i32"},
    {"TILE": lse._TILE, "TILES": lse._TILES},
    8,
)


def main(capabilities: list[int]) -> int:
    """Compile; return the number of failures."""
    failed = 0
    for name, (kernel, signature, constants, warps) in CASES.items():
        types = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
        line = f"{name:24}"
        for capability in capabilities:
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            try:
                done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
                spills = getattr(done.metadata, "n_spills", 0) or 0
                if done.metadata.shared > SHARED.get(capability, 101_376):
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
    sys.exit(1 if main([int(a) for a in sys.argv[1:]] or [80, 89, 90, 100, 120]) else 0)
