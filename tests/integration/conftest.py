"""The operator, and the builder, are installed once for all tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.build_cluster import BuildCluster, cluster_with_builder
from integration.operator_cluster import Installed
from integration.operator_install import installed


@pytest.fixture(scope="session")
def operator() -> Iterator[Installed]:
    """The operator in a cluster, by its chart and from its own image."""
    with installed() as made:
        yield made


@pytest.fixture(scope="session")
def cluster() -> Iterator[BuildCluster]:
    """A cluster with buildkitd in it, and wheels on its file server."""
    with cluster_with_builder() as made:
        yield made
