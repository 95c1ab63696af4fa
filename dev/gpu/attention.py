# ruff: noqa: E501 (tables are printed in one piece)
"""Verify attention on a GPU: ours against SGLang's extend kernel, causal and with a mask; correctness first.

usage: attention.py OUT.json [--sweep] [--compile]

--sweep: also other cuts of the work than the planned one. --compile: only compile the kernels, in several processes.

Times are microseconds a launch, by CUDA graphs of one launch a layer over 36 layers' separate KV pools, so that KV comes
from memory as it does in an engine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sglang_ddtree.kernels import write_full_mask, write_packed_mask
from sglang_ddtree.kernels.attention import Scratch, Shape, plan, verify_attention
from sglang_ddtree.tree import ancestor_mask

LAYERS = 36
WIDTHS, BATCHES = (2, 8, 16, 32, 64, 128), (1, 3, 9, 33)  # of the check
MODELS = {"64x64": (64, 16, 64), "32x128": (32, 8, 128)}


class Case:
    """Random trees after random prefixes; every layer has KV pools of its own."""

    def __init__(self, model: str, batch: int, width: int, prefix: int, layers: int, seed: int = 0) -> None:
        heads, kv, dim = MODELS[model]
        rng, torch_rng = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
        self.batch, self.width, self.dim, self.heads, self.kv = batch, width, dim, heads, kv
        lens = [max(1, int(prefix * rng.uniform(0.8, 1.2))) for _ in range(batch)]
        self.pool = max(sum(lens) + 1, 4096)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=torch_rng, device="cuda", dtype=torch.bfloat16)

        self.k = [noise(self.pool, kv, dim) for _ in range(layers)]
        self.v = [noise(self.pool, kv, dim) for _ in range(layers)]
        qkv = noise(batch * width, (heads + 2 * kv) * dim)
        self.q = qkv[:, : heads * dim].view(-1, heads, dim)
        self.k_new = qkv[:, heads * dim : (heads + kv) * dim].view(-1, kv, dim)
        self.v_new = qkv[:, (heads + kv) * dim :].view(-1, kv, dim)
        self.lens = torch.tensor(lens, device="cuda")
        self.indptr = torch.tensor([0, *self.lens.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        self.indices = torch.randperm(self.pool, device="cuda")[: sum(lens)]
        self.parents = torch.tensor(
            [[-1, *(rng.randint(max(0, i - 6), i - 1) for i in range(1, width))] for _ in range(batch)],
            dtype=torch.int32,
            device="cuda",
        )
        depth = min(width, 31)
        self.parents = limit(self.parents, 15)
        self.words = torch.zeros((batch, width, (width + 31) // 32), dtype=torch.int32, device="cuda")
        write_packed_mask(self.parents, self.words, depth=depth)
        self.mask = torch.zeros(width * (sum(lens) + batch * width), dtype=torch.uint8, device="cuda")
        write_full_mask(self.parents, self.lens, self.mask, depth=depth)
        self.mask_indptr = torch.tensor([0, *(width * (self.lens + width)).cumsum(0).tolist()], device="cuda")
        self.qo = torch.arange(0, (batch + 1) * width, width, device="cuda")
        self.out = torch.full((batch * width, heads, dim), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.scratch = Scratch("cuda", torch.cuda.get_device_properties(0).multi_processor_count, dim)

    def ours(self, shape: Shape, tree: bool = True) -> Callable[[int], None]:
        return lambda i: verify_attention(self.q, self.k_new, self.v_new, self.out, self.k[i], self.v[i], self.indptr, self.indices, self.words if tree else None, self.scratch, width=self.width, scale=self.dim**-0.5, shape=shape)  # fmt: skip

    def stock(self, kind: str) -> Callable[[int], None]:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        def run(i: int) -> None:
            extend_attention_fwd(self.q, self.k_new.contiguous(), self.v_new.contiguous(), self.out, self.k[i], self.v[i], self.qo, self.indptr, self.indices, self.mask if kind == "mask" else None, kind != "full", self.mask_indptr, self.width, 1.0, 1.0, self.dim**-0.5)  # fmt: skip

        return run

    def reference(self, seen: torch.Tensor) -> torch.Tensor:
        """Layer 0 in float32. seen [batch, width, width]."""
        out = torch.empty(self.out.shape, device="cuda")
        group, w = self.heads // self.kv, self.width
        for b in range(self.batch):
            slots = self.indices[self.indptr[b] : self.indptr[b + 1]]
            rows = slice(b * w, (b + 1) * w)
            k = torch.cat([self.k[0][slots], self.k_new[rows]]).float().repeat_interleave(group, 1)
            v = torch.cat([self.v[0][slots], self.v_new[rows]]).float().repeat_interleave(group, 1)
            s = torch.einsum("qhd,khd->hqk", self.q[rows].float(), k) * self.dim**-0.5
            open_ = torch.ones(w, len(slots), dtype=torch.bool, device="cuda")
            s = s.masked_fill(~torch.cat([open_, seen[b]], 1), float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", s, v)
        return out


def limit(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """Hang nodes that would be too deep on the root."""
    table = parents.tolist()
    for row in table:
        level = [0] * len(row)
        for i in range(1, len(row)):
            if level[row[i]] + 1 > depth:
                row[i] = 0
            level[i] = level[row[i]] + 1
    return torch.tensor(table, dtype=torch.int32, device="cuda")


def check() -> dict[str, Any]:
    """Largest relative error against float32 over many cases, ours beside SGLang's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = random.Random(5)
    worst, theirs, count = 0.0, 0.0, 0
    for model in MODELS:
        for width in WIDTHS:
            for batch in BATCHES:
                case = Case(
                    model, batch, width, rng.choice((1, 40, 200, 1500)) if batch < 33 else 150, 1, rng.randint(0, 9**9)
                )
                seen = ancestor_mask(case.parents, 31)
                best = plan(batch, width, case.heads, case.kv, case.dim, case.scratch.processors)
                for tree in (True, False):
                    want = case.reference(seen if tree else torch.ones_like(seen))
                    for _ in range(3):
                        case.out.fill_(float("nan"))
                        case.ours(best, tree)(0)
                        error = float((case.out.float() - want).norm() / want.norm())
                        if not error < 1e-2:
                            raise SystemExit(f"wrong: {model} width {width} batch {batch} tree {tree} {best}: {error}")
                        worst = max(worst, error)
                    case.stock("mask" if tree else "full")(0)
                    theirs = max(theirs, float((case.out.float() - want).norm() / want.norm()))
                    count += 1
                if int(case.scratch.arrived.abs().sum()):
                    raise SystemExit("a counter was not put back")
    return {"cases": count, "worst": worst, "worst of SGLang's": theirs}


def microseconds(run: Callable[[int], None], layers: int) -> float:
    """A launch, median of five."""
    for i in range(2):
        run(i % layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(layers):
            run(i)
    graph.replay()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(3):
            graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / 3 / layers)
    return statistics.median(times)


def cuts(base: Shape) -> list[Shape]:
    """Other cuts of the same work."""
    out = [base]
    for block_m in (16, 32, 64, 128):
        for splits in sorted({1, base.splits}):
            out.append(replace(base, block_m=block_m, splits=splits))
    for stages in (1, 2, 3, 4):
        out.append(replace(base, stages=stages))
    for block_n in (32, 128):
        out.append(replace(base, block_n=block_n))
    for warps in (2, 8):
        out.append(replace(base, warps=warps))
        out.append(replace(base, warps=warps, block_m=128, splits=1))
    return list(dict.fromkeys(out))


def fits(case: Case, s: Shape) -> bool:
    tiles = -(-case.heads // case.kv * case.width // s.block_m) * case.kv * case.batch
    return (s.block_m <= 64 or s.splits == 1) and (s.splits == 1 or tiles * s.splits <= 2 * case.scratch.processors)


def warm(job: tuple[str, int, int, Shape | None]) -> None:
    """Compile one cut, in a process of its own."""
    model, batch, width, shape = job
    case = Case(model, batch, width, 64, 1)
    if shape is None:
        for kind in ("mask", "full", "causal"):
            case.stock(kind)(0)
    elif fits(case, shape):
        case.ours(shape)(0)
        case.ours(shape, tree=False)(0)
    torch.cuda.synchronize()


def main() -> int:
    """Command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("out", type=Path)
    ask.add_argument("--sweep", action="store_true")
    ask.add_argument("--compile", action="store_true")
    args = ask.parse_args()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    points = [
        (m, b, w, p) for m in MODELS for b in (1, 8, 32) for w in (16, 64) for p in ((200, 4000) if b < 32 else (200,))
    ]
    if args.compile:
        jobs: list[tuple[str, int, int, Shape | None]] = [(m, 1, 16, None) for m in MODELS]
        jobs += [(m, b, w, plan(b, w, *MODELS[m], processors)) for m in MODELS for w in WIDTHS for b in BATCHES]
        for m, b, w, _ in points if args.sweep else ():
            jobs += [(m, b, w, s) for s in cuts(plan(b, w, *MODELS[m], processors))]
        once: dict[Any, tuple[str, int, int, Shape | None]] = {}
        for job in jobs:
            s = job[3]
            key = s and (s.block_m, s.block_n, s.tree_n, s.splits > 1, s.warps, s.stages)
            once.setdefault((job[0], key), job)
        with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
            list(pool.map(warm, once.values()))
        print(f"compiled {len(once)} variants", flush=True)
        return 0
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "check": check(), "times": []}
    print(record["check"], flush=True)
    for m, b, w, p in points:
        case = Case(m, b, w, p, LAYERS)
        best = plan(b, w, *MODELS[m], processors)
        row: dict[str, Any] = {
            "model": m,
            "batch": b,
            "width": w,
            "prefix": p,
            "plan": str(best),
            "ours": microseconds(case.ours(best), LAYERS),
        }
        for kind in ("mask", "causal", "full"):
            row[kind] = microseconds(case.stock(kind), LAYERS)
        if args.sweep:
            row["cuts"] = sorted(
                (round(microseconds(case.ours(s), LAYERS), 2), str(s)[5:]) for s in cuts(best) if fits(case, s)
            )
        record["times"].append(row)
        print(
            {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items() if k != "cuts"},
            *(f"\n      {t} {s}" for t, s in row.get("cuts", [])[:4]),
            flush=True,
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        del case
    return 0


if __name__ == "__main__":
    sys.exit(main())
