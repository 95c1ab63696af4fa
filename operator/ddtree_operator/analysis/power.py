"""How many pairs a decision needs: by simulating the very test that decides, with a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddtree_operator.analysis.policy import ACCEPT_LENGTH, Gate, Policy
from ddtree_operator.analysis.sequential import FRACTIONS, SHARES, Array, lower_bound

# Spread (standard deviation) of a pair's log-ratio, where nothing better is known. Accept length: chain against tree on
# SmolLM2 and on the tiny pair 0.1 to 0.3. Throughput: a GPU of its own; a shared machine is far noisier.
TYPICAL_SPREAD = {ACCEPT_LENGTH: 0.2}
TYPICAL_THROUGHPUT_SPREAD = 0.15


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
    policy: Policy, gate: Gate, change: float, spread: float, *, runs: int = 200, limit: int = 5000, seed: int = 0
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


def spread(log_ratios: Sequence[float]) -> float:
    """Standard deviation of log-ratios seen so far, for a forecast; NaN below two."""
    return float(np.std(np.asarray(log_ratios), ddof=1)) if len(log_ratios) > 1 else math.nan


def statement(policy: Policy, seconds_per_pair: float, concurrency: int = 1) -> str:
    """What this policy can tell, in one sentence for a condition: pairs and time for "no change" at each gate."""
    parts = []
    for gate in policy.gates:
        need = pairs_needed(policy, gate, 0.0, TYPICAL_SPREAD.get(gate.metric, TYPICAL_THROUGHPUT_SPREAD))
        verb = "telling no change from" if gate.threshold < 0 else "refuting a gain of"
        size = f"a loss of {-gate.threshold:.1%}" if gate.threshold < 0 else f"{gate.threshold:.1%}"
        if need.median is None:
            parts.append(f"{gate.metric}: {verb} {size} takes more than 5000 pairs")
            continue
        time = _duration(need.median * seconds_per_pair / max(1, concurrency))
        parts.append(f"{gate.metric}: {verb} {size} takes about {need.median} pairs, {time}")
    return f"clear cases take {fewest_pairs(policy)} pairs; " + "; ".join(parts)


def deadline_problem(policy: Policy, deadline: float, seconds_per_pair: float, concurrency: int = 1) -> str | None:
    """Why no decision is possible within ``deadline`` seconds; None when one is."""
    need = fewest_pairs(policy)
    least = need * seconds_per_pair / max(1, concurrency)
    if least <= deadline:
        return None
    return (
        f"deadline {_duration(deadline)} is too short: the clearest case needs {need} pairs, "
        f"{_duration(least)} at {seconds_per_pair:.3g} s a pair and {concurrency} at a time"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
