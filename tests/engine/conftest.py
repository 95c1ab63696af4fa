"""Starts the engines that the chosen tests need, two at a time, while the tests wait for theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.fleet import Fleet, Scenario


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    runs = Fleet()
    for item in request.session.items:
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            if isinstance(value, Scenario):
                runs.submit(value)
    yield runs
    runs.end()
