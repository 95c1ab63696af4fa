"""The betting test by simulation, with fixed seeds: budgets are held at every look, and the power is as documented."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis_streams import ratios
from ddtree_operator.analysis.policy import ULP, Policy
from ddtree_operator.analysis.sequential import (
    FRACTIONS,
    SHARES,
    location,
    log_capital,
    lower_bound,
    remaining_pairs,
    upper_bound,
)
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit

POLICY = Policy.from_spec(AnalysisSpec())
MARGIN = POLICY.gates[0].log_threshold
CLIP = POLICY.clip


def paths(x: np.ndarray) -> np.ndarray:
    """Log-capital after every pair: shape [runs, pairs]."""
    wealth = np.cumsum(np.log1p(FRACTIONS[:, None, None] * x), axis=2)
    top = wealth.max(axis=0)
    return top + np.log((SHARES[:, None, None] * np.exp(wealth - top)).sum(axis=0))


def first_pass(logs: np.ndarray, threshold: float = MARGIN, alpha: float = 0.01) -> np.ndarray:
    """Pairs until the test is won, per run; inf when never."""
    won = paths(np.clip((logs - threshold) / CLIP, -1, 1)) >= math.log(1 / alpha)
    return np.where(won.any(axis=1), won.argmax(axis=1) + 1, np.inf)


def first_fail(logs: np.ndarray, threshold: float = MARGIN, alpha: float = POLICY.rollback_share) -> np.ndarray:
    return first_pass(-logs, -threshold, alpha)


def test_capital_equals_its_definition():
    x = np.random.default_rng(0).uniform(-1, 1, 517)
    assert log_capital(x) == pytest.approx(paths(x[None])[0, -1])
    assert log_capital(x[:0]) == pytest.approx(0.0)
    assert SHARES.sum() == pytest.approx(1.0)
    assert FRACTIONS.max() < 1


def test_ten_thousand_losses_do_not_underflow():
    assert math.isfinite(log_capital(-np.ones(10_000)))
    assert log_capital(np.ones(10_000)) == pytest.approx(10_000 * math.log(1.95), rel=0.01)


@pytest.mark.parametrize("clip", [0.1, 0.25, 10.0])
def test_location_is_the_root(clip):
    logs = np.random.default_rng(1).standard_t(3, 501) * 0.3 + 0.2
    t = location(logs, clip)
    assert np.clip(logs - t, -clip, clip).mean() == pytest.approx(0, abs=1e-9)
    assert location(np.full(5, 0.3), clip) == pytest.approx(0.3)
    assert math.isnan(location(logs[:0], clip))
    assert location(logs, 100.0) == pytest.approx(logs.mean())


def test_bounds_are_where_the_test_turns():
    logs = np.random.default_rng(2).normal(0.2, 0.3, 80)
    low, high = lower_bound(logs, CLIP, 0.01), upper_bound(logs, CLIP, 0.01)
    assert low < location(logs, CLIP) < high
    need = math.log(100)
    assert log_capital(np.clip((logs - low) / CLIP, -1, 1)) >= need
    assert log_capital(np.clip((logs - low - 0.002) / CLIP, -1, 1)) < need
    assert log_capital(np.clip((high - logs) / CLIP, -1, 1)) >= need
    assert lower_bound(logs[:3], CLIP, 0.01) == -math.inf
    assert upper_bound(logs[:0], CLIP, 0.01) == math.inf


RNG_RUNS, RNG_PAIRS = 2000, 600


def test_false_promotion_at_a_loss_of_the_margin():
    logs = ratios(np.random.default_rng(10), (RNG_RUNS, RNG_PAIRS), -0.03, 0.3, 0.5)
    assert np.isfinite(first_pass(logs)).mean() <= 0.01


def test_false_rollback_at_no_difference():
    logs = ratios(np.random.default_rng(11), (RNG_RUNS, RNG_PAIRS), 0.0, 0.3, 0.5)
    assert np.isfinite(first_fail(logs)).mean() <= 0.01


def test_false_rollback_exactly_at_the_margin():
    logs = ratios(np.random.default_rng(12), (RNG_RUNS, RNG_PAIRS), -0.03, 0.2, 0.0)
    assert np.isfinite(first_fail(logs)).mean() <= 0.01


def test_budget_holds_under_heavy_tails():
    rng = np.random.default_rng(13)
    logs = math.log(0.97) + 0.2 * (rng.standard_t(1.5, (RNG_RUNS, RNG_PAIRS)))
    assert np.isfinite(first_pass(logs)).mean() <= 0.01
    assert np.isfinite(first_fail(logs)).mean() <= 0.01


def test_budget_holds_for_losses_on_few_requests():
    """All of the loss sits on one prompt in five, which loses 15 %: far from symmetric."""
    rng = np.random.default_rng(14)
    hit = rng.random((RNG_RUNS, RNG_PAIRS)) < math.log(0.97) / math.log(0.85)
    assert np.isfinite(first_pass(np.where(hit, math.log(0.85), 0.0))).mean() <= 0.01


def test_budget_holds_under_slow_phases_shared_by_both_sides():
    """A noisy neighbour for minutes at a time: both sides of a pair see nearly the same of it, in random order."""
    rng = np.random.default_rng(15)
    runs, pairs, keep = 1000, 600, 0.97
    drift = np.zeros(runs)
    logs = np.empty((runs, pairs))
    for i in range(pairs):
        sides = []
        for _ in range(2):
            drift = keep * drift + np.sqrt(1 - keep**2) * rng.normal(size=runs) * 0.5
            sides.append(drift)
        order = np.where(rng.random(runs) < 0.5, 1.0, -1.0)
        logs[:, i] = math.log(0.97) + order * (sides[1] - sides[0]) + 0.1 * rng.normal(size=runs)
    assert np.isfinite(first_pass(logs)).mean() <= 0.01
    assert np.isfinite(first_fail(logs)).mean() <= 0.01


def test_budget_holds_when_a_fixed_prompt_set_is_repeated():
    rng = np.random.default_rng(16)
    runs, prompts = 1000, 40
    effect = rng.normal(0, 0.3, (runs, prompts))
    effect += math.log(0.97) - np.array([location(e, CLIP) for e in effect])[:, None]
    orders = [rng.permuted(np.tile(np.arange(prompts), (runs, 1)), axis=1) for _ in range(8)]
    logs = np.take_along_axis(effect, np.concatenate(orders, axis=1), axis=1)
    assert np.isfinite(first_pass(logs, threshold=math.log(0.97) + 1e-9)).mean() <= 0.01


@pytest.mark.parametrize(
    ("change", "cv", "correlation", "threshold", "median", "most"),
    [
        (0.20, 0.3, 0.5, MARGIN, 28, 50),
        (0.25, 0.3, 0.5, MARGIN, 22, 40),
        (0.50, 0.3, 0.5, MARGIN, 13, 20),
        (0.20, 0.2, 0.0, math.log(0.95), 22, 45),
        (0.10, 0.2, 0.0, math.log(0.95), 50, 100),
    ],
)
def test_pairs_needed_to_pass(change, cv, correlation, threshold, median, most):
    """The table of docs/reference/decisions.md."""
    logs = ratios(np.random.default_rng(20), (1000, 400), change, cv, correlation)
    needed = first_pass(logs, threshold)
    assert np.median(needed) <= median
    assert np.quantile(needed, 0.9) <= most


def test_pairs_needed_to_fail_a_misfit():
    logs = ratios(np.random.default_rng(21), (1000, 60), 1 / 2.1 - 1, 0.3, 0.5)
    assert np.median(first_fail(logs)) <= 10
    assert np.quantile(first_fail(logs), 0.9) <= 12


def test_identical_pairs():
    assert first_pass(np.zeros((1, 200)))[0] <= 55
    assert first_pass(np.zeros((1, 200)), math.log(0.95))[0] <= 35


def test_ulp_table_matches_the_formats():
    for bits, name in ((7, "bfloat16"), (10, "float16")):
        assert ULP[name] == 2.0 ** (4 - bits)
    assert ULP["float32"] == 0.0  # by choice, not by format: nothing but exact ties is excused there


def test_forecast_is_about_right():
    logs = ratios(np.random.default_rng(30), (1, 400), 0.10, 0.3, 0.5)
    x = np.clip((logs[0] - MARGIN) / CLIP, -1, 1)
    needed = first_pass(logs)[0]
    half = int(needed / 2)
    assert 0.3 * half <= (remaining_pairs(x[:half], 0.01) or 0) <= 3 * half
    assert remaining_pairs(x[:0], 0.01) is None
    assert remaining_pairs(-np.ones(5), 0.01) is None
