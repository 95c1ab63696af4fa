"""How well the decision decides: error budgets and pairs needed, by simulation with fixed seeds.

usage: decisions.py OUT_FOLDER [RECORD...]      writes decisions.json and decisions-*.svg; prints the table
RECORDs are files of analysis/record.py with pairs of real engines; they are judged again and resampled.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_operator.analysis import Pair, Policy, Sample, Tally
from ddtree_operator.analysis.plot import metric_series, sheet
from ddtree_operator.analysis.policy import RULE
from ddtree_operator.analysis.power import first_crossing
from ddtree_operator.analysis.record import load, recompute, timeline
from ddtree_operator.analysis.samples import problem
from ddtree_operator.analysis.sequential import location
from ddtree_operator.api.spec import AnalysisSpec

SEED = 20261129
RUNS, PAIRS, CHUNK = 2000, 2000, 100
POLICY = Policy.from_spec(AnalysisSpec())
ACCEPT, THROUGHPUT = POLICY.gates
Stream = Callable[[np.random.Generator, int], np.ndarray]  # (generator, runs) -> log-ratios [runs, PAIRS]


def lognormal(change: float, cv: float, correlation: float, pairs: int = PAIRS) -> Stream:
    """Both sides log-normal with coefficient of variation ``cv``."""
    spread = math.sqrt(math.log1p(cv * cv) * 2 * (1 - correlation))
    return lambda rng, runs: math.log1p(change) + spread * rng.normal(size=(runs, pairs))


def heavy(change: float) -> Stream:
    """Student-t with 1.5 degrees of freedom: no variance at all."""
    return lambda rng, runs: math.log1p(change) + 0.15 * rng.standard_t(1.5, (runs, PAIRS))


def phases(change: float) -> Stream:
    """A neighbour slows the machine for minutes; the sides of a pair are half a pair apart, in random order."""

    def stream(rng: np.random.Generator, runs: int) -> np.ndarray:
        keep, speed = 0.97, np.zeros(runs)
        out = np.empty((runs, PAIRS))
        for i in range(PAIRS):
            first = speed = keep * speed + math.sqrt(1 - keep**2) * 0.5 * rng.normal(size=runs)
            speed = keep * speed + math.sqrt(1 - keep**2) * 0.5 * rng.normal(size=runs)
            order = np.where(rng.random(runs) < 0.5, 1.0, -1.0)
            out[:, i] = math.log1p(change) + order * (first - speed) + 0.1 * rng.normal(size=runs)
        return out

    return stream


def drift(change: float) -> Stream:
    """The machine's speed wanders off for good; the sides of a pair are half a pair apart, in random order."""

    def stream(rng: np.random.Generator, runs: int) -> np.ndarray:
        steps = 0.1 * rng.normal(size=(runs, PAIRS)) + 0.001  # between the two sides of a pair
        order = np.where(rng.random((runs, PAIRS)) < 0.5, 1.0, -1.0)
        return math.log1p(change) + order * steps + 0.1 * rng.normal(size=(runs, PAIRS))

    return stream


def repeated(change: float) -> Stream:
    """239 prompts with effects of their own, in a new order every round: requests that are not independent."""

    def stream(rng: np.random.Generator, runs: int) -> np.ndarray:
        effects = rng.normal(0, 0.3, (runs, 239))
        effects += math.log1p(change) - effects.mean(axis=1, keepdims=True)
        rounds = [rng.permuted(effects, axis=1) for _ in range(PAIRS // 239 + 1)]
        return np.concatenate(rounds, axis=1)[:, :PAIRS]

    return stream


def chunks(stream: Stream, name: str) -> Iterator[np.ndarray]:
    """RUNS runs of the stream, a few at a time; the seed depends on the name only."""
    rng = np.random.default_rng([SEED, *name.encode()])
    for _ in range(RUNS // CHUNK):
        yield stream(rng, CHUNK)


def needed(stream: Stream, name: str, threshold: float, alpha: float, sign: int) -> np.ndarray:
    """Pairs until the test of that direction is won, per run; inf when never."""
    parts = [
        first_crossing(np.clip(sign * (logs - threshold) / POLICY.clip, -1, 1), alpha) for logs in chunks(stream, name)
    ]
    return np.concatenate(parts)


def failed_by_errors() -> np.ndarray:
    """Runs whose error test fails at 1 % unusable answers a side. Shape [RUNS]."""
    rng = np.random.default_rng([SEED, 1])
    found = []
    for _ in range(0, RUNS, CHUNK):
        errors = rng.random((2, CHUNK, PAIRS)) < 0.01
        found.append(np.isfinite(first_crossing(errors[1].astype(float) - errors[0], POLICY.error_budget)))
    return np.concatenate(found)


def compared(stream: Stream, name: str, sign: int) -> tuple[float, float, float]:
    """Shares of runs decided wrongly, looked at all the time: by this test, by a threshold counter, by a z-test.

    ``sign`` 1: a loss of the margin is promoted; -1: no difference is rolled back (by accept length or by errors).
    """
    alpha = POLICY.false_promote if sign > 0 else POLICY.rollback_share
    ours, counted, tested = [], [], []
    for logs in chunks(stream, name):
        x = np.clip(sign * (logs - ACCEPT.log_threshold) / POLICY.clip, -1, 1)
        ours.append(np.isfinite(first_crossing(x, alpha)))
        counted.append(threshold_counter(logs) == (sign < 0))
        tested.append(peeked_z(logs, ACCEPT.log_threshold if sign > 0 else 0.0, sign))
    wrong = np.concatenate(ours)
    if sign < 0:
        wrong |= failed_by_errors()
    return float(wrong.mean()), float(np.mean(counted)), float(np.mean(tested))


def whole_gate() -> float:
    """Share of runs rolled back at no difference by any of accept length, throughput and errors."""
    streams = ((lognormal(0, 0.3, 0.5), ACCEPT), (lognormal(0, 0.2, 0), THROUGHPUT))
    bad = failed_by_errors()
    for stream, gate in streams:
        lost = needed(stream, f"null {gate.metric}", gate.log_threshold, POLICY.rollback_share, -1)
        bad |= np.isfinite(lost)
    return float(bad.mean())


def threshold_counter(logs: np.ndarray) -> np.ndarray:
    """What generic operators do: the mean of every 20 requests against the margin, the third failure rolls back.
    Shape of the answer: [runs], True for a rollback; whatever is not rolled back is promoted.
    """
    windows = logs[:, : PAIRS - PAIRS % 20].reshape(len(logs), -1, 20).mean(axis=2) < ACCEPT.log_threshold
    return windows.sum(axis=1) >= 3


def peeked_z(logs: np.ndarray, of: float, sign: int) -> np.ndarray:
    """A z-test at 1 % against a mean of ``of``, looked at after every 20 requests. True where it ever rejects."""
    n = np.arange(1, logs.shape[1] + 1)
    mean = np.cumsum(logs, axis=1) / n
    spread = np.sqrt(np.maximum(np.cumsum(logs**2, axis=1) / n - mean**2, 1e-12))
    z = sign * (mean - of) / (spread / np.sqrt(n))
    return (z[:, 19::20] > 2.326).any(axis=1)


def look_cost() -> float:
    """CPU milliseconds of one look at 10,000 pairs, best of 20."""
    rng = np.random.default_rng(SEED)
    tally = Tally(POLICY)
    for _ in range(10_000):
        sides = [
            Sample("p", 64, 30, int(a), 3.0 * s, (1, 2, 3))
            for a, s in zip(rng.integers(33, 60, 2), rng.lognormal(0, 0.2, 2), strict=True)
        ]
        tally.add(Pair(sides[0], sides[1]))
    cost = []
    for _ in range(20):
        start = time.process_time()
        tally.verdict()
        cost.append(time.process_time() - start)
    return min(cost) * 1000


def t_test_pairs(spread_per_side: float) -> float:
    """Pairs that an unpaired two-sample t-test with a fixed horizon needs for a 3 % loss at alpha = beta = 1 %."""
    return 2 * (2 * 2.3263) ** 2 * (spread_per_side / math.log(1 / 0.97)) ** 2


def timeouts(side: str, change: float, name: str) -> dict[str, float]:
    """30 % timeouts on ``side``, accept length changed by ``change``: shares of passed and failed canaries."""
    rng = np.random.default_rng([SEED, 2, *name.encode()])
    slow = Sample("p", error="no answer within 60 s")
    runs, outcomes = 200, {"pass": 0, "fail": 0, "notYet": 0}
    for _ in range(runs):
        tally = Tally(POLICY)
        logs = lognormal(change, 0.3, 0.5)(rng, 1)[0, :300]
        outcome = "notYet"
        for n, (lost, log) in enumerate(zip(rng.random(300) < 0.3, logs, strict=True)):
            base = Sample("p", 2110, 1000, 1110, 100.0, (1, 2))
            drafts = max(0, round(2110 * math.exp(log)) - 1000)
            good = Sample("p", 1000 + drafts, 1000, drafts, (1000 + drafts) / 21.1, (1, 2))
            tally.add(Pair(slow if lost and side == "baseline" else base, slow if lost and side == "canary" else good))
            if n < 40 or n % 10 == 0:  # most wrong decisions are early ones
                outcome = str(tally.verdict().outcome)
            if outcome != "notYet":
                break
        outcomes[outcome] += 1
    return {k: v / runs for k, v in outcomes.items()}


NOISE: tuple[tuple[str, Callable[[float], Stream]], ...] = (
    ("log-normal", lambda change: lognormal(change, 0.3, 0.5)),
    ("heavy tails (Student-t 1.5)", heavy),
    ("slow phases", phases),
    ("drift", drift),
    ("repeated prompts", repeated),
)


def rows() -> Iterator[tuple[str, float, str, float | None, str]]:
    """(what, value, unit, goal, "max" or "min")."""
    yield "false rollback at no difference (whole gate)", whole_gate(), "share", 0.01, "max"
    for what, sign, change in (
        ("false promotion at a loss of the margin", 1, ACCEPT.threshold),
        ("false rollback at no difference", -1, 0.0),
    ):
        for name, at in NOISE:
            ours, counted, tested = compared(at(change), name, sign)
            yield f"{what}: {name}", ours, "share", 0.01, "max"
            yield "  the same streams, threshold counter", counted, "share", None, "max"
            yield "  the same streams, z-test at 1 %, looked at every 20", tested, "share", None, "max"
    margin = ACCEPT.threshold
    lost = timeouts("baseline", 0.0, "baseline")
    yield "30 % timeouts of the baseline, no difference: rollbacks", lost["fail"], "share", 0.01, "max"
    lost = timeouts("baseline", margin, "baseline margin")
    yield "30 % timeouts of the baseline, a loss of the margin: promotions", lost["pass"], "share", 0.01, "max"
    lost = timeouts("canary", 0.25, "canary")
    yield "30 % timeouts of the canary, +25 %: promotions", lost["pass"], "share", 0.01, "max"
    yield "30 % timeouts of the canary, +25 %: rollbacks within 300 pairs", lost["fail"], "share", 0.9, "min"
    passed = needed(lognormal(0, 0.3, 0.5, 6000), "null power", ACCEPT.log_threshold, 0.01, 1)
    fixed = t_test_pairs(math.sqrt(math.log1p(0.09)))
    yield "unpaired t-test, fixed horizon: pairs to tell 0 from -3 %", fixed, "pairs", None, "max"
    mean = float(np.minimum(passed, 6000).mean())
    yield "this test: pairs to tell 0 from -3 %, mean", mean, "pairs", None, "max"
    yield "mean pairs against the t-test's", mean / fixed, "ratio", 0.5, "max"
    most = float(np.quantile(passed, 0.9))
    yield "this test: pairs to tell 0 from -3 %, 9 of 10", most, "pairs", None, "max"
    for change, goal in ((0.2, 30), (0.25, 25), (0.5, 15)):
        n = needed(lognormal(change, 0.3, 0.5), f"gain {change}", ACCEPT.log_threshold, 0.01, 1)
        yield f"accept length {change:+.0%}: pairs to pass, median", float(np.median(n)), "pairs", goal, "max"
    n = needed(lognormal(1 / 2.1 - 1, 0.3, 0.5), "misfit", ACCEPT.log_threshold, POLICY.rollback_share, -1)
    yield "drafter that does not fit (1.0 for 2.1): pairs to fail, median", float(np.median(n)), "pairs", 10, "max"
    yield "one look at 10,000 pairs, CPU", look_cost(), "ms", 5, "max"


def real(paths: list[Path], out: Path) -> Iterator[tuple[str, float, str, float | None, str]]:
    """Records of real engines: judged again, drawn, and resampled with their difference taken away."""
    for path in paths:
        kept = load(path.read_bytes())
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        yield f"{name}: verdict from the record equal", float(recompute(kept) == kept.verdict), "", 1, "min"
        yield f"{name}: {kept.verdict.outcome} after", float(len(kept.pairs)), "pairs", None, "max"
        gates = [gate.metric for gate in kept.policy.gates]
        steps = timeline(kept)
        sheets = [(metric_series(steps, m), f"{name}: {m}, {kept.verdict.outcome}") for m in gates]
        (out / f"decisions-{name}.svg").write_text(sheet(sheets), encoding="utf-8")
        usable = [p for p in kept.pairs if problem(p.baseline) is None and problem(p.canary) is None]
        if len(usable) < 8:
            continue
        values = {
            "acceptLength": [math.log(p.canary.accept_length / p.baseline.accept_length) for p in usable],
            "throughput": [math.log(p.canary.tokens_per_second / p.baseline.tokens_per_second) for p in usable],
        }
        for metric in gates:
            logs = np.asarray(values[metric])
            yield f"{name}: spread of {metric}'s log-ratio", float(logs.std(ddof=1)), "", None, "max"
            centred = logs - location(logs, POLICY.clip)

            def lost(rng: np.random.Generator, runs: int, at: np.ndarray = centred) -> np.ndarray:
                return ACCEPT.log_threshold + rng.choice(at, (runs, PAIRS))

            def equal(rng: np.random.Generator, runs: int, at: np.ndarray = centred) -> np.ndarray:
                return np.asarray(rng.choice(at, (runs, PAIRS)))

            wrong, *_ = compared(lost, f"{name} {metric}", 1)
            yield f"{name}: {metric} resampled, centre at -3 %: false promotion", wrong, "share", 0.01, "max"
            wrong, *_ = compared(equal, f"{name} {metric}", -1)
            yield f"{name}: {metric} resampled, no difference: false rollback", wrong, "share", 0.01, "max"
            n = needed(equal, f"{name} {metric} power", ACCEPT.log_threshold, POLICY.false_promote, 1)
            half = float(np.quantile(n, 0.5, method="higher"))
            yield f"{name}: {metric} resampled, pairs to tell 0 from -3 %, median", half, "pairs", None, "max"


def main() -> None:
    """Run everything."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    table: list[dict[str, Any]] = []
    for what, value, unit, goal, kind in chain(rows(), real([Path(a) for a in sys.argv[2:]], out)):
        ok = None if goal is None else value <= goal if kind == "max" else value >= goal
        finite = round(value, 4) if math.isfinite(value) else None  # None: more pairs than were simulated
        table.append({"what": what, "value": finite, "unit": unit, "goal": goal, "ok": ok})
        mark = {True: "ok", False: "MISSED", None: ""}[ok]
        print(f"{what:<78} {value:>10.4g} {unit:<8} {'' if goal is None else goal!s:>6} {mark}", flush=True)
    report = {
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
        "versions": {"rule": RULE, "python": platform.python_version(), "numpy": np.__version__},
        "seed": SEED,
        "command": "make bench-decisions",
        "rows": table,
        "raw": {"runs": RUNS, "pairs": PAIRS, "clip": POLICY.clip},
    }
    (out / "decisions.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["ok"] is False for row in table))


if __name__ == "__main__":
    main()
