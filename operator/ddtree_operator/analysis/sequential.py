"""Anytime-valid tests for a bounded mean, by betting. The maths is in docs/reference/decisions.md.

A gambler starts with 1 and bets, pair after pair, that x in [-1, 1] is positive. While the mean of x is at most 0 the
gambler's capital is a non-negative supermartingale, so the chance that it ever reaches 1/alpha is at most alpha
(Ville). One looks as often as one likes. The bet is a mixture of fixed fractions: nothing is tuned on the data, and
the capital does not depend on the order of the pairs, which makes a verdict easy to replay.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Fractions of the capital that are bet, and their shares of the stake. Large ones end clear cases early (an
# all-or-nothing difference is decided in ten pairs), small ones serve small effects in much noise.
FRACTIONS: Array = np.array([0.04, 0.12, 0.30, 0.60, 0.95])
SHARES: Array = np.array([1.0, 1.0, 1.0, 1.5, 2.0]) / 6.5

_BLOCK = 64  # products of 64 factors in [0.05, 1.95] stay far inside the range of a double


def log_capital(x: Array) -> float:
    """Log of the gambler's capital after betting that ``x`` (each in [-1, 1]) has a positive mean; 0.0 when empty."""
    return _mix(_log_wealth(x))


def remaining_pairs(x: Array, alpha: float) -> int | None:
    """About how many more pairs until the capital reaches 1/alpha, if they are like those in ``x``; None if never."""
    wealth = _log_wealth(x)
    growing = wealth > 1e-9
    if x.size == 0 or not growing.any():
        return None
    wanted = math.log(1 / alpha) - np.log(SHARES[growing])
    more = float((wanted * x.size / wealth[growing]).min()) - x.size
    return max(1, math.ceil(more)) if more < 1e6 else None


def location(log_ratios: Array, clip: float) -> float:
    """The centre t of ``log_ratios``: where values clipped to t ± clip average to t. NaN when empty.

    Equals the mean when nothing is clipped.
    """
    if log_ratios.size == 0:
        return math.nan
    low, high = float(log_ratios.min()), float(log_ratios.max())
    t = float(np.median(log_ratios))
    for _ in range(60):
        step = float(np.clip(log_ratios - t, -clip, clip).mean())
        low, high = (t, high) if step > 0 else (low, t)
        if abs(step) < 1e-10 or high - low < 1e-10:
            break
        # Newton where the mean is smooth, bisection where it is not.
        inside = float((np.abs(log_ratios - t) < clip).mean())
        guess = t + step / inside if inside > 0.05 else math.inf
        t = guess if low < guess < high else (low + high) / 2
    return t


def lower_bound(log_ratios: Array, clip: float, alpha: float, tolerance: float = 1e-3) -> float:
    """A t, exact to ``tolerance``, that the test rejects at level alpha: the centre is above it; -inf when none is."""
    need = math.log(1 / alpha)
    n = log_ratios.size
    if n == 0:
        return -math.inf

    def excess(t: float) -> float:
        return log_capital(np.clip((log_ratios - t) / clip, -1.0, 1.0)) - need

    high = location(log_ratios, clip)  # never rejected: the bets there have mean zero
    floor = float(log_ratios.min()) - clip  # every bet is won there
    # Excess falls monotonically in t. Find a rejected t near the centre first, then close in (Illinois method).
    step = clip * math.sqrt(need / n)
    f_high, low, f_low = -need, high, -need
    while f_low <= 0:
        if low <= floor:
            return -math.inf
        high, f_high = low, f_low
        low = max(floor, low - step)
        f_low = excess(low)
        step *= 2
    side = 0
    while high - low > tolerance:
        t = low + (high - low) * f_low / (f_low - f_high)
        t = min(max(t, low + tolerance / 2), high - tolerance / 2)
        f = excess(t)
        if f > 0:
            low, f_low = t, f
            f_high = f_high / 2 if side > 0 else f_high
            side = 1
        else:
            high, f_high = t, f
            f_low = f_low / 2 if side < 0 else f_low
            side = -1
    return low


def upper_bound(log_ratios: Array, clip: float, alpha: float, tolerance: float = 1e-3) -> float:
    """Smallest t that the test rejects from above at level alpha; inf when none is."""
    return -lower_bound(-log_ratios, clip, alpha, tolerance)


def _log_wealth(x: Array) -> Array:
    """Log of each fixed bettor's capital: shape [len(FRACTIONS)]."""
    whole = x.size - x.size % _BLOCK
    total: Array = np.log1p(FRACTIONS[:, None] * x[whole:]).sum(axis=1)
    if whole:
        # One log per block of factors instead of one per factor; blocks run along the first axis, which numpy
        # multiplies row by row.
        blocks = x[:whole].reshape(_BLOCK, -1)
        for k, fraction in enumerate(FRACTIONS):
            total[k] += float(np.log(np.multiply.reduce(1.0 + fraction * blocks, axis=0)).sum())
    return total


def _mix(log_wealth: Array) -> float:
    top = float(log_wealth.max())
    return top + math.log(float((SHARES * np.exp(log_wealth - top)).sum()))
