# ruff: noqa: B023, E501 (each timed launch runs before its loop goes on)
"""Check the DDTree kernels on this GPU against their references, then time them. Writes one JSON file.

usage: kernels.py OUT.json [--cases N] [--seed S]

Checks come first and use fresh random inputs; a failed check ends the run without timings.
Times are medians over replays of a CUDA graph that holds many launches on rotating inputs, divided by their number:
what a launch costs inside the drafter's graph.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests"), str(Path(__file__).parents[2] / "patches/sglang_ddtree/src")]

from kernels_oracle import ancestors, heap_tree, random_tables, walk  # noqa: E402

GOALS = {("build", 63, 1): 50.0, ("build", 127, 1): 100.0, ("build", 63, 32): 150.0}
BATCH = 32


def oracle_batch(job: tuple[int, int]) -> dict[str, Any]:
    """One batch of random cases of one shape, with the heap's answer. Runs in a worker process without torch."""
    seed, count = job
    rng = np.random.default_rng(seed)
    depth, vocab = int(rng.integers(1, 32)), int(rng.integers(1, 130))
    budget = int(rng.integers(1, 256)) if rng.random() < 0.2 else int(rng.integers(1, 97))
    k = int(min(budget, vocab)) if rng.random() < 0.8 else int(rng.integers(1, min(budget, vocab) + 1))
    tables = [random_tables(rng, depth, vocab, k) for _ in range(count)]
    roots = rng.integers(0, vocab, count)
    spine = bool(rng.random() < 0.5)
    trees = [heap_tree(lp, ids, int(r), budget, spine=spine) for (lp, ids), r in zip(tables, roots, strict=True)]
    pad = budget + 1
    want = {
        "tokens": np.array([t.tokens + [0] * (pad - len(t.tokens)) for t in trees]),
        "parents": np.array([t.parents + [-1] * (pad - len(t.tokens)) for t in trees]),
        "depths": np.array([t.depths + [0] * (pad - len(t.tokens)) for t in trees]),
        "scores": np.array([t.scores + [np.float32(-np.inf)] * (pad - len(t.tokens)) for t in trees], dtype=np.float32),
        "counts": np.array([len(t.tokens) for t in trees]),
    }
    target = rng.integers(0, vocab, (count, pad))
    for b, t in enumerate(trees):  # agree with a random path, so that walks go deep
        node = 0
        while rng.random() < 0.85:
            children = [n for n in range(len(t.parents)) if t.parents[n] == node]
            if not children:
                break
            node_next = int(rng.choice(children))
            target[b, node] = t.tokens[node_next]
            node = node_next
    walks = [walk(t.tokens, t.parents, target[b].tolist()) for b, t in enumerate(trees)]
    masks = np.stack([ancestors(t.parents, pad) for t in trees]) if seed % 20 == 0 else None
    return {
        "budget": budget, "spine": spine, "depth": depth, "k": k, "roots": roots, "target": target, "want": want, "masks": masks,
        "logp": np.stack([t[0] for t in tables]), "ids": np.stack([t[1] for t in tables]), "walks": walks,
        "prefix": rng.integers(0, 5000, count),
    }  # fmt: skip


def check(cases: int, seed: int) -> dict[str, Any]:
    """Compare every kernel with its reference. Raises AssertionError at the first difference."""
    import torch

    from sglang_ddtree.kernels import (
        KVBuffers,
        TreeBuffers,
        WalkBuffers,
        build_tree,
        full_mask_cells,
        move_accepted_kv,
        walk_tree,
        write_full_mask,
        write_packed_mask,
    )  # fmt: skip

    started = time.perf_counter()
    jobs = [(seed * 10_000_000 + i, BATCH) for i in range(-(-cases // BATCH))]
    deep = ties = done = masked = 0
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for case in pool.map(oracle_batch, jobs, chunksize=4):
            n, width = len(case["roots"]), case["budget"] + 1
            cuda = lambda a: torch.from_numpy(np.ascontiguousarray(a)).cuda()  # noqa: E731
            out = TreeBuffers.allocate(n, width, "cuda")
            for t in vars(out).values():
                t.fill_(77)
            prefix = cuda(case["prefix"])
            build_tree(
                cuda(case["logp"]), cuda(case["ids"]), None, cuda(case["roots"]), prefix, out, spine=case["spine"]
            )
            for name, want in case["want"].items():
                got = getattr(out, name).cpu().numpy()
                assert np.array_equal(got, want), (
                    f"{name} differ: budget {case['budget']} depth {case['depth']} k {case['k']}"
                )
            paths = WalkBuffers.allocate(n, case["depth"] + 1, "cuda")
            for t in vars(paths).values():
                t.fill_(-9)
            walk_tree(out.tokens, out.parents, cuda(case["target"]), prefix, paths)
            index, text = paths.accept_index.cpu().tolist(), paths.out_tokens.cpu().tolist()
            for b, (path, tokens) in enumerate(case["walks"]):
                gap = case["depth"] + 1 - len(path)
                assert index[b] == [b * width + p for p in path] + [-1] * gap, "accept_index"
                assert text[b] == tokens + [0] * gap, "out_tokens"
                deep = max(deep, len(path) - 1)
            assert paths.new_seq_lens.cpu().tolist() == [
                int(p) + len(w[0]) for p, w in zip(case["prefix"], case["walks"], strict=True)
            ]
            if case["masks"] is not None:
                flat = torch.full(
                    (full_mask_cells(n, width, int(case["prefix"].sum())),), 9, dtype=torch.uint8, device="cuda"
                )
                write_full_mask(out.parents, prefix, flat, depth=case["depth"])
                packed = torch.empty((n, width, -(-width // 32)), dtype=torch.int32, device="cuda")
                write_packed_mask(out.parents, packed, depth=case["depth"])
                bits = ((packed.cpu().numpy()[..., None] >> np.arange(32)) & 1).reshape(n, width, -1)[..., :width]
                assert (bits == case["masks"]).all(), "packed mask"
                at, host = 0, flat.cpu().numpy()
                for b, seq in enumerate(case["prefix"]):
                    rows = host[at : at + width * (seq + width)].reshape(width, seq + width)
                    assert (rows[:, seq:] == case["masks"][b]).all(), "full mask"
                    assert (rows[:, :seq] == 9).all(), "full mask wrote a prefix cell"
                    at += width * (seq + width)
                masked += n
            s = case["want"]["scores"]
            ties += int(sum(len(np.unique(r[np.isfinite(r)])) < np.isfinite(r).sum() for r in s))
            done += n
    rng = np.random.default_rng(seed)
    moves = 0
    for trial in range(300):
        width, steps, batch = int(rng.choice([8, 16, 64, 128])), int(rng.integers(2, 17)), int(rng.integers(1, 33))
        slots, heads = 8192, int(rng.choice([1, 3, 8]))
        dtype = [torch.bfloat16, torch.float32][trial % 2]
        bufs = [torch.randn((slots, heads, 128), device="cuda", dtype=dtype) for _ in range(4)]
        kv = KVBuffers.of(bufs)
        window = torch.from_numpy(rng.permutation(slots)[: batch * width].reshape(batch, width)).cuda()
        index = torch.full((batch, steps), -1, dtype=torch.int32)
        for b in range(batch):
            n = int(rng.integers(1, min(steps, width) + 1))
            path = [0, *sorted(rng.choice(np.arange(1, min(width, 3 * n + 1)), n - 1, replace=False).tolist())]
            index[b, :n] = torch.tensor([b * width + p for p in path], dtype=torch.int32)
        valid = index.view(-1) >= 0
        source = window.reshape(-1).cpu()[index.view(-1)[valid].long()].cuda()
        target = window.cpu()[:, :steps].reshape(-1) if width >= steps else None
        if target is None:
            continue
        target = target[valid].cuda()
        want = [t.clone() for t in bufs]
        for t, w in zip(bufs, want, strict=True):
            w[target] = t[source]
        move_accepted_kv(kv, window, index.cuda())
        assert all(torch.equal(t, w) for t, w in zip(bufs, want, strict=True)), "kv move"
        moves += batch
    return {"trees": done, "trees with ties": ties, "deepest walk": deep, "masks": masked, "kv moves": moves,
            "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def graph_time(launch: Any, sets: int, replays: int = 40) -> list[float]:
    """Microseconds a launch: ``launch(i)`` for ``sets`` input sets in one graph; one figure a replay."""
    import torch

    for i in range(sets):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            launch(i)
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / sets)
    return times


def timings() -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Time every kernel at the widths and batches of the product."""
    import torch

    from sglang_ddtree.kernels import (
        KVBuffers,
        TreeBuffers,
        WalkBuffers,
        build,
        build_tree,
        move_accepted_kv,
        walk_tree,
        write_full_mask,
    )  # fmt: skip

    rows: list[dict[str, Any]] = []
    raw: dict[str, list[float]] = {}
    sets, depth, vocab = 16, 15, 151_936
    gen = torch.Generator(device="cuda").manual_seed(1)

    def record(kind: str, budget: int, batch: int, note: str, launch: Any) -> None:
        what = f"{kind}, budget {budget}, batch {batch}{note}"
        raw[what] = [round(t, 3) for t in graph_time(launch, sets)]
        value, goal = statistics.median(raw[what]), GOALS.get((kind, budget, batch)) if not note else None
        rows.append({"what": what, "value": round(value, 2), "unit": "us", "goal": goal,
                     "ok": None if goal is None else value <= goal})  # fmt: skip

    for batch in (1, 8, 32):
        for budget in (7, 15, 31, 63, 127, 255):
            width, k = budget + 1, min(budget, 64)
            logits = [torch.randn((batch, depth, vocab // 8), device="cuda", generator=gen) * 3 for _ in range(4)]
            tops = [x.topk(k) for x in logits]
            lse = [x.logsumexp(-1) for x in logits]
            out = TreeBuffers.allocate(batch, width, "cuda")
            root = torch.ones(batch, dtype=torch.int64, device="cuda")
            prefix = torch.full((batch,), 1000, dtype=torch.int64, device="cuda")
            for note, spine in (("", False), (", chain first", True)):
                record(
                    "build",
                    budget,
                    batch,
                    note,
                    lambda i: build_tree(tops[i % 4][0], tops[i % 4][1], lse[i % 4], root, prefix, out, spine=spine),
                )
            if budget in (63, 255) and batch in (1, 32):
                for warps in (2, 4):
                    record("build", budget, batch, f", {warps} warps", lambda i: build._build_kernel[(batch,)](
                        tops[i % 4][0], tops[i % 4][1], lse[i % 4], root, prefix, out.tokens, out.parents, out.depths,
                        out.positions, out.scores, out.counts, out.stats, depth, k, width, 1, 1,
                        S=width, SPINE=False, HAS_LSE=True, num_warps=warps))  # fmt: skip
            mask = torch.zeros(batch * width * (1000 + width), dtype=torch.uint8, device="cuda")
            record("mask", budget, batch, "", lambda i: write_full_mask(out.parents, prefix, mask, depth=depth))
            paths = WalkBuffers.allocate(batch, depth + 1, "cuda")
            target = torch.randint(0, 1000, (batch, width), device="cuda")
            parents, node = out.parents[0].tolist(), width - 1
            while node > 0:  # agree with the last node's path
                target[:, parents[node]] = out.tokens[:, node]
                node = parents[node]
            record("walk", budget, batch, "", lambda i: walk_tree(out.tokens, out.parents, target, prefix, paths))
            bufs = [torch.randn((batch * width + 64, 8, 128), device="cuda").bfloat16() for _ in range(72)]
            kv = KVBuffers.of(bufs)
            window = torch.arange(batch * width, device="cuda").view(batch, width)
            move = torch.full((batch, depth + 1), -1, dtype=torch.int32, device="cuda")
            n = min(8, width)
            path = [0, *range(1, 1 + (n - 1) // 2), *range(width - (n - 1 - (n - 1) // 2), width)]
            move[:, :n] = torch.tensor(path, device="cuda") + torch.arange(batch, device="cuda")[:, None] * width
            record(
                "kv move of half a path of 8, 36 layers",
                budget,
                batch,
                "",
                lambda i: move_accepted_kv(kv, window, move),
            )
            move[:, :n] = torch.arange(n, device="cuda") + torch.arange(batch, device="cuda")[:, None] * width
            record("kv move, path in place", budget, batch, "", lambda i: move_accepted_kv(kv, window, move))

            def whole(i: int) -> None:
                build_tree(tops[i % 4][0], tops[i % 4][1], lse[i % 4], root, prefix, out)
                write_full_mask(out.parents, prefix, mask, depth=depth)
                walk_tree(out.tokens, out.parents, target, prefix, paths)
                move_accepted_kv(kv, window, paths.accept_index)

            record("all four", budget, batch, "", whole)
    return rows, raw


def main() -> int:
    """Check, time, write, print a short table."""
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    ask.add_argument("out", type=Path)
    ask.add_argument("--cases", type=int, default=100_000)
    ask.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    args = ask.parse_args()
    try:
        import torch
        import triton
    except ImportError:
        print("the kernel benchmark needs PyTorch and Triton in this Python environment", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("the kernel benchmark needs an NVIDIA GPU, and this machine has none", file=sys.stderr)
        return 2
    checked = check(args.cases, args.seed)
    print("checked", checked, flush=True)
    rows, raw = timings()
    cases = {"what": "random trees equal to the heap, node for node", "value": checked["trees"], "unit": "trees",
             "goal": 100_000, "ok": checked["trees"] >= 100_000}  # fmt: skip
    args.out.write_text(json.dumps({
        "machine": {"gpu": torch.cuda.get_device_name(0), "count": 1},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "seed": args.seed, "command": f"dev/gpu/kernels.py OUT --cases {args.cases} --seed {args.seed}",
        "rows": [cases, *rows], "checked": checked, "raw": raw,
    }, indent=1) + "\n")  # fmt: skip
    for r in rows:
        if ", budget 63," in r["what"] or r["goal"]:
            print(
                f"{r['what']:60} {r['value']:8.2f} us  goal {r['goal']}  {'' if r['ok'] is None else 'ok' if r['ok'] else 'MISSED'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
