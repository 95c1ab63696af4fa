"""Policies from specs."""

from __future__ import annotations

import pytest

from ddtree_operator.analysis import Policy
from ddtree_operator.analysis.policy import Gate
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit


def test_defaults():
    policy = Policy.from_spec(AnalysisSpec())
    assert [(g.metric, g.threshold) for g in policy.gates] == [("acceptLength", -0.03), ("throughput", -0.05)]
    assert policy.false_promote == policy.false_rollback == 0.01
    assert policy.min_pairs == 10
    assert policy.tie_gap == 0.25


def test_budgets_add_up():
    policy = Policy.from_spec(AnalysisSpec())
    assert policy.rollback_share * len(policy.gates) + policy.error_budget == pytest.approx(policy.false_rollback)


def test_required_gain_replaces_margin():
    policy = Policy.from_spec(AnalysisSpec.model_validate({"acceptLength": {"atLeast": "+10%"}}))
    assert policy.gates[0].threshold == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"acceptLength": {"nonInferiority": "100%"}}, "let everything pass"),
        ({"errorBudget": {"falsePromote": "0%"}}, "errorBudget.falsePromote is 0%"),
        ({"errorBudget": {"falseRollback": "60%"}}, "errorBudget.falseRollback is 60%"),
    ],
)
def test_senseless_numbers_are_refused(spec, says):
    with pytest.raises(ValueError, match=says):
        Policy.from_spec(AnalysisSpec.model_validate(spec))


def test_direct_construction_is_checked():
    with pytest.raises(ValueError, match="compares no metric"):
        Policy(gates=())
    with pytest.raises(ValueError, match="sensible"):
        Policy(gates=(Gate("acceptLength", -1.0),))
    with pytest.raises(ValueError, match="clip"):
        Policy(gates=(Gate("acceptLength", -0.03),), clip=0)
