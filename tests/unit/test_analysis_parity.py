"""Greedy outputs compared: equal, tie, bug."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from analysis_streams import sample
from ddtree_operator.analysis import Divergence, Pair, Policy, evaluate, record
from ddtree_operator.analysis.parity import Parity, compare, first_difference
from ddtree_operator.analysis.policy import tie_gap
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [((1, 2), (1, 2), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0), ((5,), (6,), 0)],
)
def test_first_difference(a, b, position):
    assert first_difference(a, b) == position


def differing(divergence: Divergence | None) -> Pair:
    return Pair(sample(ids=(1, 2, 3)), sample(ids=(1, 7, 3)), divergence=divergence)


@pytest.mark.parametrize(
    ("divergence", "found"),
    [
        (Divergence(1, 0.2, 0.25), Parity.TIE),
        (Divergence(1, 0.0, 0.0), Parity.TIE),
        (Divergence(1, 0.2, 0.26), Parity.BUG),
        (Divergence(1, 5.0, 0.0), Parity.BUG),
        (Divergence(0, 0.0, 0.0), Parity.BUG),  # says nothing about the position where they differ
        (Divergence(1, math.nan, 0.0), Parity.BUG),
        (Divergence(1, None, None, "gone"), Parity.UNRESOLVED),
        (Divergence(1, 0.1, None, "gone"), Parity.UNRESOLVED),
        (Divergence(1, None, 3.0, "gone"), Parity.BUG),
        (Divergence(1, None, None), Parity.BUG),
        (None, Parity.BUG),
    ],
)
def test_classes(divergence, found):
    assert compare(differing(divergence), 0.25) is found


def test_gaps_of_the_samples_themselves_count_too():
    a = sample(ids=(1, 2))
    b = sample(ids=(1, 3))
    near = Pair(_with_gaps(a, (9.0, 0.1)), _with_gaps(b, (9.0, 0.2)))
    clear = Pair(_with_gaps(a, (9.0, 0.1)), _with_gaps(b, (9.0, 2.0)))
    assert compare(near, 0.25) is Parity.TIE
    assert compare(clear, 0.25) is Parity.BUG


def _with_gaps(s, gaps):
    from dataclasses import replace

    return replace(s, top2_gaps=gaps)


def test_no_ids_is_unknown():
    assert compare(Pair(sample(ids=()), sample()), 0.25) is Parity.UNKNOWN
    assert compare(Pair(sample(), sample()), 0.25) is Parity.EQUAL


def test_between_deterministic_engines_no_ulp_is_tolerated():
    assert tie_gap("2ulp", "bfloat16", deterministic=True) == 0.0
    assert tie_gap("0.01", "bfloat16", deterministic=True) == 0.01  # said in log-prob: meant so


@pytest.mark.parametrize(
    ("text", "dtype", "deterministic", "words"),
    [
        ("2ulp", "float32", False, "2ulp of float32, which the canary says it computes in"),
        ("2ulp", "", False, "2ulp of bfloat16, assumed: the canary did not say its own"),
        ("2ulp", "float8_e4m3fn", False, "assumed: the canary computes in float8_e4m3fn"),
        ("2ulp", "bfloat16", True, "deterministic"),
        ("0.01", "", False, "in log-prob"),
    ],
)
def test_where_the_gap_comes_from_is_recorded_and_decides_nothing(text, dtype, deterministic, words):
    spec = AnalysisSpec.model_validate({"parity": {"tieGap": text}})
    policy = Policy.from_spec(spec, dtype=dtype, deterministic=deterministic)
    assert words in policy.tie_gap_from
    assert policy == replace(policy, tie_gap_from="")
    kept = record.Record(policy, (), evaluate((), policy))
    assert record.load(record.dump(kept)).policy.tie_gap_from == policy.tie_gap_from


def test_tie_gap_follows_the_dtype():
    assert tie_gap("2ulp") == 0.25
    assert tie_gap("2ulp", "torch.float32") == 0.0
    assert tie_gap("0.01", "float32") == 0.01
    assert tie_gap("2ulp", "float8_e4m3fn") == 0.25
