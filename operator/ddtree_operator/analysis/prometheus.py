"""PromQL checks: what counts as a reading, and what a row of readings says. An error is neither good nor bad."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_operator.analysis.samples import MAX_ERROR, cut
from ddtree_operator.analysis.types import MetricVerdict, Outcome
from ddtree_operator.api.spec import PrometheusCheck

IN_A_ROW = 3  # good or bad readings that decide
MAX_SKEW = 60.0  # seconds that two clocks may differ


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer: a finite value, or an error in one sentence."""

    value: float = 0.0
    error: str | None = None


def read(body: str, now: float, max_age: float) -> Reading:
    """Read the body of an instant query (``/api/v1/query``). ``now``: seconds since the epoch; ``max_age``: seconds.

    Prometheus stamps an instant query's answer with the query's own time, so old samples must already be left out by
    the query (``lookback_delta``); the stamp is checked for servers that answer from a cache, or in another time.
    """
    try:
        return Reading(_value(body, now, max_age))
    except ValueError as e:
        return Reading(error=cut(str(e), MAX_ERROR))


def judge(check: PrometheusCheck, readings: Sequence[Reading]) -> MetricVerdict:
    """Three good readings in a row pass, three bad ones fail. Errors break a good row, but not a bad one."""
    values = [r.value for r in readings if r.error is None]
    last = values[-1] if values else 0.0
    low = -math.inf if check.min is None else check.min
    high = math.inf if check.max is None else check.max
    threshold = high if check.min is None else low
    outcome, reason = _row(check, readings)
    name = f"prometheus/{check.name}"
    return MetricVerdict(name, outcome, 0.0, last, last, low, high, threshold, len(values), cut(reason, 500))


def active(reading: Reading) -> Reading:
    """What the activity query says: itself when it is an error or above 0, else an error."""
    if reading.error is not None:
        return Reading(error=cut(f"activity: {reading.error}", MAX_ERROR))
    if reading.value <= 0:
        return Reading(error=f"activity is {reading.value:g}: without traffic the value may be an old one")
    return reading


def errors_in_a_row(readings: Sequence[Reading]) -> int:
    """How many of the last readings are errors, without any other in between."""
    count = 0
    for reading in reversed(readings):
        if reading.error is None:
            break
        count += 1
    return count


def given_up(check: PrometheusCheck, readings: Sequence[Reading]) -> str:
    """Why more readings are no use, in one sentence; "" while they are."""
    errors = errors_in_a_row(readings)
    if errors < check.error_limit:
        return ""
    return f"prometheus/{check.name}: {errors} errors in a row, the last: {readings[-1].error}"


def _row(check: PrometheusCheck, readings: Sequence[Reading]) -> tuple[Outcome, str]:
    if not readings:
        return Outcome.NOT_YET, "not read yet"
    values = [r.value for r in readings if r.error is None]
    good = bad = 0
    errors = errors_in_a_row(readings)
    if errors:
        times = f" ({errors} times in a row)" if errors > 1 else ""
        return Outcome.NOT_YET, f"no reading{times}: {readings[-1].error}"
    for reading in reversed(readings):
        if reading.error is not None or not _holds(check, reading.value):
            break
        good += 1
    for value in reversed(values):
        if _holds(check, value):
            break
        bad += 1
    wanted = " and ".join(
        f"{word} {bound:g}" for word, bound in (("at least", check.min), ("at most", check.max)) if bound is not None
    )
    if bad >= IN_A_ROW:
        return Outcome.FAIL, f"{values[-1]:g}, {bad} times in a row not {wanted}"
    if good >= IN_A_ROW:
        return Outcome.PASS, f"{values[-1]:g}, {good} times in a row {wanted}"
    return Outcome.NOT_YET, f"{values[-1]:g}, wanted {wanted} {IN_A_ROW} times in a row"


def _holds(check: PrometheusCheck, value: float) -> bool:
    return (check.min is None or value >= check.min) and (check.max is None or value <= check.max)


def _value(body: str, now: float, max_age: float) -> float:
    try:
        answer = json.loads(body)
    except ValueError:
        raise ValueError(f"the answer is not JSON: {cut(body[:400], 80) or '(empty)'}") from None
    if not isinstance(answer, dict) or answer.get("status") != "success":
        said = answer.get("error") if isinstance(answer, dict) else None
        raise ValueError(f"Prometheus reports an error: {said or 'no status'}")
    if answer.get("warnings"):
        raise ValueError(f"the answer may be incomplete: {answer['warnings']}")
    data = answer.get("data")
    data = data if isinstance(data, dict) else {}
    kind = data.get("resultType")
    if kind != "vector":
        raise ValueError(f"the query gives a {kind or 'nothing'}, not a vector of one series")
    series = data["result"] if isinstance(data.get("result"), list) else []
    if len(series) != 1:
        raise ValueError(f"the query gives {len(series)} series; aggregate it to exactly one")
    try:
        at, text = series[0]["value"]
        at, value = float(at), float(text)
    except (KeyError, TypeError, ValueError):
        raise ValueError("the series has no single value") from None
    if not math.isfinite(value):
        raise ValueError(f"the value is {text}")
    if now - at > max_age:
        raise ValueError(f"the sample is {now - at:.0f} s old, more than {max_age:.0f} s")
    if at - now > MAX_SKEW:
        raise ValueError(f"the sample is {at - now:.0f} s ahead of this clock")
    return value
