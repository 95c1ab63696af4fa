"""Pairs needed, said beforehand; and the picture of an interval."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.dom import minidom

import pytest

from analysis_streams import noisy_pairs, pair, sample
from ddtree_operator.analysis import Outcome, Pair, Policy, evaluate
from ddtree_operator.analysis.pace import Pace, pace
from ddtree_operator.analysis.plot import metric_series, svg, text
from ddtree_operator.analysis.power import Need, fewest_pairs, outlook, pairs_needed, statement
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


PACE = Pace(34, 2.0, 64, True, {"acceptLength": 0.1, "throughput": 0.05})
SOURCE = "measured over 34 pairs of revision 1"


def spec(**changes) -> AnalysisSpec:
    return AnalysisSpec.model_validate(changes)


def test_without_measurements_the_spread_is_assumed_and_the_time_unknown():
    said = statement(outlook(spec()))
    assert "telling no change from a loss of 3.0% in acceptLength takes about 464 pairs;" in said
    assert "a clear case takes 10 pairs" in said
    assert "how long is not known before pairs were timed; spread 0.20 and 0.15 is assumed" in said
    assert " s a pair" not in said


def test_with_measurements_it_says_how_long():
    found = outlook(spec(), PACE, SOURCE)
    assert found.allowed == 900  # 30 minutes of 2 s
    accept = found.forecasts[0]
    assert (accept.measured, accept.spread) == (True, 0.1)
    assert found.time(accept.need.median) == accept.need.median * 2.0
    said = statement(found)
    assert f"{SOURCE}: 2 s a pair, spread 0.10 and 0.05" in said
    assert "a clear case takes 10 pairs (20 s)" in said
    assert "may stay undecided" not in said
    assert outlook(spec(concurrency=4), PACE, SOURCE).time(10) == 6.0  # three batches
    assert outlook(spec(maxTokens=32), PACE, SOURCE).seconds == 1.0
    assert outlook(spec(maxTokens=640), PACE, SOURCE).seconds == 20.0
    assert outlook(spec(maxTokens=640), replace(PACE, cut=False), SOURCE).seconds == 2.0


def test_it_says_when_deadline_or_max_pairs_leave_too_few():
    said = statement(outlook(spec(deadline="1m"), PACE, SOURCE))
    assert "maxPairs and deadline allow 30 pairs, so acceptLength and throughput may stay undecided" in said
    said = statement(outlook(spec(maxPairs=100)))
    assert "maxPairs allow 100 pairs, so acceptLength may stay undecided" in said


def test_what_cannot_be_met_is_refused_with_the_number():
    problem = outlook(spec(deadline="15s"), PACE, SOURCE).problem
    assert problem.startswith("spec.canary.analysis.deadline: 15s is too short, the clearest case takes 10 pairs, 20 s")
    assert "at 2 s a pair and 1 at a time (measured over 34 pairs of revision 1)" in problem
    assert outlook(spec(deadline="20s"), PACE, SOURCE).problem == ""
    assert outlook(spec(deadline="15s", concurrency=2), PACE, SOURCE).problem == ""
    assert outlook(spec(deadline="15s")).problem == ""  # nothing was timed: nothing is claimed
    few = outlook(spec(minPairs=2, maxPairs=8)).problem
    assert few.startswith("spec.canary.analysis.maxPairs: 8 pairs decide nothing, the clearest case takes 9")
    strict = spec(maxPairs=12, errorBudget={"falsePromote": "0.01%", "falseRollback": "1%"})
    assert "12 pairs decide nothing, the clearest case takes 16 at" in outlook(strict).problem
    check = {"name": "ttft", "address": "http://p", "query": "q", "max": 1, "interval": "20m"}
    assert "prometheus check ttft takes 40 min for 3 readings" in outlook(spec(prometheus=[check])).problem


def test_a_deadline_in_which_not_even_a_large_gain_shows_is_refused_with_the_number():
    """At the spread that was measured; an assumed one refuses nothing."""
    noisy = replace(PACE, seconds=4.0, spread={"acceptLength": 0.1, "throughput": 0.6})
    found = outlook(spec(deadline="1m"), noisy, SOURCE)
    assert found.problem.startswith(
        "spec.canary.analysis.deadline: 1m allows 15 pairs, and even +50% in throughput takes "
    )
    assert "pairs (" in found.problem
    assert found.problem.endswith(f" to show at spread 0.60 ({SOURCE}); raise it, or lower the noise")
    assert outlook(spec(deadline="1m"), replace(noisy, spread={}), SOURCE).problem == ""
    assert outlook(spec(deadline="30m"), noisy, SOURCE).problem == ""
    assert outlook(spec(maxPairs=15), noisy, SOURCE).problem.startswith("spec.canary.analysis.maxPairs: 15 allows 15")


def test_nothing_below_the_fewest_pairs_can_pass():
    for min_pairs in (2, 12):
        policy = Policy.from_spec(spec(minPairs=min_pairs, maxPairs=50))
        best = [pair(accept=9.0, tps=900.0)]
        fewest = fewest_pairs(policy)
        assert evaluate(best * (fewest - 1), policy).outcome is Outcome.NOT_YET
        assert evaluate(best * fewest, policy).outcome is Outcome.PASS


def test_senseless_numbers_are_named():
    with pytest.raises(ValueError, match="nonInferiority: 100% would let everything pass"):
        outlook(spec(acceptLength={"nonInferiority": "100%"}))


def test_a_required_gain_is_refuted_or_shown():
    [loss, gain] = outlook(
        spec(acceptLength={"atLeast": "+10%"}, throughput={"enabled": False}), changes=(0.0, 0.3)
    ).forecasts
    assert (loss.passes, gain.passes) == (False, True)
    said = statement(outlook(spec(acceptLength={"atLeast": "+10%"})))
    assert "refuting a gain of 10.0% in acceptLength takes about" in said


def test_pace_is_taken_from_pairs_and_survives_json():
    pairs = noisy_pairs(3, 40, 0.1, 0.0)
    seen = pace(pairs)
    assert seen is not None
    assert seen.pairs == 40
    assert seen.seconds == pytest.approx(sum(p.baseline.seconds + p.canary.seconds for p in pairs) / 40)
    assert seen.cut is False
    back = Pace.from_dict(json.loads(json.dumps(seen.as_dict())))
    assert back is not None
    assert back.seconds == pytest.approx(seen.seconds, rel=1e-3)
    assert pace([*pairs[:4], *[Pair(sample(), sample(error="x"))] * 9]) is None
    assert [Pace.from_dict(x) for x in (None, {}, {**seen.as_dict(), "seconds": 0}, "x")] == [None] * 4
    equal = pace([pair()] * 6)
    assert equal is not None
    assert (equal.cut, equal.spread["acceptLength"]) == (True, 0.0)
    assert outlook(spec(), equal, SOURCE).forecasts[0].need.median == 52


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
