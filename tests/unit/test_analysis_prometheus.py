"""PromQL readings: exactly one fresh finite series, or an error; errors never pass (B2, B3)."""

from __future__ import annotations

import json

import pytest

from ddtree_operator.analysis import Outcome
from ddtree_operator.analysis.prometheus import Reading, judge, read
from ddtree_operator.api.spec import PrometheusCheck

pytestmark = pytest.mark.unit

NOW = 1_700_000_000.0
CHECK = PrometheusCheck(name="errors", address="http://p", query="q", max=0.05)


def vector(*values, at=NOW, **more) -> str:
    result = [{"metric": {"rank": str(i)}, "value": [at, v]} for i, v in enumerate(values)]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, **more})


@pytest.mark.parametrize(("text", "value"), [("1.5", 1.5), ("-0", 0.0), ("0", 0.0), ("1e3", 1000.0)])
def test_one_series_is_a_reading(text, value):
    assert read(vector(text), NOW) == Reading(value)


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
        (vector("1", at=NOW + 1200), "old"),
        (vector("1", warnings=["partial"]), "may be incomplete"),
        (json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [NOW, "1"]}}), "a scalar"),
        (json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}), "a matrix"),
        (json.dumps({"status": "success"}), "a nothing"),
        (json.dumps({"status": "success", "data": {"resultType": "vector", "result": [{}]}}), "no value"),
    ],
)
def test_everything_else_is_an_error(body, says):
    reading = read(body, NOW)
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


def test_a_check_without_bounds_never_passes():
    check = PrometheusCheck(name="x", address="http://p", query="q")
    verdict = judge(check, [GOOD] * 10)
    assert verdict.outcome is Outcome.NOT_YET
    assert "neither min nor max" in verdict.reason


def test_minimum():
    check = PrometheusCheck(name="x", address="http://p", query="q", min=2)
    assert judge(check, [Reading(2.5)] * 3).outcome is Outcome.PASS
    assert judge(check, [Reading(1.5)] * 3).outcome is Outcome.FAIL
    assert "at least 2" in judge(check, [Reading(1.5)] * 3).reason
