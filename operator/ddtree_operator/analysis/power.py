"""How many pairs a decision needs: by simulating the very test that decides, with a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree_operator.analysis.pace import Pace
from ddtree_operator.analysis.policy import ACCEPT_LENGTH, Gate, Policy
from ddtree_operator.analysis.prometheus import IN_A_ROW
from ddtree_operator.analysis.sequential import FRACTIONS, SHARES, Array, lower_bound
from ddtree_operator.api.durations import seconds as duration
from ddtree_operator.api.spec import AnalysisSpec

# Spread (standard deviation) of a pair's log-ratio, where nothing better is known. Accept length: chain against tree on
# SmolLM2 and on the tiny pair 0.1 to 0.3. Throughput: a GPU of its own; a shared machine is far noisier.
TYPICAL_SPREAD = {ACCEPT_LENGTH: 0.2}
TYPICAL_THROUGHPUT_SPREAD = 0.15

LARGE = 0.5  # true change that any analysis should be able to tell
LIMIT = 5000  # pairs; what takes longer is not told more exactly


@dataclass(frozen=True, slots=True)
class Need:
    """Pairs until a test decides: in half of all rollouts, and in nine of ten; None when that takes too many."""

    median: int | None
    most: int | None


def capital_paths(x: Array) -> Array:
    """Log-capital after every pair; ``x`` and the result have the shape [runs, pairs]."""
    wealth = np.cumsum(np.log1p(FRACTIONS[:, None, None] * x), axis=2)
    top = wealth.max(axis=0)
    result: Array = top + np.log((SHARES[:, None, None] * np.exp(wealth - top)).sum(axis=0))
    return result


def first_crossing(x: Array, alpha: float) -> Array:
    """Pairs until the capital first reaches 1/alpha, per run (row of ``x``); inf when it does not."""
    won = capital_paths(x) >= math.log(1 / alpha)
    return np.where(won.any(axis=1), won.argmax(axis=1) + 1.0, np.inf)


def pairs_needed(
    policy: Policy, gate: Gate, change: float, spread: float, *, runs: int = 200, limit: int = LIMIT, seed: int = 0
) -> Need:
    """Pairs until the gate passes, or fails when ``change`` (relative) lies below its threshold.

    Log-ratios are normal with standard deviation ``spread``. More than ``limit`` pairs count as too many.
    """
    sign = 1.0 if math.log1p(change) >= gate.log_threshold else -1.0
    alpha = policy.false_promote if sign > 0 else policy.rollback_share
    rng = np.random.default_rng(seed)
    needed = np.concatenate(
        [
            first_crossing(
                np.clip(
                    sign * (rng.normal(math.log1p(change), spread, (20, limit)) - gate.log_threshold) / policy.clip,
                    -1,
                    1,
                ),
                alpha,
            )
            for _ in range(max(1, runs // 20))
        ]
    )
    floor = policy.min_pairs if sign > 0 else 1
    quantiles = [float(np.quantile(needed, q, method="higher")) for q in (0.5, 0.9)]
    median, most = (None if math.isinf(q) else max(floor, int(q)) for q in quantiles)
    return Need(median, most)


def fewest_pairs(policy: Policy) -> int:
    """Pairs below which nothing can pass, however good the canary is."""
    n = 1
    while not math.isfinite(lower_bound(np.ones(n), policy.clip, policy.false_promote)):
        n += 1
    return max(n, policy.min_pairs)


@dataclass(frozen=True, slots=True)
class Forecast:
    """How many pairs one gate needs when canary / baseline - 1 is really ``change``."""

    metric: str
    threshold: float
    change: float
    passes: bool  # whether it then passes or fails
    spread: float
    measured: bool  # the spread is from pairs of the past; else it is the usual one
    need: Need


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an analysis can tell, said before it runs."""

    fewest: int  # pairs below which nothing passes
    allowed: int  # pairs that maxPairs and, where the time of a pair is known, the deadline leave
    seconds: float | None  # of a pair; None while none was timed
    concurrency: int
    source: str  # where seconds and spreads come from, in a few words; "" when nothing was measured
    forecasts: tuple[Forecast, ...]
    problem: str  # why no decision is possible at all, in one sentence; "" when one is

    def time(self, pairs: int) -> float | None:
        """About how many seconds so many pairs take; None when it is not known."""
        return None if self.seconds is None else math.ceil(pairs / self.concurrency) * self.seconds


def outlook(
    spec: AnalysisSpec, pace: Pace | None = None, source: str = "", changes: Sequence[float] = (0.0,)
) -> Outlook:
    """What the analysis of ``spec`` can tell, for each gate and true change; ``pace`` is what pairs of the past say.

    Raises ValueError with one sentence when the spec's numbers make no sense.
    """
    policy = Policy.from_spec(spec)
    seconds = pace.seconds_at(spec.max_tokens) if pace else None
    fewest = fewest_pairs(policy)
    deadline = duration(spec.deadline)
    allowed = spec.max_pairs
    if seconds is not None:
        allowed = min(allowed, math.floor(deadline / seconds) * spec.concurrency)
    forecasts = []
    for gate in policy.gates:
        seen = pace.spread.get(gate.metric) if pace else None
        spread = seen if seen is not None else TYPICAL_SPREAD.get(gate.metric, TYPICAL_THROUGHPUT_SPREAD)
        for change in changes:
            passes = math.log1p(change) >= gate.log_threshold
            need = pairs_needed(policy, gate, change, spread)
            forecasts.append(Forecast(gate.metric, gate.threshold, change, passes, spread, seen is not None, need))
    found = Outlook(fewest, allowed, seconds, spec.concurrency, source if pace else "", tuple(forecasts), "")
    problem = _problem(spec, found, deadline) or (_hopeless(spec, policy, found, pace) if pace else "")
    return replace(found, problem=problem)


def _hopeless(spec: AnalysisSpec, policy: Policy, found: Outlook, pace: Pace) -> str:
    """Why even a canary that is better by LARGE would stay undecided, by what was measured; "" when it would not."""
    for gate in policy.gates:
        spread = pace.spread.get(gate.metric)
        if spread is None or math.log1p(LARGE) < gate.log_threshold:
            continue
        need = pairs_needed(policy, gate, LARGE, spread, runs=100, limit=1000).median
        if need is not None and need <= found.allowed:
            continue
        if need is None and found.allowed >= 1000:
            continue
        time = found.time(need) if need is not None else None
        takes = f"takes {'more than 1000' if need is None else need} pairs" + (f" ({words(time)})" if time else "")
        field, value = ("maxPairs", spec.max_pairs) if found.allowed == spec.max_pairs else ("deadline", spec.deadline)
        return (
            f"spec.canary.analysis.{field}: {value} allows {found.allowed} pairs, and even {LARGE:+.0%} in "
            f"{gate.metric} {takes} to show at spread {spread:.2f} ({found.source}); raise it, or lower the noise"
        )
    return ""


def statement(found: Outlook) -> str:
    """The outlook in words, for a condition. The first forecast of each metric is told."""
    told: dict[str, Forecast] = {}
    for f in found.forecasts:
        told.setdefault(f.metric, f)
    parts = [f"{_goal(f)} takes {_pairs(found, f.need.median)}" for f in told.values()]
    parts.append(f"a clear case takes {_pairs(found, found.fewest).removeprefix('about ')}")
    spreads = " and ".join(f"{f.spread:.2f}" for f in told.values())
    if found.seconds is None:
        parts.append(f"how long is not known before pairs were timed; spread {spreads} is assumed")
    else:
        parts.append(f"{found.source}: {found.seconds:.2g} s a pair, spread {spreads}")
    short = [f.metric for f in told.values() if f.need.median is None or f.need.median > found.allowed]
    if short:
        limit = "maxPairs" if found.seconds is None else "maxPairs and deadline"
        parts.append(
            f"{limit} allow {found.allowed} pairs, so {' and '.join(short)} may stay undecided without a change"
        )
    return "; ".join(parts)


def _goal(f: Forecast) -> str:
    if f.threshold < 0:
        return f"telling no change from a loss of {-f.threshold:.1%} in {f.metric}"
    return f"{'showing' if f.passes else 'refuting'} a gain of {f.threshold:.1%} in {f.metric}"


def _pairs(found: Outlook, pairs: int | None) -> str:
    if pairs is None:
        return f"more than {LIMIT} pairs"
    time = found.time(pairs)
    return f"about {pairs} pairs" + (f" ({words(time)})" if time is not None else "")


def _problem(spec: AnalysisSpec, found: Outlook, deadline: float) -> str:
    if found.fewest > spec.max_pairs:
        return (
            f"spec.canary.analysis.maxPairs: {spec.max_pairs} pairs decide nothing, the clearest case takes "
            f"{found.fewest} at errorBudget.falsePromote {spec.error_budget.false_promote}; raise one of them"
        )
    least = found.time(found.fewest)
    if least is not None and least > deadline:
        return (
            f"spec.canary.analysis.deadline: {spec.deadline} is too short, the clearest case takes {found.fewest} "
            f"pairs, {words(least)} at {found.seconds:.2g} s a pair and {found.concurrency} at a time "
            f"({found.source}); raise it, or lower maxTokens"
        )
    for check in spec.prometheus:
        row = (IN_A_ROW - 1) * duration(check.interval)
        if row > deadline:
            return (
                f"spec.canary.analysis.deadline: {spec.deadline} is too short, prometheus check {check.name} takes "
                f"{words(row)} for {IN_A_ROW} readings; raise it, or lower the check's interval"
            )
    return ""


def words(seconds: float) -> str:
    """A duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
