"""A fleet without a free GPU: the canary takes a serving engine's, and gives it back; a client asks all the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddtree_operator.api.names import GPU_PRODUCT_LABEL, GPU_RESOURCE, LABEL_REVISION
from integration.operator_client import Client, start_client
from integration.operator_cluster import Installed, Object, condition, conditions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-swap", "m"


def placement(operator: Installed, strategy: str) -> Object:
    """One that two engines fill the whole fleet with: half of the one GPU node's GPUs each."""
    nodes = (operator.reader.get("/api/v1/nodes") or {})["items"]
    labels, allocatable = nodes[0]["metadata"]["labels"], nodes[0]["status"]["allocatable"]
    count = int(allocatable.get(GPU_RESOURCE, 0))
    if len(nodes) != 1 or count < 2:
        pytest.skip("needs a cluster of one node with two or more GPUs")
    gpu = {"product": [labels[GPU_PRODUCT_LABEL]], "perReplica": count // 2}
    return {"gpu": gpu, "pin": "product", "strategy": strategy}


def spec(operator: Installed, algorithm: str, strategy: str = "swap", **more: object) -> Object:
    return operator.spec(algorithm, replicas=2, placement=placement(operator, strategy), **more)


@pytest.fixture(scope="module")
def client(operator: Installed) -> Iterator[Client]:
    """A client of a revision that holds every GPU."""
    operator.apply(NS, NAME, spec(operator, "DFLASH"))
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    operator.until(lambda: ready(operator) == [status["revision"]] * 2, "both engines are ready")
    yield start_client(operator, NS, NAME)
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=true")
    operator.api(NS).kubectl("delete", "pod", "client", "--wait=false")


def ready(operator: Installed) -> list[str]:
    """Revision of each ready engine."""
    return sorted(
        p["metadata"]["labels"][LABEL_REVISION]
        for p in operator.children(NS, "pods", LABEL_REVISION)
        if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions(p))
        and "deletionTimestamp" not in p["metadata"]
    )


def test_surge_says_how_many_gpus_are_missing(operator: Installed, client: Client) -> None:
    count = placement(operator, "surge")["gpu"]["perReplica"]
    operator.apply(NS, NAME, spec(operator, "DDTREE", "surge"))
    status = operator.reaches(NS, NAME, "Placing", saying="missing")
    gpus = f"{count} GPU{'s are' if count > 1 else ' is'} missing: 1 more replica needs room"
    assert status["message"].startswith(gpus)
    assert condition(status, "Placed")["reason"] == "GPUsMissing"
    assert len(ready(operator)) == 2


def test_swap_lends_one_engine_and_a_rollback_gives_it_back(operator: Installed, client: Client) -> None:
    before = operator.status(NS, NAME)["stable"]["revision"]
    operator.apply(NS, NAME, spec(operator, "DDTREE", drafter={"path": "sim/misfit"}))
    status = operator.reaches(NS, NAME, "Analyzing", "RolledBack")
    assert condition(status, "Placed")["message"] == "no GPU is free: 1 of 2 serving engines gave way to the canary"
    status = operator.reaches(NS, NAME, "RolledBack", "Stable")
    assert "accept" in status["message"].lower()
    operator.until(lambda: ready(operator) == [before] * 2, "both serving engines are back")


def test_swap_promotes_within_the_gpus_there_are(operator: Installed, client: Client) -> None:
    operator.apply(NS, NAME, spec(operator, "DDTREE"))
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    operator.until(lambda: ready(operator) == [status["revision"]] * 2, "both engines are of the new revision")
    client.more(10)
    assert client.counts()[1] == 0, client.errors()
