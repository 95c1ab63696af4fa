"""Text of DDTree engines against Transformers' greedy text in float32, over many prompts, in every combination.

usage: equality.py OUT_FOLDER [PROMPTS]      writes engine-equality.json; prints a row for each engine as it ends

Budgets 7, 15, 31, 63; pages of 1, 16 and 64 tokens; overlap scheduling on and off: 24 engines of the tiny pair. Each
is asked the same PROMPTS prompts (default 1,000), a third of them a second time from the radix cache; arrivals are
mixed and a tenth of the requests leave early. An answer that differs in one token makes its row, and the command,
fail.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from engine.fleet import Fleet, Outcome, Scenario  # noqa: E402
from engine.test_equality import check, matrix  # noqa: E402

PROMPTS = 1000
SEED = 2026


def row(scenario: Scenario, outcome: Outcome, began: float) -> dict[str, Any]:
    """Compare one engine's answers; counts go into the record."""
    wrong = ""
    drafts = steps = 0
    try:
        drafts, steps = check(scenario, outcome)
    except AssertionError as error:
        wrong = str(error).splitlines()[0][:300]
    rounds = outcome.answers["rounds"] if outcome.answers else []
    answers = [answer for block in rounds for answer in block]
    return {
        "what": f"{scenario.name}: requests whose text differs from Transformers' greedy text",
        "value": wrong or 0,
        "goal": 0,
        "ok": not wrong,
        "requests": len(answers),
        "left_early": sum(bool(answer.get("aborted")) for answer in answers),
        "tokens": sum(len(answer.get("ids") or ()) for answer in answers),
        "from_radix_cache": sum(a["meta"]["cached_tokens"] > 0 for a in answers if not a.get("aborted")),
        "accept_length": round(1 + drafts / steps, 3) if steps else None,
        "seconds": round(time.monotonic() - began),
    }


def main(out: Path, count: int) -> int:
    """Run all engines, two at a time; the file is written anew after each."""
    fleet, rows, began = Fleet(), [], time.monotonic()
    scenarios = matrix(full=True, count=count, prompt_seed=SEED)
    for scenario in scenarios:
        fleet.submit(scenario)
    for scenario in scenarios:
        rows.append(row(scenario, fleet.outcome(scenario), began))
        last = rows[-1]
        counts = f"{last['requests']:5} requests {last['tokens']:6} tokens {last['from_radix_cache']:4} from the cache"
        verdict = "equal" if last["ok"] else last["value"]
        print(f"{len(rows):2}/{len(scenarios)} {scenario.name:24} {counts}, accept length", end=" ")
        print(f"{last['accept_length']}: {verdict}", flush=True)
        record = {
            "what": "greedy text of DDTree engines in float32 against Transformers, tiny pair, CPU",
            "machine": f"{os.cpu_count()} x {platform.machine()}",
            "versions": {"python": platform.python_version(), "sglang": "0.5.23"},
            "seed": SEED,
            "command": f"make bench-equality PROMPTS={count}",
            "prompts": count,
            "rows": rows,
        }
        (out / "engine-equality.json").write_text(json.dumps(record, indent=1) + "\n")
    fleet.end()
    return 0 if all(r["ok"] for r in rows) and len(rows) == len(scenarios) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else PROMPTS))
