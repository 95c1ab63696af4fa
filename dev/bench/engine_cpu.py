"""The engine on a CPU: plain decoding, the chain, and trees, on the SmolLM2 pair, one request at a time.

usage: engine_cpu.py OUT_FOLDER [ROUNDS [MODE,MODE…]]      writes engine-cpu.json; prints the table

Every round runs all modes, in an order that turns, on the same prompts. Tokens per CPU second are compared, since a
clock on a shared machine measures the neighbours; tokens per second of the clock are given too. One thread an engine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from engine.fleet import Fleet, Outcome, Scenario, engine  # noqa: E402
from engine.test_smollm2 import TEXTS  # noqa: E402

TOKENS = 64
MODES: dict[str, dict[str, Any]] = {
    "plain": engine(None, "smollm2"),
    "chain 16": engine("DFLASH", "smollm2"),
    "tree 16": engine("DDTREE", "smollm2", speculative_ddtree_budget=15),
    "tree 8": engine("DDTREE", "smollm2", speculative_ddtree_budget=7),
    "tree 32": engine("DDTREE", "smollm2", speculative_ddtree_budget=31),
}


def scenario(mode: str, number: int) -> Scenario:
    """A round of its own for every prompt, after one to warm up."""
    params = {"temperature": 0, "max_new_tokens": TOKENS}
    rounds = [{"requests": [{"text": text, "params": params}]} for text in (TEXTS[0], *TEXTS)]
    return Scenario.make(f"{mode} {number}", MODES[mode], rounds)


def measure(outcome: Outcome) -> dict[str, float]:
    """Of one run, without the warm-up; also a hash of the text."""
    assert outcome.answers is not None, outcome.log[-3000:]
    answers = [r[0] for r in outcome.answers["rounds"][1:]]
    metas = [a["meta"] for a in answers]
    tokens = sum(len(a["ids"]) for a in answers)
    steps = sum(m.get("spec_verify_ct") or 0 for m in metas)
    drafts = sum(m.get("spec_num_correct_drafts") or 0 for m in metas)
    return {
        "tokens": tokens,
        "steps": steps,
        "accept": 1 + drafts / steps if steps else 1.0,
        "cpu": sum(outcome.answers["cpu"][1:]),
        "seconds": sum(outcome.answers["seconds"][1:]),
        "text": hash(tuple(tuple(a["ids"]) for a in answers)),
    }


def main(out: Path, rounds: int, modes: list[str]) -> int:
    fleet = Fleet()
    raw: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    order = modes
    for number in range(rounds):
        for mode in order[number % len(order) :] + order[: number % len(order)]:
            raw[mode].append(measure(fleet.outcome(scenario(mode, number))))
            print(f"· {mode}: {raw[mode][-1]}", file=sys.stderr, flush=True)
    fleet.end()
    same = len({run["text"] for runs in raw.values() for run in runs}) == 1
    rows: list[dict[str, Any]] = [
        {"what": "all modes give the same text", "value": float(same), "unit": "", "goal": 1, "ok": same}
    ]

    def row(what: str, value: float, unit: str, goal: float | None = None) -> None:
        ok = None if goal is None else value >= goal
        rows.append({"what": what, "value": round(value, 3), "unit": unit, "goal": goal, "ok": ok})

    def median(mode: str, key: str) -> float:
        return statistics.median(run["tokens"] / run[key] for run in raw[mode])

    for mode in modes:
        row(f"{mode}: accept length", raw[mode][0]["accept"], "tokens a step")
        row(f"{mode}: tokens per CPU second", median(mode, "cpu"), "tok/CPU s")
        row(f"{mode}: tokens per second", median(mode, "seconds"), "tok/s")
    ratios = [
        (t["tokens"] / t["cpu"]) / (c["tokens"] / c["cpu"])
        for t, c in zip(raw["tree 16"], raw["chain 16"], strict=True)
    ]
    row("tree against chain at equal width 16, tokens per CPU second", statistics.median(ratios), "ratio", 1.05)
    document = {
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
        "versions": {"python": platform.python_version(), "sglang": "0.5.23"},
        "seed": None,
        "command": "make bench-engine",
        "rows": rows,
        "raw": {m: [{k: v for k, v in r.items() if k != "text"} for r in runs] for m, runs in raw.items()},
    }
    (out / "engine-cpu.json").write_text(json.dumps(document, indent=1) + "\n")
    for line in rows:
        mark = "" if line["ok"] is None else "  ok" if line["ok"] else "  MISSED"
        print(f"{line['what']:<62} {line['value']:>8} {line['unit']}{mark}")
    return 0 if all(line["ok"] is not False for line in rows) else 1


if __name__ == "__main__":
    chosen = sys.argv[3].split(",") if len(sys.argv) > 3 else list(MODES)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3, chosen))
