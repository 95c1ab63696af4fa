"""Seeded streams of pairs for tests and simulations of the decision."""

from __future__ import annotations

import numpy as np

from ddtree_operator.analysis import Pair, Sample

IDS = tuple(range(64))
STEPS = 1000  # verify steps a sample: enough that an accept length is exact to a thousandth


def sample(
    accept: float = 2.0, tps: float = 20.0, *, ids: tuple[int, ...] = IDS, error: str | None = None, prompt: str = "p"
) -> Sample:
    """A sample with that accept length and tokens per second."""
    if error is not None:
        return Sample(prompt, error=error)
    drafts = round((accept - 1) * STEPS)
    tokens = STEPS + drafts
    return Sample(prompt, tokens, STEPS, drafts, tokens / tps, ids)


def pair(accept: float = 2.0, tps: float = 20.0, base_accept: float = 2.0, base_tps: float = 20.0) -> Pair:
    """A usable pair with equal outputs."""
    return Pair(sample(base_accept, base_tps), sample(accept, tps))


def ratios(
    rng: np.random.Generator, shape: tuple[int, ...], change: float, cv: float, correlation: float
) -> np.ndarray:
    """Log-ratios canary/baseline of log-normal values: both sides have coefficient of variation ``cv``."""
    sd = np.sqrt(np.log1p(cv * cv))
    shared, a, b = rng.normal(size=(3, *shape))
    own = np.sqrt(1 - correlation)
    side_a = np.sqrt(correlation) * shared + own * a
    side_b = np.sqrt(correlation) * shared + own * b
    return np.log1p(change) + sd * (side_b - side_a)


def noisy_pairs(
    seed: int, n: int, accept_change: float, tps_change: float, accept_cv: float = 0.3, tps_cv: float = 0.2
) -> list[Pair]:
    """Pairs around accept length 2.1 and 20 tok/s."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        base = 1 + 1.1 * np.exp(rng.normal() * accept_cv)
        accept = max(1.0, base * np.exp(ratios(rng, (), accept_change, accept_cv, 0.5)))
        tps = 20 * np.exp(rng.normal() * tps_cv)
        out.append(pair(accept, tps * np.exp(ratios(rng, (), tps_change, tps_cv, 0.0)), base, tps))
    return out
