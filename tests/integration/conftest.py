"""The operator is installed once for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.operator_cluster import Installed
from integration.operator_install import installed


@pytest.fixture(scope="session")
def operator() -> Iterator[Installed]:
    """The operator in a cluster, by its chart and from its own image."""
    with installed() as made:
        yield made
