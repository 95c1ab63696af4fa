"""PromQL readings: exactly one fresh finite series, or an error; errors never pass (B2, B3)."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from ddtree_operator.analysis import Outcome
from ddtree_operator.analysis.prometheus import Reading, active, given_up, judge, read
from ddtree_operator.api.spec import AnalysisSpec, PrometheusCheck

pytestmark = pytest.mark.unit

NOW = 1_700_000_000.0
CHECK = PrometheusCheck(name="errors", address="http://p", query="q", max=0.05)


def vector(*values, at=NOW, **more) -> str:
    result = [{"metric": {"rank": str(i)}, "value": [at, v]} for i, v in enumerate(values)]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, **more})


@pytest.mark.parametrize(("text", "value"), [("1.5", 1.5), ("-0", 0.0), ("0", 0.0), ("1e3", 1000.0)])
def test_one_series_is_a_reading(text, value):
    assert read(vector(text), NOW, 300) == Reading(value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "not JSON: (empty)"),
        ("<html>log in</html>", "not JSON: <html>"),
        ('{"status": "succ', "not JSON"),
        ('{"status": "error", "error": "parse error"}', "parse error"),
        ("[]", "reports an error"),
        (vector(), "0 series"),
        (vector("3.1", "1.0"), "2 series; aggregate"),
        (vector("NaN"), "value is NaN"),
        (vector("+Inf"), "value is +Inf"),
        (vector("1", at=NOW - 1200), "1200 s old"),
        (vector("1", at=NOW + 1200), "1200 s ahead of this clock"),
        (vector("1", warnings=["partial"]), "may be incomplete"),
        (json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [NOW, "1"]}}), "a scalar"),
        (json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}), "a matrix"),
        (json.dumps({"status": "success"}), "a nothing"),
        (json.dumps({"status": "success", "data": {"resultType": "vector", "result": [{}]}}), "no single value"),
    ],
)
def test_argo_1466_4535_4680_what_is_not_a_number_of_one_series_is_an_error_and_never_a_pass(body, says):
    reading = read(body, NOW, 300)
    assert says in (reading.error or "")
    for n in (1, 3, 10):
        assert judge(CHECK, [reading] * n).outcome is Outcome.NOT_YET


GOOD, BAD, ERROR = Reading(0.01), Reading(0.2), Reading(error="down")


@pytest.mark.parametrize(
    ("readings", "outcome"),
    [
        ([], Outcome.NOT_YET),
        ([GOOD] * 2, Outcome.NOT_YET),
        ([GOOD] * 3, Outcome.PASS),
        ([BAD] * 2, Outcome.NOT_YET),
        ([BAD] * 3, Outcome.FAIL),
        ([BAD, ERROR, BAD, ERROR, BAD], Outcome.FAIL),
        ([GOOD, ERROR, GOOD, GOOD], Outcome.NOT_YET),
        ([GOOD] * 3 + [ERROR], Outcome.NOT_YET),
        ([BAD] * 3 + [GOOD] * 3, Outcome.PASS),
        ([GOOD, BAD] * 5, Outcome.NOT_YET),
    ],
)
def test_rows(readings, outcome):
    assert judge(CHECK, readings).outcome is outcome


@pytest.mark.parametrize(
    ("bounds", "says"), [({}, "neither min nor max is set"), ({"min": 2, "max": 1}, "min 2 is above max 1")]
)
def test_a_check_that_nothing_can_pass_is_refused(bounds, says):
    with pytest.raises(ValueError, match=says):
        PrometheusCheck(name="x", address="http://p", query="q", **bounds)


def test_two_checks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two checks of the name errors"):
        AnalysisSpec(prometheus=[CHECK, CHECK])


def test_flagger_takes_the_last_of_several_series_here_none_counts():
    """B3."""
    for values in (("3.1", "1.0"), ("1.0", "3.1"), ("1.0", "1.0")):
        assert "2 series" in (read(vector(*values), NOW, 300).error or "")


@pytest.mark.parametrize("length", range(1, 7))
def test_flagger_1689_over_all_short_rows_pass_means_three_good_ones_and_only_bad_ones_fail(length):
    """B1: whatever the order of good, bad and unreadable answers, errors are never a pass and never a failure."""
    for row in itertools.product((GOOD, BAD, ERROR), repeat=length):
        outcome = judge(CHECK, row).outcome
        if outcome is Outcome.PASS:
            assert row[-3:] == (GOOD,) * 3
        elif outcome is Outcome.FAIL:
            assert [r for r in row if r.error is None][-3:] == [BAD] * 3
            assert row[-1] is BAD
        assert outcome is not Outcome.FAIL or BAD in row


def test_errors_in_a_row_end_the_analysis_without_a_verdict():
    check = CHECK.model_copy(update={"error_limit": 4})
    assert given_up(check, [GOOD, *[ERROR] * 3]) == ""
    assert given_up(check, [ERROR, ERROR, GOOD, ERROR, ERROR]) == ""
    assert given_up(check, [BAD, *[ERROR] * 4]) == "prometheus/errors: 4 errors in a row, the last: down"
    assert judge(check, [BAD] * 2 + [ERROR] * 4).outcome is Outcome.NOT_YET


def test_sglang_a_gauge_that_froze_with_the_traffic_is_an_error():
    """B4: SGLang's accept-length gauge keeps its last value when the engine idles."""
    assert active(Reading(3.0)) == Reading(3.0)
    assert "activity is 0" in (active(Reading(0.0)).error or "")
    assert active(ERROR).error == "activity: down"


def test_the_bounds_are_shown_as_the_interval():
    verdict = judge(CHECK, [GOOD])
    assert (verdict.canary, verdict.low, verdict.high, verdict.threshold) == (0.01, -math.inf, 0.05, 0.05)
    low = judge(PrometheusCheck(name="x", address="http://p", query="q", min=2), [])
    assert (low.canary, low.low, low.high, low.threshold) == (0.0, 2.0, math.inf, 2.0)


def test_minimum():
    check = PrometheusCheck(name="x", address="http://p", query="q", min=2)
    assert judge(check, [Reading(2.5)] * 3).outcome is Outcome.PASS
    assert judge(check, [Reading(1.5)] * 3).outcome is Outcome.FAIL
    assert "at least 2" in judge(check, [Reading(1.5)] * 3).reason
