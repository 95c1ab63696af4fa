# ruff: noqa: E501 (tables are printed in one piece)
"""The engine on a GPU: parity with plain decoding, and throughput of plain, chain and trees. Writes one JSON file.

usage: engine.py OUT.json --pair FOLDER --prompts IDS.json --phase parity,speed,steps,prefill,profile,sample,requests [options]

All engines live at once on the GPU and take turns in random order, so that runs are paired in time. Each (engine,
concurrency) runs once unmeasured first. A run's tokens, seconds, verify steps, accepted drafts and the hash of its
outputs are kept, on disk as soon as the run is over (``journal.py``): what cuts the benchmark off loses nothing measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engines import Child, read_prompts, start
from journal import Journal


def summary(order: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    verify, correct = sum(got["verify"]), sum(got["correct"])
    accept = [c / v + 1 for v, c in zip(got["verify"], got["correct"], strict=True) if v]
    return {
        "concurrency": order["concurrency"],
        "requests": len(got["outputs"]),
        "tokens": got["tokens"],
        "seconds": round(got["seconds"], 5),
        "tok_s": round(got["tokens"] / got["seconds"], 2),
        "verify": verify,
        "correct": correct,
        "accept": round(statistics.mean(accept), 4) if accept else 1.0,
        **{k: got[k] for k in ("itl_p50", "itl_p99", "gap_p50") if k in got},
        "sha256": hashlib.sha256(json.dumps(got["outputs"]).encode()).hexdigest()[:16],
    }


def parity(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """Outputs of every engine against plain's, and the top-2 gap where they part."""
    prompts = prompts[: args.parity_count]
    order = {
        "prompts": prompts,
        "concurrency": args.parity_concurrency,
        "params": {"temperature": 0, "max_new_tokens": args.tokens},
    }
    first = next(name for name in engines if name.startswith("plain"))
    plain = engines[first].ask("run", order)
    journal.put("plain", summary(order, plain))
    again = engines[first].ask("run", order | {"concurrency": 1, "prompts": prompts[:40]})
    repeat = sum(a == b for a, b in zip(again["outputs"], plain["outputs"], strict=False))
    journal.put("plain at concurrency 1 equals plain", f"{repeat} of {len(again['outputs'])}")
    print("plain", summary(order, plain), "repeat", repeat, flush=True)
    for name, child in engines.items():
        if name == first:
            continue
        try:
            got = child.ask("run", order)
        except RuntimeError as error:
            print("FAILED", str(error)[-1200:], flush=True)
            journal.add("against", {"engine": name, "error": str(error)[-500:]})
            continue
        parted = []
        for i, (a, b) in enumerate(zip(plain["outputs"], got["outputs"], strict=True)):
            if a != b:
                at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                parted.append({"prompt": i, "at": at, "plain": a[at : at + 1], "other": b[at : at + 1]})
        if parted:
            probe = [prompts[d["prompt"]] + plain["outputs"][d["prompt"]][: d["at"]] for d in parted]
            for d, top in zip(parted, engines[first].ask("gap", {"prompts": probe})["top"], strict=True):
                d["gap"] = round(abs(top[0][0] - top[1][0]), 5)
                d["between the top two"] = {top[0][1], top[1][1]} >= {*d["plain"], *d["other"]}
        row = {"engine": name, "equal": len(prompts) - len(parted), "of": len(prompts),
               "largest gap": max((d["gap"] for d in parted), default=0.0), "parted": parted, **summary(order, got)}  # fmt: skip
        journal.add("against", row)
        print(
            {k: v for k, v in row.items() if k != "parted"}, "gaps", sorted(d["gap"] for d in parted)[-5:], flush=True
        )


def speed(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """Closed loops at each concurrency, engines taking turns."""
    rng = random.Random(args.seed)
    runs: list[dict[str, Any]] = []
    deadline = time.monotonic() + args.budget
    only = {int(c): names.split("/") for c, _, names in (p.partition("=") for p in args.only.split(";") if p)}
    for concurrency in args.concurrency:
        count = max(4, concurrency * 2)
        here = [n for n in only.get(concurrency, list(engines)) if n in engines]
        for repeat in range(-1, args.repeats):
            turn = list(here)
            rng.shuffle(turn)
            chosen = [prompts[(i + max(repeat, 0) * count) % len(prompts)] for i in range(count)]
            order = {"prompts": chosen, "concurrency": concurrency, "stream": True,
                     "params": {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}}  # fmt: skip
            if args.varied:  # answers of one length would end, and be followed by prefills, together
                order["lengths"] = [rng.randint(args.tokens // 2, args.tokens * 3 // 2) for _ in chosen]
            for name in turn:
                got = engines[name].ask("run", order)
                if repeat >= 0:
                    runs.append(journal.add("runs", {"engine": name, "repeat": repeat, **summary(order, got)}))
            if time.monotonic() > deadline:
                journal.put("out of time", f"after repeat {repeat} at concurrency {concurrency}")
                print("out of time", flush=True)
                return
        for name in engines:
            mine = [r for r in runs if r["engine"] == name and r["concurrency"] == concurrency]
            if mine:
                print(f"c{concurrency:<3} {name:16} {statistics.median(r['tok_s'] for r in mine):9.1f} tok/s  "
                      f"accept {statistics.mean(r['accept'] for r in mine):.3f}  spread {min(r['tok_s'] for r in mine):.0f}-{max(r['tok_s'] for r in mine):.0f}  "
                      f"itl {statistics.median(r['itl_p50'] for r in mine):.2f} {statistics.median(r['itl_p99'] for r in mine):.2f}  runs {len(mine)}", flush=True)  # fmt: skip


def steps(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """Cost of one step: the same prompt in every slot, so that all requests step together. ``step_ms`` is the median
    time between two answers of a request; ``spread_ms`` the whole run over its steps, prefill included."""
    rng = random.Random(args.seed)
    runs: list[dict[str, Any]] = []
    for batch in args.batches:
        order = {"prompts": [prompts[0]] * batch, "concurrency": batch, "stream": True,
                 "params": {"temperature": 0, "max_new_tokens": args.step_tokens, "ignore_eos": True}}  # fmt: skip
        for repeat in range(-1, args.step_repeats):
            turn = list(engines)
            rng.shuffle(turn)
            for name in turn:
                got = engines[name].ask("run", order)
                count = max(got["verify"]) or args.step_tokens
                if repeat >= 0:
                    run = {"engine": name, "repeat": repeat, "steps": count, "step_ms": got["gap_p50"],
                           "spread_ms": round(got["seconds"] * 1000 / count, 4), **summary(order, got)}  # fmt: skip
                    runs.append(journal.add("runs", run))
        for name in engines:
            mine = [r["step_ms"] for r in runs if r["engine"] == name and r["concurrency"] == batch]
            print(
                f"batch {batch:<3} {name:16} {statistics.median(mine):8.3f} ms a step  spread {min(mine):.3f}-{max(mine):.3f}",
                flush=True,
            )


def prefill(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """What a prefill costs: seconds from a request to its only token, one at a time. ``new``: prompts that no engine has
    seen, by a beginning of their own; ``cached``: the same again, of which only the last token is computed."""
    rng = random.Random(args.seed)
    runs: list[dict[str, Any]] = []
    for repeat in range(-1, args.step_repeats):
        fresh = [[rng.randrange(100, 5000) for _ in range(4)] + p for p in rng.sample(prompts, 16)]
        for name in rng.sample(list(engines), len(engines)):
            for kind in ("new", "cached"):
                order = {"prompts": fresh, "concurrency": 1, "params": {"temperature": 0, "max_new_tokens": 1}}
                got = engines[name].ask("run", order)
                if repeat >= 0:
                    ms = round(got["seconds"] * 1000 / len(fresh), 3)
                    run = {"engine": name, "kind": kind, "repeat": repeat, "prefill_ms": ms}
                    runs.append(journal.add("runs", run))
    for name in engines:
        text = []
        for kind in ("new", "cached"):
            mine = [r["prefill_ms"] for r in runs if (r["engine"], r["kind"]) == (name, kind)]
            text.append(f"{kind} {statistics.median(mine):7.2f} ms ({min(mine):.2f}-{max(mine):.2f})")
        print(f"prefill {name:16} {'  '.join(text)}", flush=True)
    for name in args.profiled.split(",") if args.profiled else []:
        folder = args.out.with_suffix("") / f"prefill-{name}"
        order = {"prompts": [[rng.randrange(100, 5000) for _ in range(4)] + p for p in prompts[:2]], "concurrency": 1,
                 "params": {"temperature": 0, "max_new_tokens": 1}}  # fmt: skip
        engines[name].ask("profile", order | {"folder": str(folder), "activities": ["CPU", "GPU"], "stack": True})


def sample(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """Temperature 1 with top-k and top-p: the third token's frequencies beside plain's, as a chi-square statistic over
    its degrees of freedom. The first token is the prefill's, the others come from trees."""
    params = {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "max_new_tokens": 3, "ignore_eos": True}
    order = {"prompts": [prompts[1]] * args.samples, "concurrency": max(args.graphs), "params": params}
    first = next(name for name in engines if name.startswith("plain"))
    counts: dict[str, dict[int, int]] = {}
    for name in (first, *engines):  # plain twice: how far two samples of one distribution are apart
        label = f"{name}, again" if name == first and counts else name
        mine: dict[int, int] = {}
        for ids in engines[name].ask("run", order)["outputs"]:
            mine[ids[2]] = mine.get(ids[2], 0) + 1
        counts[label] = mine
        pairs = [(counts[first].get(t, 0), mine.get(t, 0)) for t in {*counts[first], *mine}]
        pairs = [(a, b) for a, b in pairs if a + b >= 10]
        pairs.append((args.samples - sum(a for a, _ in pairs), args.samples - sum(b for _, b in pairs)))
        square = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
        row = {"engine": label, "chi_square": round(square, 2), "freedom": sum(1 for a, b in pairs if a + b) - 1}
        journal.add("against", row | {"drawn": sorted(mine.items())})
        print("sample", row, flush=True)


def requests(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """What a request can ask for beside greedy text, against the first plain engine: log-probabilities of the text
    where both wrote the same (and plain's own when it answers one request at a time, which is what rounding does), and
    text under regular expressions by the engines that have a grammar ("+grammar")."""
    first = next(name for name in engines if name.startswith("plain"))
    greedy = {"temperature": 0, "max_new_tokens": args.tokens}
    order = {"prompts": prompts[: args.parity_count], "concurrency": args.parity_concurrency, "params": greedy}
    seen: dict[str, dict[str, Any]] = {}
    for name, alone in ((first, False), (first, True), *((n, False) for n in engines if n != first)):
        label = f"{name}, one at a time" if alone else name
        seen[label] = engines[name].ask("run", order | {"logprob": True} | ({"concurrency": 1} if alone else {}))
        plain, mine = seen[first], seen[label]
        texts = zip(plain["outputs"], mine["outputs"], plain["logprobs"], mine["logprobs"], strict=True)
        off = sorted(abs(x - y) for ids, others, a, b in texts if ids == others for x, y in zip(a, b, strict=True))
        at = {q: round(off[min(len(off) - 1, len(off) * q // 1000)], 5) if off else None for q in (500, 990, 999)}
        row = {"engine": label, "tokens compared": len(off), "median": at[500], "p99": at[990], "p99.9": at[999],
               "largest": round(off[-1], 5) if off else None}  # fmt: skip
        journal.add("log-probabilities", row)
        print("log-probabilities", row, flush=True)
    able = [name for name in engines if "+grammar" in name]
    for pattern in ("[a-z ]{8,40}", "(yes|no|maybe)(, (yes|no|maybe)){2,6}", "[0-9]+\\.[0-9]{2}"):
        text: dict[str, list[list[int]]] = {}
        for name in able:
            text[name] = engines[name].ask("run", order | {"params": greedy | {"regex": pattern}})["outputs"]
            equal = sum(a == b for a, b in zip(text[name], text[able[0]], strict=True))
            row = {"engine": name, "pattern": pattern, "equal": equal, "of": len(text[name]), "against": able[0]}
            journal.add("grammar", row)
            print("grammar", row, flush=True)


def profile(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal) -> None:
    """Where a decode step's time goes, and its host synchronisations, from profiler traces of the scheduler: the same
    prompt in every slot. With the GPU's activity alone the host is hardly slowed, so gaps are real."""
    import step_trace as traces

    keep = args.out.with_suffix("")
    wanted = args.profiled.split(",") if args.profiled else list(engines)
    if graphed := [name for name in wanted if {"pg", "pf"} & set(name.split("+"))]:
        raise ValueError(f"{graphed[0]}: steps are told by their graphs; profile an engine without prefill graphs")
    for batch in args.batches:
        order = {"prompts": [prompts[0]] * batch, "concurrency": batch,
                 "params": {"temperature": 0, "max_new_tokens": args.profile_tokens, "ignore_eos": True}}  # fmt: skip
        for name, child in engines.items():
            if name not in wanted:
                continue
            # the target's; the drafter's; a tree's end of a step, which is eager on several GPUs
            graphs = 1 if name.startswith("plain") else 3 if name.startswith("tree") and "+tp" not in name else 2
            child.ask("run", order)
            for activities in (["GPU"], ["CPU", "GPU"]) if batch == args.batches[0] else (["GPU"],):
                label = f"{name}-b{batch}-{'cpu' if len(activities) > 1 else 'gpu'}"
                folder = keep / label
                child.ask("profile", order | {"folder": str(folder), "activities": activities})
                deadline = time.monotonic() + 30
                while not (found := list(folder.rglob("*.json.gz"))) and time.monotonic() < deadline:
                    time.sleep(0.1)
                for file in found:
                    summed = traces.summarise(traces.read(file), graphs)
                    journal.put(label, summed)
                    print(traces.show(label, summed), flush=True)


PHASES = {"parity": parity, "speed": speed, "steps": steps, "profile": profile, "prefill": prefill, "sample": sample,
          "requests": requests}  # fmt: skip


def main() -> int:
    """Command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("out", type=Path)
    ask.add_argument("--pair", type=Path, required=True)
    ask.add_argument("--prompts", type=Path, required=True)
    ask.add_argument("--phase", type=lambda s: s.split(","), required=True, help=", ".join(PHASES))
    ask.add_argument("--only", default="", help="speed: concurrency=engine/engine;... runs only these there")
    ask.add_argument("--engines", default="plain,chain16,tree15,tree63")
    ask.add_argument("--dtype", default="bfloat16")
    ask.add_argument("--concurrency", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 32])
    ask.add_argument("--graphs", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 32])
    ask.add_argument("--count", type=int, default=10_000)
    ask.add_argument("--repeats", type=int, default=10)
    ask.add_argument("--step-repeats", type=int, default=3)
    ask.add_argument("--step-tokens", type=int, default=96)
    ask.add_argument("--profiled", default="", help="profile: these engines only")
    ask.add_argument("--profile-tokens", type=int, default=32)
    ask.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 32])
    ask.add_argument("--parity-count", type=int, default=10_000)
    ask.add_argument("--parity-concurrency", type=int, default=8)
    ask.add_argument("--samples", type=int, default=512)
    ask.add_argument("--tokens", type=int, default=96)
    ask.add_argument("--varied", action="store_true", help="speed: answers of 0.5 to 1.5 times --tokens")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--pool", type=int, default=16_384)
    ask.add_argument(
        "--start", type=float, default=900, help="seconds to wait for engines; first starts compile for minutes"
    )
    ask.add_argument("--stagger", type=float, default=1)
    ask.add_argument("--budget", type=float, default=1e9)
    args = ask.parse_args()
    try:
        import sglang
        import torch
        import triton
    except ImportError as error:
        print(f"the engine benchmark needs SGLang 0.5.23 with PyTorch and Triton: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("the engine benchmark needs an NVIDIA GPU, and this machine has none", file=sys.stderr)
        return 2
    prompts = read_prompts(args.prompts, args.pair)[: args.count]
    extra = {"dtype": args.dtype, "cuda_graph_bs_decode": args.graphs, "max_running_requests": max(args.graphs),
             "max_total_tokens": args.pool}  # fmt: skip
    wanted = args.engines.split(",")
    if unknown := [phase for phase in args.phase if phase not in PHASES]:
        print(f"unknown phase {unknown[0]!r}: {', '.join(PHASES)}", file=sys.stderr)
        return 2
    logs = args.out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    head = {
        "machine": {"gpu": torch.cuda.get_device_name(0), "count": torch.cuda.device_count()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "sglang": sglang.__version__},
        "command": " ".join(["dev/gpu/engine.py", *sys.argv[1:]]),
        "seed": args.seed,
        "pair": args.pair.name,
        "dtype": args.dtype,
        "wanted": wanted,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` sends it: engines are ended, the record written
    engines, failed = start(wanted, args.pair, extra, logs, args.start, args.stagger)
    try:
        with Journal(args.out, head | {"started": list(engines), "failed": failed}) as journal:
            measure(args.phase if engines else [], engines, prompts, args, journal)
    finally:
        for child in engines.values():
            child.stop()
    return 0 if len(engines) == len(wanted) else 1


def measure(
    phases: list[str], engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace, journal: Journal
) -> None:
    """The phases in turn. One that fails does not keep the others from being measured."""
    for phase in phases:
        journal.begin(phase)
        try:
            PHASES[phase](engines, prompts, args, journal)
            journal.end()
        except Exception as error:
            journal.put("error", str(error)[-1500:] or type(error).__name__)
            print(f"FAILED phase {phase}: {str(error)[-1500:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
