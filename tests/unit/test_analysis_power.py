"""Pairs needed, said beforehand; and the picture of an interval."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.dom import minidom

import pytest

from analysis_streams import noisy_pairs, pair
from ddtree_operator.analysis import Outcome, Policy, evaluate
from ddtree_operator.analysis.plot import metric_series, svg, text
from ddtree_operator.analysis.power import Need, deadline_problem, fewest_pairs, pairs_needed, spread, statement
from ddtree_operator.analysis.record import Record, timeline
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit

POLICY = Policy.from_spec(AnalysisSpec())
ACCEPT, THROUGHPUT = POLICY.gates


def test_more_effect_needs_fewer_pairs():
    needs = [pairs_needed(POLICY, ACCEPT, c, 0.3).median for c in (0.5, 0.2, 0.1)]
    assert needs == sorted(needs)
    assert needs[0] <= 15
    assert pairs_needed(POLICY, ACCEPT, -0.5, 0.3).most <= 14
    assert pairs_needed(POLICY, ACCEPT, -0.03, 0.3, runs=20, limit=200) == Need(None, None)


def test_forecast_matches_the_gate_itself():
    needed = pairs_needed(POLICY, ACCEPT, 0.2, 0.01)
    first = next(n for n in range(1, 60) if evaluate([pair(2.4)] * n, POLICY).metrics[0].outcome is Outcome.PASS)
    assert abs(needed.median - first) <= 2


def test_fewest_pairs():
    assert fewest_pairs(POLICY) == 10
    assert fewest_pairs(replace(POLICY, min_pairs=1)) == 9
    assert fewest_pairs(replace(POLICY, min_pairs=40)) == 40


def test_statement_and_deadline():
    sentence = statement(POLICY, 2.0, 4)
    assert "clear cases take 10 pairs" in sentence
    assert "acceptLength: telling no change from a loss of 3.0% takes about" in sentence
    assert deadline_problem(POLICY, 60, 2.0) is None
    assert "needs 10 pairs, 20 s" in (deadline_problem(POLICY, 15, 2.0) or "")


def test_spread():
    assert spread([0.0, 0.2]) == pytest.approx(0.1414, abs=1e-3)
    assert math.isnan(spread([1.0]))


@pytest.mark.parametrize("pairs", [noisy_pairs(0, 60, 0.25, 0.2), [pair()] * 30, [pair(1.0, 5.0)] * 12])
def test_pictures(pairs):
    record = Record(POLICY, tuple(pairs), evaluate(pairs, POLICY))
    series = metric_series(timeline(record, 40), "acceptLength")
    picture = svg(series, "a < b & c")
    minidom.parseString(picture)
    assert "threshold -3.0%" in picture
    drawn = text(series, width=60, height=12)
    assert len(drawn.splitlines()) == 13
    assert "●" in drawn
    assert "┄" in drawn or "┼" in drawn
    assert max(map(len, drawn.splitlines())) <= 70


def test_unknown_metric():
    with pytest.raises(ValueError, match="there are: acceptLength, aggregateThroughput, parity, throughput"):
        metric_series([evaluate([], POLICY)], "x")
