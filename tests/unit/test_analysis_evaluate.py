"""The joint gate: what may pass, what fails, what waits. Cases of field reports carry their number."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis_streams import IDS, noisy_pairs, pair, sample
from ddtree_operator.analysis import Divergence, MetricVerdict, Outcome, Pair, Policy, Tally, evaluate
from ddtree_operator.analysis.samples import problem
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit

POLICY = Policy.from_spec(AnalysisSpec())
GOOD = pair(accept=2.65, tps=25.0)
BAD = pair(accept=1.0, tps=10.0)
CANARY_ERROR = Pair(sample(), sample(error="timeout"))
BASELINE_ERROR = Pair(sample(error="timeout"), sample())
BOTH_ERROR = Pair(sample(error="x"), sample(error="y"))
WRONG_TEXT = replace(GOOD, canary=replace(GOOD.canary, output_ids=(9, 9)), divergence=Divergence(0, 3.0, 3.0))


def metric(verdict, name):
    return next(m for m in verdict.metrics if m.metric == name)


def test_no_pairs_is_not_yet():
    verdict = evaluate([], POLICY)
    assert verdict.outcome is Outcome.NOT_YET
    assert all(m.outcome is Outcome.NOT_YET for m in verdict.metrics)
    assert all(math.isfinite(x) for m in verdict.metrics for x in (m.baseline, m.canary, m.estimate, m.low, m.high))


def test_clear_gain_passes_at_min_pairs_and_not_before():
    outcomes = [evaluate([GOOD] * n, POLICY).outcome for n in range(1, 13)]
    assert outcomes[:9] == [Outcome.NOT_YET] * 9
    assert outcomes[9] is Outcome.PASS


def test_misfit_drafter_fails_within_ten_pairs():
    first = next(n for n in range(1, 30) if evaluate([BAD] * n, POLICY).outcome is Outcome.FAIL)
    assert first <= 10
    verdict = evaluate([BAD] * first, POLICY)
    assert "1.00 against 2.00 (-50.0%), credibly below -3.0%" in verdict.reason


def test_identical_pairs_pass_the_margin():
    first = next(n for n in range(1, 200) if evaluate([pair()] * n, POLICY).outcome is Outcome.PASS)
    assert first <= 60


def test_required_gain_is_not_met_by_equal_engines():
    policy = Policy.from_spec(AnalysisSpec.model_validate({"acceptLength": {"atLeast": "+10%"}}))
    assert evaluate([pair()] * 200, policy).outcome is Outcome.FAIL
    assert evaluate([GOOD] * 30, policy).outcome is Outcome.PASS


def test_faster_but_wrong_text_fails_at_once():
    verdict = evaluate([GOOD] * 3 + [WRONG_TEXT], POLICY)
    assert verdict.outcome is Outcome.FAIL
    assert "no tie to explain it" in verdict.reason
    assert "top-2 gaps 3" in verdict.reason


def test_vllm_42910_better_accept_length_with_lower_throughput_fails():
    """As many steps, a third slower."""
    verdict = evaluate([pair(accept=2.65, tps=13.7)] * 60, POLICY)
    assert verdict.outcome is Outcome.FAIL
    assert metric(verdict, "acceptLength").outcome is Outcome.PASS
    assert metric(verdict, "throughput").outcome is Outcome.FAIL


def test_a_stalled_request_holds_promotion_back_until_it_is_outweighed():
    """One answer of a hundred takes a minute: single requests hardly show it, all seconds together do."""
    stalled = replace(GOOD, canary=replace(GOOD.canary, seconds=GOOD.canary.seconds * 100))
    verdict = evaluate([GOOD] * 60 + [stalled], POLICY)
    assert metric(verdict, "throughput").outcome is Outcome.PASS
    assert metric(verdict, "aggregateThroughput").outcome is Outcome.NOT_YET
    assert verdict.outcome is Outcome.NOT_YET
    assert "below -5.0%" in verdict.reason
    assert evaluate([GOOD] * 800 + [stalled], POLICY).outcome is Outcome.PASS


def test_budgets_may_differ_and_their_cost_is_said_beside_the_accept_length():
    """A larger tree verifies more for each token; a rate would fall by that alone, the accept length does not."""
    policy = replace(POLICY, baseline_window=16, canary_window=64)
    found = metric(evaluate([GOOD] * 20, policy), "acceptLength")
    assert found.outcome is Outcome.PASS
    assert "2.65 against 2.00 (+32.5%) for 24.2 verified tokens each against 8.0" in found.reason
    assert "verified" not in metric(evaluate([GOOD] * 20, POLICY), "acceptLength").reason


def test_throughput_can_be_switched_off():
    policy = Policy.from_spec(AnalysisSpec.model_validate({"throughput": {"enabled": False}}))
    verdict = evaluate([pair(accept=2.65, tps=5.0)] * 20, policy)
    assert verdict.outcome is Outcome.PASS
    assert [m.metric for m in verdict.metrics] == ["acceptLength", "parity"]


UNEXPLAINED = replace(WRONG_TEXT, divergence=Divergence(0, error="no answer within 60 s"))
KINDS = {"ok": GOOD, "fail": BAD, "error": CANARY_ERROR, "inconclusive": UNEXPLAINED}
MORE_KINDS = KINDS | {"baseline": BASELINE_ERROR, "both": BOTH_ERROR, "wrong": WRONG_TEXT}


@pytest.mark.parametrize(("min_pairs", "longest"), [(1, 5), (2, 6), (4, 5)])
def test_argo_4479_failed_or_missing_measurements_never_end_as_success(min_pairs, longest):
    """B1: over all short sequences of ok, fail, error and inconclusive, a pass needs enough that were ok."""
    policy = replace(POLICY, min_pairs=min_pairs, false_promote=0.4, false_rollback=0.4)
    passed = 0
    for length in range(1, longest + 1):
        for names in itertools.product(KINDS, repeat=length):
            verdict = evaluate([KINDS[n] for n in names], policy)
            if verdict.outcome is Outcome.PASS:
                passed += 1
                assert names.count("ok") >= min_pairs
                assert names.count("ok") > names.count("fail")
                assert names.count("error") == names.count("inconclusive") == 0
    assert passed > 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(MORE_KINDS)), max_size=40))
def test_pass_implies_enough_ok_in_longer_sequences(names):
    verdict = evaluate([MORE_KINDS[n] for n in names], POLICY)
    if verdict.outcome is Outcome.PASS:
        assert names.count("ok") >= POLICY.min_pairs
        assert verdict.pairs >= POLICY.min_pairs + 10 * verdict.errors
        assert "wrong" not in names
        assert "inconclusive" not in names


@settings(max_examples=50, deadline=None)
@given(st.permutations([GOOD] * 6 + [BAD] * 4 + [CANARY_ERROR] * 2 + [pair()] * 8))
def test_order_does_not_matter(pairs):
    ours, sorted_ones = evaluate(pairs, POLICY), evaluate(sorted(pairs, key=repr), POLICY)
    assert ours.outcome is sorted_ones.outcome
    assert ours.pairs == sorted_ones.pairs


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"completion_tokens": 0},
        {"completion_tokens": -3},
        {"completion_tokens": math.nan},
        {"accepted_drafts": -1},
        {"verify_steps": -1},
        {"verify_steps": 0, "accepted_drafts": 7},
        {"verify_steps": 1, "accepted_drafts": 0},
        {"proposed_drafts": 10, "accepted_drafts": 1070},
        {"completion_tokens": True},
    ],
)
@pytest.mark.parametrize("side", ["baseline", "canary"])
def test_sglang_11572_more_accepted_than_proposed_and_other_senseless_numbers_never_pass(change, side):
    """B3, B4: such a sample is an error, not evidence."""
    broken = replace(GOOD, **{side: replace(getattr(GOOD, side), **change)})
    assert problem(getattr(broken, side))
    verdict = evaluate([broken] * 50, POLICY)
    assert verdict.outcome is not Outcome.PASS
    assert verdict.pairs == 0
    assert verdict.errors == 50


def test_sglang_13754_zeros_in_answers_are_inactive_speculation_not_bad_acceptance():
    """B4."""
    policy = replace(POLICY, canary_speculates=True)
    silent = replace(GOOD, canary=replace(GOOD.canary, verify_steps=0, accepted_drafts=0))
    verdict = evaluate([silent] * 12, policy)
    assert verdict.outcome is not Outcome.PASS
    assert "speculation is inactive" in verdict.reason
    plain = replace(silent, baseline=replace(silent.baseline, verify_steps=0, accepted_drafts=0))
    assert evaluate([plain] * 100, policy).outcome is not Outcome.PASS


def test_canary_that_fails_every_request_fails():
    verdicts = [evaluate([CANARY_ERROR] * n, POLICY) for n in range(1, 30)]
    first = next(v for v in verdicts if v.outcome is Outcome.FAIL)
    assert first.errors <= 15
    assert "the canary alone failed" in first.reason
    assert "timeout" in first.reason


def test_unequal_error_rates_fail_equal_ones_do_not():
    third = [GOOD, GOOD, CANARY_ERROR] * 30
    assert evaluate(third, POLICY).outcome is Outcome.FAIL
    both = [GOOD, GOOD, CANARY_ERROR, GOOD, GOOD, BASELINE_ERROR] * 50
    verdict = evaluate(both, POLICY)
    assert verdict.outcome is Outcome.NOT_YET
    assert "unusable" in verdict.reason
    assert "timeout" in verdict.reason


def test_an_error_asks_for_more_pairs():
    assert evaluate([GOOD] * 19 + [CANARY_ERROR], POLICY).outcome is Outcome.NOT_YET
    assert evaluate([GOOD] * 20 + [CANARY_ERROR], POLICY).outcome is Outcome.PASS


def test_broken_baseline_or_both_is_not_the_canarys_fault():
    assert evaluate([BASELINE_ERROR] * 100, POLICY).outcome is Outcome.NOT_YET
    assert evaluate([BOTH_ERROR] * 100, POLICY).outcome is Outcome.NOT_YET
    assert evaluate(([GOOD] * 2 + [BASELINE_ERROR]) * 50, POLICY).outcome is Outcome.NOT_YET


def test_suna_3403_one_error_in_little_traffic_decides_nothing():
    """B5: three requests, one of them failed, then silence."""
    for pairs in ([GOOD, CANARY_ERROR, GOOD], [CANARY_ERROR], [GOOD] * 3):
        assert evaluate(pairs, POLICY).outcome is Outcome.NOT_YET


def test_argo_3259_huge_error_bodies_stay_small():
    """B20: error bodies of megabytes, many of them."""
    huge = Pair(sample(), sample(error="<html>" + "x " * 2_500_000))
    verdict = evaluate([huge] * 40, POLICY)
    assert len(verdict.reason) <= 500
    assert "\n" not in verdict.reason
    assert all(len(m.reason) <= 500 for m in verdict.metrics)


def test_checks_join_the_gate():
    ok = MetricVerdict("prometheus/errors", Outcome.PASS, 0, 0, 0, 0, 0, 0, 0, "0 of at most 1")
    pairs = [GOOD] * 20
    assert evaluate(pairs, POLICY, [ok]).outcome is Outcome.PASS
    assert evaluate(pairs, POLICY, [replace(ok, outcome=Outcome.NOT_YET)]).outcome is Outcome.NOT_YET
    assert evaluate(pairs, POLICY, [replace(ok, outcome=Outcome.FAIL)]).outcome is Outcome.FAIL


def test_a_few_disasters_hidden_by_clipping_do_not_pass():
    """One request in twelve collapses: the typical request is equal, the mean is not."""
    pairs = ([pair()] * 11 + [pair(accept=1.0, base_accept=3.0)]) * 40
    verdict = evaluate(pairs, POLICY)
    assert metric(verdict, "acceptLength").outcome is not Outcome.PASS


def test_maximum_is_named_when_undecided():
    policy = replace(POLICY, max_pairs=20)
    assert "undecided after 20 pairs" in evaluate([pair()] * 20, policy).reason


def test_interval_holds_estimate_and_narrows():
    widths = []
    for n in (30, 100, 400):
        m = metric(evaluate(noisy_pairs(1, n, 0.2, 0.2), POLICY), "acceptLength")
        assert -1 <= m.low < m.estimate < m.high
        widths.append(m.high - m.low)
    assert widths == sorted(widths, reverse=True)


def test_tie_is_explained_and_counted():
    tie = replace(GOOD, canary=replace(GOOD.canary, output_ids=(*IDS[:5], 99)), divergence=Divergence(5, 0.1, 0.0))
    verdict = evaluate([GOOD] * 20 + [tie], POLICY)
    assert verdict.outcome is Outcome.PASS
    assert "20 of 21 outputs equal, 1 differ at a tie" in verdict.reason


def test_unread_gap_waits():
    unread = replace(
        GOOD, canary=replace(GOOD.canary, output_ids=(1, 2)), divergence=Divergence(0, 0.1, None, "no answer from x")
    )
    verdict = evaluate([GOOD] * 20 + [unread], POLICY)
    assert verdict.outcome is Outcome.NOT_YET
    assert "no answer from x" in verdict.reason


def test_missing_token_ids_never_pass():
    dumb = replace(GOOD, canary=replace(GOOD.canary, output_ids=()))
    verdict = evaluate([dumb] * 50, POLICY)
    assert verdict.outcome is Outcome.NOT_YET
    assert "without token ids" in verdict.reason


def test_a_look_at_ten_thousand_pairs_is_cheap():
    pairs = noisy_pairs(3, 200, 0.0, 0.0)
    tally = Tally(POLICY)
    for _ in range(50):
        for p in pairs:
            tally.add(p)
    tally.verdict()
    cost = []
    for _ in range(10):
        start = time.process_time()  # CPU time: the machine is shared
        tally.verdict()
        cost.append(time.process_time() - start)
    assert min(cost) < 0.005
