"""A node is lost as by a power failure, while its engines serve and while they are measured; then it comes back.

In a cluster of its own, of two nodes, which takes a node for lost after 8 seconds of silence (by default after 50).
What is sent to the lost node goes nowhere, without an answer of any kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_REVISION
from ddtree_operator.core.units import epoch
from integration.ddt_api import ROOT
from integration.operator_client import Client, start_client
from integration.operator_cluster import Installed, Object, condition, conditions
from integration.operator_install import installed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

NS, NAME = "op-nodes", "m"
SECOND = "node-b"
GRACE = 8  # seconds of silence after which the cluster takes a node for lost
STAYS = 4  # seconds for which engines stay on a lost node (60 by default)
PATIENCE = 2.0  # seconds after which the client gives a request up
SLACK = 5.0  # seconds for kube-proxy to hear of it, on a busy machine


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Installed]:
    """The operator on node-a, and then a second node."""
    if "KUBECONFIG" in os.environ and "DDTREE_CLUSTER" not in os.environ:
        pytest.skip("needs a dev cluster of its own")
    name = f"{os.environ.get('DDTREE_CLUSTER') or 'it'}-two"
    tool = ROOT / "dev/cluster/cluster"
    env = os.environ | {"DDTREE_CLUSTER": name}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CLUSTER_NODE_GRACE", str(GRACE))
        subprocess.run([tool, "purge"], env=env, check=True, capture_output=True)  # one with another grace, say
        try:
            with installed(name) as made:
                run(made, "add-node")
                yield made
        finally:
            subprocess.run([tool, "purge"], env=env, check=True, capture_output=True)


def run(made: Installed, verb: str) -> None:
    done = subprocess.run(
        [ROOT / "dev/cluster/cluster", verb, SECOND], env=made.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def spec(made: Installed, algorithm: str, pod: Object, **more: object) -> Object:
    tolerations = [
        {"key": f"node.kubernetes.io/{x}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": STAYS}
        for x in ("unreachable", "not-ready")
    ]
    out = made.spec(algorithm, replicas=2, placement={"tolerations": tolerations}, **more)
    out["engine"]["podTemplate"] = {"spec": pod}
    return out


def pods(made: Installed) -> list[Object]:
    return made.children(NS, "pods", f"{LABEL_DEPLOYMENT}={NAME}")


def places(made: Installed, revision: str = "") -> list[str]:
    """Nodes of ready engines, of one revision or all."""
    well = (
        p for p in pods(made) if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions(p))
    )  # fmt: skip
    return sorted(
        p["spec"]["nodeName"]
        for p in well
        if revision in ("", p["metadata"]["labels"][LABEL_REVISION]) and "deletionTimestamp" not in p["metadata"]
    )


def told(made: Installed) -> list[str]:
    """Events that say that something was decided."""
    words = ("Promoted", "RolledBack", "Restored", "WatchFailed", "Paused", "Aborted")
    return [e["reason"] for e in made.events(NS, NAME) if e["reason"] in words]


@pytest.fixture(scope="module")
def client(two_nodes: Installed) -> Client:
    """A first revision on both nodes, and a client on node-a that never asks twice."""
    made = two_nodes
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",
        "labelSelector": {"matchLabels": {LABEL_DEPLOYMENT: NAME}},
        "matchLabelKeys": ["pod-template-hash"],
    }
    made.apply(NS, NAME, spec(made, "DFLASH", {"topologySpreadConstraints": [spread]}))
    status = made.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    made.until(lambda: places(made) == ["node-a", SECOND], "an engine on each node")
    made.until(lambda: len(pods(made)) == 2, "the baseline's engines have drained")
    return start_client(made, NS, NAME, every=0.05, patience=PATIENCE, node="node-a")


def test_what_serves_loses_a_node_and_gets_its_engine_back_elsewhere(two_nodes: Installed, client: Client) -> None:
    made = two_nodes
    client.more(40)
    assert client.failures() == []
    before = made.reaches(NS, NAME, "Stable")
    known, uids = told(made), {p["metadata"]["uid"] for p in pods(made) if p["spec"]["nodeName"] == SECOND}
    began = time.time()
    run(made, "lose-node")
    seen = made.until(
        lambda: (s := made.status(NS, NAME)) and condition(s, "Ready")["reason"] == "NodeLost" and s, "NodeLost"
    )
    said = time.time() - began
    assert seen["phase"] == "Stable"
    assert f"1/2 engines ready; node {SECOND} does not answer" in seen["message"]
    assert f"node {SECOND} does not answer" in made.events(NS, NAME, "NodeLost")[-1]["message"]
    assert len(uids) == 1
    lost = next(p for p in pods(made) if p["metadata"]["uid"] in uids)
    out = next(epoch(c["lastTransitionTime"]) for c in conditions(lost) if c["type"] == "Ready")  # of the endpoints
    whole = made.until(lambda: places(made) == ["node-a", "node-a"] and time.time() - began, "two engines on node-a")
    status = made.until(
        lambda: (s := made.status(NS, NAME)) and condition(s, "Ready")["status"] == "True" and s, "it is whole"
    )
    client.more(40)
    failed = client.failures()
    first, last = (min(failed)[0] - began, max(failed)[0] - began) if failed else (0.0, 0.0)
    print(
        f"node lost: the endpoint went after {out - began:.0f} s, NodeLost was said after {said:.1f} s, whole after"
        f" {whole:.1f} s; {len(failed)} of {client.counts()[0]} requests failed, begun {first:.1f} to {last:.1f} s"
        " after the loss"
    )
    assert failed, "no request was on the lost engine: the test shows nothing"
    assert all(began - PATIENCE - 1 < at < out + 1 + SLACK for at, _ in failed), (began, out, failed)
    assert all("timed out" in e for e in client.errors()), client.errors()
    assert told(made) == known
    for field in ("phase", "revision", "stable", "history", "message"):
        assert status.get(field) == before.get(field), field
    count = len(failed)
    run(made, "bring-node")
    made.until(lambda: not [p for p in pods(made) if p["metadata"]["uid"] in uids], "the lost pod is gone")
    client.more(40)
    assert places(made) == ["node-a", "node-a"]
    assert len(pods(made)) == 2
    assert len(made.engines(NS, NAME)) == 1
    assert told(made) == known
    assert len(client.failures()) == count


def test_a_canary_is_not_judged_by_the_loss_of_its_node(two_nodes: Installed, client: Client) -> None:
    made = two_nodes
    known, count = told(made), len(client.failures())
    there = {"nodeSelector": {"kubernetes.io/hostname": SECOND}}
    slow = {"analysis": {"minPairs": 60, "maxTokens": 24}}
    made.apply(NS, NAME, spec(made, "DDTREE", there, canary=slow))
    status = made.reaches(NS, NAME, "Analyzing")
    revision = status["revision"]
    made.until(lambda: made.status(NS, NAME).get("analysis", {}).get("pairs", 0) >= 5, "pairs are measured")
    began = time.time()
    run(made, "lose-node")
    status = made.reaches(NS, NAME, "Starting", saying=f"node {SECOND} does not answer")
    print(f"canary's node lost: said after {time.time() - began:.1f} s: {status['message']}")
    assert status["analysis"]["errors"] == 0
    assert condition(status, "Verdict")["status"] == "Unknown"
    assert told(made) == known
    assert places(made) == ["node-a", "node-a"]
    run(made, "bring-node")
    status = made.reaches(NS, NAME, "Stable", "RolledBack", "Paused")
    assert status["phase"] == "Stable", status["message"]
    assert status["revision"] == revision
    assert status["analysis"]["errors"] == 0, json.dumps(status["analysis"])
    assert sorted(told(made)) == sorted([*known, "Promoted"])
    assert places(made, revision) == [SECOND, SECOND]
    made.until(lambda: len(made.engines(NS, NAME)) == 1, "one set is left")
    client.more(20)
    assert len(client.failures()) == count
