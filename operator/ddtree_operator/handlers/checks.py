"""PromQL checks of one analysis: read in their own rhythm, judged together with the pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import aiohttp

from ddtree_operator.analysis.prometheus import Reading, given_up, judge
from ddtree_operator.analysis.types import MetricVerdict
from ddtree_operator.api.spec import PrometheusCheck
from ddtree_operator.core.units import seconds
from ddtree_operator.probe.prometheus import reading

KEPT = 1000  # readings per check; no fewer than the largest errorLimit


class Checks:
    """Readings so far. A check whose definition changes starts anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._checks: list[PrometheusCheck] = []
        self._readings: dict[str, list[Reading]] = {}  # by name of the check, newest last
        self._due: dict[str, float] = {}

    def define(self, checks: Sequence[PrometheusCheck]) -> None:
        """Say which checks there are."""
        known = {c.name: c for c in self._checks}
        for check in checks:
            if known.get(check.name) != check:
                self._readings[check.name], self._due[check.name] = [], 0.0
        self._checks = list(checks)

    def start_anew(self) -> None:
        """Forget every reading."""
        checks, self._checks = self._checks, []
        self.define(checks)

    async def read(self, session: aiohttp.ClientSession) -> None:
        """Read those whose time has come."""
        for check in self._checks:
            if self._clock() < self._due[check.name]:
                continue
            self._due[check.name] = self._clock() + seconds(check.interval)
            readings = self._readings[check.name]
            readings.append(await reading(session, check))
            del readings[:-KEPT]

    def judged(self) -> list[MetricVerdict]:
        """Where each stands."""
        return [judge(check, self._readings[check.name]) for check in self._checks]

    def given_up(self) -> str:
        """Why no further reading will help, in one sentence; "" while one may."""
        found = (given_up(check, self._readings[check.name]) for check in self._checks)
        return next((text for text in found if text), "")
