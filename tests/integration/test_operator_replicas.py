"""Two replicas of the operator: one works, the other takes over in the middle of a rollout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from integration.operator_cluster import RELEASE, SYSTEM, Installed, Object, conditions, processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-replicas", "m"
SELECTOR = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/name=ddtree-operator"
IN_ORDER, FROZEN = 15.0, 40.0  # seconds; 2 and 15 by design, and a busy machine


@pytest.fixture(scope="module", autouse=True)
def _two(operator: Installed) -> Iterator[None]:
    api = operator.api(SYSTEM)
    api.kubectl("scale", f"deployment/{RELEASE}", "--replicas=2")
    operator.until(lambda: len(ready(operator)) == 2, "two replicas are ready")
    yield
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")
    api.kubectl("scale", f"deployment/{RELEASE}", "--replicas=1")
    operator.until(lambda: len(operator.children(SYSTEM, "pods", SELECTOR)) == 1, "one replica is left")


def ready(operator: Installed) -> list[str]:
    """Names of the replicas that are ready and stay."""
    pods = [p for p in operator.children(SYSTEM, "pods", SELECTOR) if "deletionTimestamp" not in p["metadata"]]
    well = [p for p in pods if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions(p))]
    return [p["metadata"]["name"] for p in well]


def lease(operator: Installed) -> Object:
    found = operator.reader.get(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{RELEASE}")
    return dict(found["spec"]) if found else {}


def leader(operator: Installed) -> str:
    return str(lease(operator).get("holderIdentity") or "")


def handed_over(operator: Installed, old: str) -> float:
    """Seconds until the other holds the Lease."""
    began = time.monotonic()
    operator.until(lambda: leader(operator) not in ("", old), "the other leads")
    return time.monotonic() - began


def test_a_leader_that_leaves_in_order_hands_over_at_once(operator: Installed) -> None:
    operator.apply(NS, NAME, operator.spec("DFLASH", canary={"analysis": {"minPairs": 30, "maxTokens": 48}}))
    operator.reaches(NS, NAME, "Analyzing")
    old = leader(operator)
    operator.api(SYSTEM).kubectl("delete", "pod", old, "--wait=false")
    seconds = handed_over(operator, old)
    print(f"handed over after {seconds:.1f} s")
    assert seconds < IN_ORDER
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    assert len(operator.events(NS, NAME, "Promoted")) == 1
    assert len(operator.events(NS, NAME, "RolloutStarted")) == 1


def test_a_leader_that_freezes_is_replaced_when_its_lease_runs_out_and_may_come_back(operator: Installed) -> None:
    operator.until(lambda: len(ready(operator)) == 2, "two replicas are ready again")
    old, before = leader(operator), lease(operator)["leaseTransitions"]
    stopped = processes(old)
    if not stopped:
        pytest.skip("the operator's processes are on another machine")
    operator.apply(NS, NAME, operator.spec("DDTREE", canary={"analysis": {"minPairs": 30, "maxTokens": 48}}))
    operator.reaches(NS, NAME, "Analyzing")
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        seconds = handed_over(operator, old)
        print(f"replaced after {seconds:.1f} s")
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)
    assert 8 < seconds < FROZEN
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    operator.until(lambda: old in ready(operator), "the frozen one is ready again")
    assert leader(operator) != old
    assert lease(operator)["leaseTransitions"] == before + 1
    assert [e["result"] for e in status["history"]] == ["promoted", "promoted"]
    assert len([e for e in operator.events(NS, NAME, "Promoted") if status["revision"] in e["message"]]) == 1
