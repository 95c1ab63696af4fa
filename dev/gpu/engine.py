# ruff: noqa: E501 (tables are printed in one piece)
"""The engine on a GPU: parity with plain decoding, and throughput of plain, chain and trees. Writes one JSON file.

usage: engine.py OUT.json --pair FOLDER --prompts IDS.json --phase parity,speed,steps,profile,sample [options]

All engines live at once on the GPU and take turns in random order, so that runs are paired in time. Each (engine,
concurrency) runs once unmeasured first. A run's tokens, seconds, verify steps, accepted drafts and the hash of its
outputs are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMON: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
    "skip_tokenizer_init": True,
    "context_length": 2048,
    "mem_fraction_static": 0.95,
    "sleep_on_idle": True,
    "log_level": "info",
    "random_seed": 0,
}


def engine_kwargs(name: str, pair: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Engine keywords of a name: plain, chain16, chain8, tree63, tree63+nooverlap, tree63+nograph, tree15+page16, tree15+stock, chain16+fa3+pg, plain+tp2."""
    kind, *options = name.split("+")
    out = COMMON | extra | {"model_path": str(pair / "target")}
    if kind.startswith("chain"):
        out |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(pair / "drafter")}
        out["speculative_num_draft_tokens"] = int(kind[5:])
    elif kind.startswith("tree"):
        out |= {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": str(pair / "drafter")}
        out["speculative_ddtree_budget"] = int(kind[4:])
    elif kind != "plain":
        raise SystemExit(f"unknown engine {name!r}: plain, chainWIDTH or treeBUDGET")
    for option in options:
        if option == "nooverlap":
            out["disable_overlap_schedule"] = True
        elif option == "nograph":
            out |= {"disable_decode_cuda_graph": True}
        elif option.startswith("page"):
            out["page_size"] = int(option[4:])
        elif option == "fa3":
            out["attention_backend"] = "fa3"
        elif option == "pg":  # CUDA graphs for prefill, as SGLang has them by default, for few sizes
            del out["disable_prefill_cuda_graph"]
            out["cuda_graph_bs_prefill"] = [64, 128, 256, 512, 1024]
        elif option.startswith("tp"):
            out["tp_size"] = int(option[2:])
        elif option in ("spine", "stock"):
            pass  # an environment variable, see Child
        else:
            raise SystemExit(f"unknown engine option {option!r}")
    return out


class Child:
    """One engine process."""

    def __init__(self, name: str, kwargs: dict[str, Any], logs: Path) -> None:
        self.name = name
        spec = logs / f"{name}.json"
        spec.write_text(json.dumps(kwargs))
        self.log = logs / f"{name}.log"
        read, write = os.pipe()
        environment = dict(os.environ)
        if "+spine" in name:
            environment["SGLANG_DDTREE_SPINE"] = "1"
        if "+stock" in name:
            environment["SGLANG_DDTREE_ATTENTION"] = "stock"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "child.py"), str(write), str(spec)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=environment,
                text=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer; an error with the log's end if there is none in time."""
        ready, _, _ = select.select([self._answers], [], [], timeout)
        line = self._answers.readline() if ready else ""
        if not line:
            tail = self.log.read_text(errors="replace")[-1500:]
            return {"error": f"{self.name}: {'died' if ready else f'no answer in {timeout:.0f} s'}\n{tail}"}
        got: dict[str, Any] = json.loads(line)
        if "error" in got:
            got["error"] += "\n" + self.log.read_text(errors="replace")[-1500:]
        return got

    def ask(self, command: str, order: dict[str, Any], timeout: float = 300) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises RuntimeError with the reason if it fails."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({command: order}) + "\n")
        self.process.stdin.flush()
        got = self.answer(timeout)
        if "error" in got:
            raise RuntimeError(f"{self.name}: {got['error']}")
        return got

    def stop(self) -> None:
        """End the engine; its own children end with it."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()


def start(
    names: list[str], pair: Path, extra: dict[str, Any], logs: Path, timeout: float, stagger: float
) -> dict[str, Child]:
    """Start engines side by side. Those that fail are reported and left out."""
    children = []
    for name in names:
        children.append(Child(name, engine_kwargs(name, pair, extra), logs))
        time.sleep(stagger)
    alive = {}
    deadline = time.monotonic() + timeout
    for child in children:
        got = child.answer(max(1.0, deadline - time.monotonic()))
        if "error" in got:
            print(f"FAILED {child.name}: {got['error'][-1200:]}", flush=True)
            child.stop()
        else:
            print(f"started {child.name} in {got['started']:.0f} s", flush=True)
            alive[child.name] = child
    return alive


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


def parity(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Outputs of every engine against plain's, and the top-2 gap where they part."""
    prompts = prompts[: args.parity_count]
    order = {
        "prompts": prompts,
        "concurrency": args.parity_concurrency,
        "params": {"temperature": 0, "max_new_tokens": args.tokens},
    }
    first = next(name for name in engines if name.startswith("plain"))
    plain = engines[first].ask("run", order)
    out: dict[str, Any] = {"plain": summary(order, plain), "against": []}
    again = engines[first].ask("run", order | {"concurrency": 1, "prompts": prompts[:40]})
    repeat = sum(a == b for a, b in zip(again["outputs"], plain["outputs"], strict=False))
    out["plain at concurrency 1 equals plain"] = f"{repeat} of {len(again['outputs'])}"
    print("plain", out["plain"], "repeat", repeat, flush=True)
    for name, child in engines.items():
        if name == first:
            continue
        try:
            got = child.ask("run", order)
        except RuntimeError as error:
            print("FAILED", str(error)[-1200:], flush=True)
            out["against"].append({"engine": name, "error": str(error)[-500:]})
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
        out["against"].append(row)
        print(
            {k: v for k, v in row.items() if k != "parted"}, "gaps", sorted(d["gap"] for d in parted)[-5:], flush=True
        )
    return out


def speed(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Closed loops at each concurrency, engines taking turns. Raw runs are also written as they come, beside OUT."""
    journal = args.out.with_suffix(".runs.jsonl").open("w")
    rng = random.Random(args.seed)
    runs: list[dict[str, Any]] = []
    deadline = time.monotonic() + args.budget
    only = {int(c): names.split("+") for c, _, names in (p.partition("=") for p in args.only.split(";") if p)}
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
                    runs.append({"engine": name, "repeat": repeat, **summary(order, got)})
                    journal.write(json.dumps(runs[-1]) + "\n")
                    journal.flush()
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                return {"runs": runs}
        for name in engines:
            mine = [r for r in runs if r["engine"] == name and r["concurrency"] == concurrency]
            if mine:
                print(f"c{concurrency:<3} {name:16} {statistics.median(r['tok_s'] for r in mine):9.1f} tok/s  "
                      f"accept {statistics.mean(r['accept'] for r in mine):.3f}  spread {min(r['tok_s'] for r in mine):.0f}-{max(r['tok_s'] for r in mine):.0f}  "
                      f"itl {statistics.median(r['itl_p50'] for r in mine):.2f} {statistics.median(r['itl_p99'] for r in mine):.2f}  runs {len(mine)}", flush=True)  # fmt: skip
    return {"runs": runs}


def steps(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
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
                    runs.append({"engine": name, "repeat": repeat, "steps": count,
                                 "step_ms": got["gap_p50"], "spread_ms": round(got["seconds"] * 1000 / count, 4),
                                 **summary(order, got)})  # fmt: skip
        for name in engines:
            mine = [r["step_ms"] for r in runs if r["engine"] == name and r["concurrency"] == batch]
            print(
                f"batch {batch:<3} {name:16} {statistics.median(mine):8.3f} ms a step  spread {min(mine):.3f}-{max(mine):.3f}",
                flush=True,
            )
    return {"runs": runs}


def sample(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Temperature 1 with top-k and top-p: the third token's frequencies beside plain's, as a chi-square statistic over
    its degrees of freedom. The first token is the prefill's, the others come from trees."""
    params = {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "max_new_tokens": 3, "ignore_eos": True}
    order = {"prompts": [prompts[1]] * args.samples, "concurrency": max(args.graphs), "params": params}
    out: dict[str, Any] = {}
    counts: dict[str, dict[int, int]] = {}
    for name, child in engines.items():
        for repeat in (1, 2) if name == "plain" else (1,):
            got = child.ask("run", order)
            mine: dict[int, int] = {}
            for ids in got["outputs"]:
                mine[ids[2]] = mine.get(ids[2], 0) + 1
            counts[name if repeat == 1 else "plain again"] = mine
    base = counts["plain"]
    for name, mine in counts.items():
        common = [t for t in {*base, *mine} if base.get(t, 0) + mine.get(t, 0) >= 10]
        pairs = [(base.get(t, 0), mine.get(t, 0)) for t in common]
        pairs.append((args.samples - sum(a for a, _ in pairs), args.samples - sum(b for _, b in pairs)))
        square = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
        out[name] = {"chi_square": round(square, 2), "freedom": sum(1 for a, b in pairs if a + b) - 1}
        print("sample", name, out[name], flush=True)
    return out


def profile(engines: dict[str, Child], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Where a decode step's time goes, and its host synchronisations, from profiler traces of the scheduler: the same
    prompt in every slot. With the GPU's activity alone the host is hardly slowed, so gaps are real."""
    import step_trace as traces

    out: dict[str, Any] = {}
    keep = args.out.with_suffix("")
    for batch in args.batches:
        order = {"prompts": [prompts[0]] * batch, "concurrency": batch,
                 "params": {"temperature": 0, "max_new_tokens": args.profile_tokens, "ignore_eos": True}}  # fmt: skip
        for name, child in engines.items():
            if args.profiled and name not in args.profiled.split(","):
                continue
            child.ask("run", order)
            for activities in (["GPU"], ["CPU", "GPU"]) if batch == args.batches[0] else (["GPU"],):
                label = f"{name}-b{batch}-{'cpu' if len(activities) > 1 else 'gpu'}"
                folder = keep / label
                got = child.ask("profile", order | {"folder": str(folder), "activities": activities})
                deadline = time.monotonic() + 30
                while not (found := list(folder.rglob("*.json.gz"))) and time.monotonic() < deadline:
                    time.sleep(0.1)
                for file in found:
                    out[label] = traces.summarise(traces.read(file), 2 if any(got["verify"]) else 1)
                    print(traces.show(label, out[label]), flush=True)
    return out


def read_prompts(path: Path, pair: Path) -> list[list[int]]:
    """Token ids from a JSON list, or from the "text" of JSON lines by the target's tokenizer; in a fixed random order."""
    if path.suffix != ".jsonl":
        ids: list[list[int]] = json.loads(path.read_text())
        return ids
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines() if line.strip()]
    random.Random(3).shuffle(texts)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def main() -> int:
    """Command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("out", type=Path)
    ask.add_argument("--pair", type=Path, required=True)
    ask.add_argument("--prompts", type=Path, required=True)
    ask.add_argument(
        "--phase", type=lambda s: s.split(","), required=True, help="parity, speed, steps, profile, sample"
    )
    ask.add_argument("--only", default="", help="speed: concurrency=engine+engine;... runs only these there")
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
    logs = args.out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    engines = start(args.engines.split(","), args.pair, extra, logs, args.start, args.stagger)
    wanted = args.engines.split(",")
    phases = {"parity": parity, "speed": speed, "steps": steps, "profile": profile, "sample": sample}
    record: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(0), "count": 1},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "sglang": sglang.__version__},
        "command": " ".join(["dev/gpu/engine.py", *sys.argv[1:]]),
        "seed": args.seed,
        "pair": args.pair.name,
        "dtype": args.dtype,
        "wanted": wanted,
        "started": list(engines),
    }
    try:
        for phase in args.phase if engines else []:
            try:
                record[phase] = phases[phase](engines, prompts, args)
            except Exception as error:  # the other phases and what was measured are kept
                record[phase] = {"error": str(error)[-1500:]}
                print(f"FAILED phase {phase}: {str(error)[-1500:]}", flush=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        for child in engines.values():
            child.stop()
    return 0 if len(engines) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
