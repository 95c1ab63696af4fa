"""One resource over its life, in order: every revision good or bad, while a client asks all the time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ddtree_operator.api.names import LABEL_POOL, LABEL_REVISION
from ddtree_operator.core.units import epoch
from ddtree_operator.rollout.manifests import ANNOTATION_SWITCHED_AT
from integration.operator_client import Client, start_client
from integration.operator_cluster import Installed, Object, Recording, condition, conditions, recording

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-story", "m"
DRAIN = 3.0  # seconds, traffic.drain of the tests' resources


@pytest.fixture(scope="module")
def first(operator: Installed) -> Object:
    """The first rollout, and its status when it has ended."""
    operator.apply(NS, NAME, operator.spec("DFLASH", replicas=2))
    return operator.reaches(NS, NAME, "Stable", "RolledBack")


@pytest.fixture(scope="module")
def client(operator: Installed, first: Object) -> Iterator[Client]:
    made = start_client(operator, NS, NAME)
    yield made
    operator.api(NS).kubectl("delete", "pod", "client", "--wait=false")


def test_the_first_revision_is_held_against_a_baseline_of_its_own_and_becomes_stable(
    operator: Installed, first: Object
) -> None:
    assert first["phase"] == "Stable", first["message"]
    assert first["stable"]["revision"] == first["revision"]
    assert first["history"][-1]["result"] == "promoted"
    assert first["analysis"]["outcome"] == "pass"
    accept = next(m for m in first["analysis"]["metrics"] if m["metric"] == "acceptLength")
    assert accept["baseline"] == 1.0  # plain decoding: the canary itself is the chain
    assert accept["canary"] > 1.8
    assert condition(first, "Verdict")["status"] == "True"
    sets = operator.until(
        lambda: (found := operator.engines(NS, NAME)) and len(found) == 1 and found, "the dedicated baseline is gone"
    )
    assert sets[0]["metadata"]["labels"][LABEL_REVISION] == first["revision"]


def test_a_tree_is_promoted_over_the_chain_without_one_failed_request(
    operator: Installed, first: Object, client: Client
) -> None:
    with recording(operator.reader, NS) as seen:
        steps = [{"weight": 0}, {"analysis": {}}, {"weight": 50}, {"pause": {"duration": "2s"}}, {"analysis": {}}]
        operator.apply(NS, NAME, operator.spec("DDTREE", replicas=2, canary={"steps": steps}))
        status = operator.reaches(NS, NAME, "Stable", "RolledBack")
        assert status["phase"] == "Stable", status["message"]
        new, old = status["revision"], first["revision"]
        operator.until(lambda: revisions_running(operator) == {new}, "the old set is gone")
        operator.until(lambda: not pods_of(operator, old), "the old pods are gone")
        client.more(10)
    assert float(status["acceptLength"]) > float(first["acceptLength"])
    assert status["history"][-1]["algorithm"] == "DDTREE/16"
    switched_when_ready(seen, new, 2)
    assert client.counts()[1] == 0, client.errors()


def switched_when_ready(seen: Recording, new: str, replicas: int) -> None:
    """The selector named the new revision alone only once all its pods were ready, and the old ones left later."""
    switched = [v for v, _, s in seen.of("services") if s["spec"]["selector"].get(LABEL_REVISION) == new]
    assert switched, "the Service never selected the new revision"
    ready = [
        name
        for name, pod in seen.pods_at(switched[0]).items()
        if pod["metadata"].get("labels", {}).get(LABEL_REVISION) == new
        and pod["metadata"].get("labels", {}).get(LABEL_POOL) == "serving"
        and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions(pod))
    ]
    assert len(ready) >= replicas
    deleted = [(v, d["metadata"]["labels"][LABEL_REVISION]) for v, t, d in seen.of("deployments") if t == "DELETED"]
    left = [v for v, revision in deleted if revision != new]
    assert left
    assert min(left) > switched[0]
    at = next(s for v, _, s in seen.of("services") if v == switched[0])["metadata"]["annotations"]
    assert seen.heard[min(left)] >= epoch(at[ANNOTATION_SWITCHED_AT]) + DRAIN


def revisions_running(operator: Installed) -> set[str]:
    return {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)}


def pods_of(operator: Installed, revision: str) -> list[Object]:
    return operator.children(NS, "pods", f"{LABEL_REVISION}={revision}")


def rolled_back(operator: Installed, spec: Object) -> Object:
    """Apply a bad spec; its status once it was rolled back and its engines are gone, with the old one serving on."""
    before = operator.status(NS, NAME)["stable"]["revision"]
    operator.apply(NS, NAME, spec)
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "RolledBack", status["message"]
    assert status["stable"]["revision"] == before
    assert status["revision"] in {b["revision"] for b in status["blocked"]}
    assert status["history"][-1]["result"] == "rolledBack"
    assert condition(status, "Verdict")["status"] == "False"
    events = operator.events(NS, NAME, "RolledBack")
    assert [e for e in events if e["message"] == status["history"][-1]["reason"] or e["message"] == status["message"]]
    operator.until(lambda: revisions_running(operator) == {before}, "the canary is gone")
    shown = operator.api(NS).ddtreectl("rollout", "status", NAME)
    assert shown.returncode == 2, shown.stderr
    assert status["message"] in shown.stdout
    return status


def test_a_drafter_that_does_not_fit_is_rolled_back_on_acceptance(operator: Installed, client: Client) -> None:
    spec = operator.spec("DDTREE", replicas=2, drafter={"path": "sim/misfit"})
    status = rolled_back(operator, spec)
    assert "acceptLength" in status["message"] or "accept length" in status["message"]


def test_a_refusing_engine_is_rolled_back_in_its_own_words(operator: Installed, client: Client) -> None:
    words = "self-check failed, node 3 of the tree differs from plain decoding"
    status = rolled_back(operator, operator.spec("DDTREE", replicas=2, sim={"REFUSE": words}))
    assert status["message"] == f"the canary engine refused to serve: {words}"


def test_wrong_tokens_are_rolled_back_on_parity(operator: Installed, client: Client) -> None:
    status = rolled_back(operator, operator.spec("DDTREE", replicas=2, sim={"FAULT_EVERY": 5}))
    assert "parity" in status["message"]


def test_a_crash_loop_is_rolled_back_with_its_error_line(operator: Installed, client: Client) -> None:
    status = rolled_back(operator, operator.spec("DDTREE", replicas=2, sim={"CRASH_AT_START": "no kernel image"}))
    assert status["message"].startswith("the canary engine crashed 3 times (exit code 1): ")
    assert status["message"].endswith("RuntimeError: no kernel image")


def test_an_abort_in_shared_traffic_ends_with_the_stable_set_alone(operator: Installed, client: Client) -> None:
    before = operator.status(NS, NAME)["stable"]["revision"]
    steps = [{"analysis": {}}, {"weight": 50}, {"pause": {}}]
    spec = operator.spec("DDTREE", replicas=2, engine={"speculative": {"budget": 24}}, canary={"steps": steps})
    operator.apply(NS, NAME, spec)
    status = operator.reaches(NS, NAME, "Paused", "RolledBack")
    assert status["phase"] == "Paused", status["message"]
    assert status["weight"] == 50
    client.more(20)  # both sets answer
    assert operator.api(NS).ddtreectl("rollout", "abort", NAME, "--wait").returncode == 0
    operator.reaches(NS, NAME, "RolledBack")
    operator.until(lambda: revisions_running(operator) == {before}, "the canary is gone")
    service = operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}")
    assert service is not None
    assert service["spec"]["selector"][LABEL_REVISION] == before


ASK = """
import json, sys, urllib.request as web
def ask(prompt, **more):
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 200}, **more}
    head = {"Content-Type": "application/json"}
    return web.urlopen(web.Request(sys.argv[1] + "/generate", json.dumps(body).encode(), head), timeout=300)
for number in range(100):
    whole = json.load(ask(f"story {number}"))
    if whole["meta_info"]["completion_tokens"] == 200:
        break
for line in ask(f"story {number}", stream=True):
    data = line.strip().removeprefix(b"data: ")
    if data == b"[DONE]":
        sys.exit(0 if last["text"] == whole["text"] else "another text")
    if data:
        last = json.loads(data)
        print(len(last["text"]), flush=True)
sys.exit("cut off")
"""
# Slows the streams of engines down; with "hurry" waits until SIGTERM has reached them first, and speeds them up.
PACE = """
import json, sys, time, urllib.error, urllib.request as web
def tell(at, seconds):
    web.urlopen(web.Request(at + "/sim", json.dumps({"stream_delay": seconds}).encode()), timeout=10).read()
hurry, *left = sys.argv[1:]
while left:
    for at in list(left):
        try:
            web.urlopen(at + "/health", timeout=10).read()
        except urllib.error.HTTPError:
            print(f"{at} drains", flush=True)
            left.remove(at)
            tell(at, 0.001)
        except OSError:
            left.remove(at)
        else:
            if hurry != "hurry":
                left.remove(at)
                tell(at, 2)
    time.sleep(0.05)
"""


def test_a_stream_outlives_the_promotion_and_the_removal_of_its_engine(operator: Installed, client: Client) -> None:
    before = operator.status(NS, NAME)["stable"]["revision"]
    steps = [{"analysis": {}}, {"pause": {}}]
    operator.apply(
        NS, NAME, operator.spec("DDTREE", replicas=2, engine={"speculative": {"budget": 20}}, canary={"steps": steps})
    )
    status = operator.reaches(NS, NAME, "Paused", "RolledBack")
    assert status["phase"] == "Paused", status["message"]
    engines = [f"http://{pod['status']['podIP']}:30000" for pod in pods_of(operator, before)]
    service = operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}")
    assert service is not None
    api, python = operator.api(NS), ("exec", "client", "--", "python3", "-u", "-c")
    api.kubectl(*python, PACE, "slowly", *engines)
    with api.started(*python, ASK, f"http://{service['spec']['clusterIP']}:30000") as stream:
        assert stream.stdout is not None
        assert stream.stdout.readline(), "it streams"
        assert api.ddtreectl("rollout", "promote", NAME).returncode == 0
        told = api.kubectl(*python, PACE, "hurry", *engines).stdout  # until both engines have left or drain
        assert "drains" in told
        assert stream.wait(60) == 0, stream.stderr and stream.stderr.read()
    assert operator.reaches(NS, NAME, "Stable")["revision"] == status["revision"]
    operator.until(lambda: not pods_of(operator, before), "its engine is gone")
    client.more(10)


def test_an_engine_that_a_node_is_drained_of_is_replaced_without_a_failed_request(
    operator: Installed, client: Client
) -> None:
    serving = operator.status(NS, NAME)["stable"]["revision"]
    before = {p["metadata"]["name"] for p in pods_of(operator, serving) if "deletionTimestamp" not in p["metadata"]}
    leaves = min(before)
    evict = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": leaves, "namespace": NS}}
    url = f"/api/v1/namespaces/{NS}/pods/{leaves}/eviction"
    operator.api(NS).kubectl("create", "--raw", url, "-f", "-", stdin=json.dumps(evict))
    operator.until(lambda: leaves not in {p["metadata"]["name"] for p in pods_of(operator, serving)}, "it has left")
    operator.until(lambda: operator.status(NS, NAME).get("readyReplicas") == len(before), "another took its place")
    client.more(10)
    assert client.counts()[1] == 0, client.errors()


def test_a_manifest_without_replicas_leaves_the_set_as_large_as_it_is(operator: Installed, client: Client) -> None:
    spec = operator.get(NS, NAME)["spec"]
    operator.apply(NS, NAME, spec | {"replicas": 2})
    operator.reaches(NS, NAME, "Stable", saying="2/2")
    spec.pop("replicas")
    operator.apply(NS, NAME, spec)
    assert operator.get(NS, NAME)["spec"]["replicas"] == 1  # its default
    status = operator.reaches(NS, NAME, "Stable", saying="2 are kept until somebody sets them")
    assert (status["replicas"], status["heldReplicas"]) == (2, 2)
    assert [e["message"] for e in operator.events(NS, NAME, "ReplicasLeftOut")]
    operator.api(NS).kubectl("scale", "ddt", NAME, "--replicas=3")
    status = operator.reaches(NS, NAME, "Stable", saying="3/3")
    assert "heldReplicas" not in status
    operator.api(NS).kubectl("scale", "ddt", NAME, "--replicas=1")  # meant
    operator.reaches(NS, NAME, "Stable", saying="1/1")


def test_nobody_noticed(client: Client) -> None:
    client.more(5)
    requests, failed = client.counts()
    print(f"{requests} requests, {failed} failed")
    assert failed == 0, client.errors()
    assert requests > 100
