"""Every way to ask for something that cannot be had: one clear sentence as condition, as Event and in ddtreectl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from integration.ddt_api import DIGEST
from integration.operator_cluster import NOWHERE, Installed, Object, condition
from integration.test_registry_real import Registry

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, QUOTA = "op-inputs", "op-quota"
NO_SERIES = {"series": ""}
VERSION = "VERSION that is nowhere"
BAD_SERIES = {
    "series": "0001-nowhere.patch\n",
    "0001-nowhere.patch": f"--- a/sglang/version.py\n+++ b/sglang/version.py\n@@ -1,1 +1,1 @@\n-{VERSION}\n+nor this\n",
}


def specs(operator: Installed) -> dict[str, Object]:
    """What is asked for, by the name of the resource."""
    crash = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}]}]}}}
    return {
        "managed-flag": operator.spec(engine={"args": ["--port", "1"]}),
        "no-prompts": operator.spec(canary={"analysis": {"prompts": {"configMapRef": "not-there"}}}),
        "bad-prompts": operator.spec(canary={"analysis": {"prompts": {"configMapRef": "bad-prompts"}}}),
        "no-token": operator.spec(canary={"analysis": {"prompts": {"liveTraffic": {}}}}),
        "no-series": operator.built(series="not-there"),
        "no-secret": operator.built(engine={"build": {"push": push(operator, "regcred")}}),
        "far-secret": operator.built(engine={"build": {"push": push(operator, "not-allowed")}}),
        "no-registry": operator.built(engine={"build": {"push": {"repository": f"{NOWHERE}/x/y"}}}),
        "bad-wheel": operator.built(engine={"build": {"sglangWheel": {**operator.wheel, "sha256": "0" * 64}}}),
        "bad-patch": operator.built(series="bad-patch"),
        "no-image": operator.spec(engine={"image": f"{operator.registry}/ddtree/not-there@{DIGEST}"}),
        "no-model": operator.spec(model={"path": "/models/not-there"}, engine=crash),
        "no-node": operator.spec(placement={"gpu": {"perReplica": 1, "product": ["NVIDIA-B200"]}, "pin": "product"}),
        "new-cuda": operator.spec(
            engine={"image": image_of_cuda(operator, "99.1.0")},
            placement={"gpu": {"perReplica": 1, "product": ["NVIDIA-H200"]}, "pin": "product"},
        ),
        "bad-template": operator.spec(engine={"podTemplate": {"metadata": "not an object"}}),
        "privileged": operator.spec(
            engine={"podTemplate": {"spec": {"hostNetwork": True, "containers": [{"name": "engine", "ports": None}]}}}
        ),
    }


def image_of_cuda(operator: Installed, version: str) -> str:
    """A ready-made image without any label of ours, as NVIDIA's say which CUDA is in them."""
    local = operator.env.get("DDTREE_REGISTRY_LOCAL", operator.registry)
    image = Registry(local, Path()).push(b"cuda", env=[f"CUDA_VERSION={version}"])
    return image.replace(local, operator.registry, 1)


def push(operator: Installed, secret: str) -> Object:
    return {"repository": f"{operator.registry}/ddtree/op-test", "secretRef": secret}


@pytest.fixture(scope="module")
def asked(operator: Installed) -> Iterator[None]:
    """All of it applied at once, so that the slow ones fail side by side."""
    put_config_map(operator, NS, "plain", NO_SERIES)
    put_config_map(operator, NS, "bad-patch", BAD_SERIES)
    put_config_map(operator, NS, "bad-prompts", {"prompts.jsonl": "this is not JSON\n"})
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": {"pods": "0"}},
    }
    operator.api(QUOTA).kubectl("apply", "-f", "-", stdin=json.dumps(quota))
    operator.apply(QUOTA, "over", operator.spec())
    for name, spec in specs(operator).items():
        operator.apply(NS, name, spec)
    yield
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")
    operator.api(QUOTA).kubectl("delete", "ddt", "--all", "--wait=false")


def put_config_map(operator: Installed, namespace: str, name: str, data: dict[str, str]) -> None:
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    operator.api(namespace).kubectl("apply", "-f", "-", stdin=json.dumps(made))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"replica": 3}, 'unknown field "spec.replica"'),
        ({"engine": {"speculative": {"algorithm": "DDTREE", "budget": 0}}}, "should be greater than or equal to 1"),
        ({"engine": {"speculative": {"algorithm": "DDTREE", "budget": 256}}}, "should be less than or equal to 255"),
        ({"engine": {"build": {}}}, "image and build are both given; keep one"),
        ({"engine": {"image": "10.88.0.1:5000/ddtree/simengine:latest"}}, "must be an image by digest"),
    ],
)
def test_what_kubectl_refuses(operator: Installed, more: dict[str, Any], sentence: str) -> None:
    done = operator.api(NS).apply(operator.spec(**more), name="refused", dry=False)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    found = operator.api(NS).kubectl("get", "ddt", "refused", check=False)
    assert "NotFound" in found.stderr


@pytest.mark.parametrize(
    ("name", "phase", "kind", "reason", "sentence"),
    [
        ("managed-flag", "Invalid", "Valid", "InvalidSpec", "args has --port, which the operator sets; use the fields"),
        (
            "no-prompts",
            "Pending",
            "Valid",
            "PromptsMissing",
            "ConfigMap not-there does not exist in namespace op-inputs; create it with a key prompts.jsonl",
        ),
        (
            "no-token",
            "Pending",
            "Valid",
            "SecretForbidden",
            "liveTraffic needs Secret no-token-live-prompts, which the operator may not read; add it to the chart's",
        ),
        ("bad-prompts", "Pending", "Valid", "PromptsInvalid", "ConfigMap bad-prompts, prompts.jsonl"),
        (
            "no-series",
            "Pending",
            "Valid",
            "SeriesMissing",
            "ConfigMap not-there does not exist in namespace op-inputs; create it",
        ),
        (
            "no-secret",
            "Pending",
            "Valid",
            "SecretMissing",
            "Secret regcred does not exist in namespace op-inputs; create it",
        ),
        (
            "far-secret",
            "Pending",
            "Valid",
            "SecretForbidden",
            "the operator may not read Secret not-allowed; add it to the chart's rbac.secrets or use one listed there",
        ),
        (
            "no-registry",
            "Building",
            "Built",
            "RegistryUnreachable",
            f"waiting for the registry: the registry {NOWHERE} cannot be reached: connection refused",
        ),
        (
            "no-image",
            "Starting",
            "Progressing",
            "ImageNotPulled",
            f"/ddtree/not-there@{DIGEST} cannot be pulled: not found",
        ),
        ("no-node", "Placing", "Placed", "NoNodeFits", "node-a: product NVIDIA-H200, not NVIDIA-B200"),
        (
            "new-cuda",
            "Placing",
            "Placed",
            "NoNodeFits",
            "node-a: driver 580.95.05 serves CUDA up to 13.0, the image needs 99.1",
        ),
        (
            "bad-template",
            "Pending",
            "Valid",
            "EnginesRefused",
            "spec.engine.podTemplate has not the form of a pod template; correct it",
        ),
        ("privileged", "Starting", "Progressing", "PodsRefused", 'violates PodSecurity "restricted'),
    ],
)
def test_what_waits_to_be_put_right(
    operator: Installed, asked: None, name: str, phase: str, kind: str, reason: str, sentence: str
) -> None:
    status = operator.until(
        lambda: (
            (found := operator.status(NS, name))
            and condition(found, kind).get("reason") == reason
            and sentence in found["message"]  # a registry that has not answered yet is said before
            and found
        ),
        f"{name} has {kind} for {reason}; it is {operator.status(NS, name)}",
    )
    told(operator, NS, name, status, kind, sentence)
    assert status["phase"] == phase
    shown = operator.api(NS).ddtreectl("rollout", "status", name)
    assert shown.returncode == (1 if phase == "Invalid" else 3), shown.stderr
    assert sentence in shown.stdout


def told(operator: Installed, namespace: str, name: str, status: Object, kind: str, sentence: str) -> None:
    """The sentence is the message, the condition's and one Event's; and it is one sentence."""
    bad = condition(status, kind)
    assert bad["status"] == "False"
    for text in (status["message"], bad["message"]):
        assert sentence in text
        assert "Traceback" not in text
        assert "\n" not in text
    events = operator.until(lambda: operator.events(namespace, name, bad["reason"]), f"an Event {bad['reason']}")
    assert {e["type"] for e in events} == {"Warning"}
    assert any(sentence in e["message"] for e in events)


@pytest.mark.parametrize(
    ("name", "kind", "start", "sentence"),
    [
        ("bad-wheel", "Built", "build failed: the wheel ", f"but {'0' * 64} is asked for; correct the sha256"),
        ("bad-patch", "Built", "build failed: the patch series does not apply: ", "sglang/version.py"),
        (
            "no-model",
            "Verdict",
            "the ",  # canary or baseline, whichever was first
            "engine crashed 3 times (exit code 1): OSError: Can't load the configuration of '/models/not-there': ",
        ),
    ],
)
def test_what_is_rolled_back(operator: Installed, asked: None, name: str, kind: str, start: str, sentence: str) -> None:
    status = operator.reaches(NS, name, "RolledBack", "Stable")
    assert status["phase"] == "RolledBack"
    assert status["message"].startswith(start)
    assert sentence in status["message"]
    if name == "bad-patch":
        assert "hunk 1" in status["message"]
    bad = condition(status, kind)
    assert bad["status"] == "False"
    assert sentence in bad["message"]
    assert any(sentence in e["message"] for e in operator.events(NS, name, "RolledBack"))
    shown = operator.api(NS).ddtreectl("rollout", "status", name)
    assert shown.returncode == 2
    assert sentence in shown.stdout
    operator.until(lambda: not operator.engines(NS, name), "nothing of it runs any more")


def test_no_node_lists_each_node_and_why_not(operator: Installed, asked: None) -> None:
    status = operator.reaches(NS, "no-node", "Placing")
    rows = {n["name"]: n for n in status["nodes"]}
    assert rows["node-a"]["fits"] is False
    assert rows["node-a"]["reason"] == "product NVIDIA-H200, not NVIDIA-B200"
    shown = operator.api(NS).ddtreectl("nodes", "no-node")
    assert shown.returncode == 0
    assert "product NVIDIA-H200, not NVIDIA-B200" in shown.stdout


def test_a_quota_is_named_and_the_rollout_goes_on_when_it_is_lifted(operator: Installed, asked: None) -> None:
    status = operator.until(
        lambda: (
            (found := operator.status(QUOTA, "over"))
            and condition(found, "Progressing").get("reason") == "QuotaExceeded"
            and found
        ),
        "the quota is noticed",
    )
    told(operator, QUOTA, "over", status, "Progressing", "exceeded quota: tight")
    operator.api(QUOTA).kubectl("delete", "resourcequota", "tight")
    assert operator.reaches(QUOTA, "over", "Stable", "RolledBack")["phase"] == "Stable"


def test_a_missing_configmap_heals_when_it_is_made(operator: Installed, asked: None) -> None:
    operator.reaches(NS, "no-prompts", "Pending")
    put_config_map(operator, NS, "not-there", {"prompts.jsonl": '{"id": "a", "text": "One two three"}\n', "series": ""})
    operator.until(
        lambda: operator.status(NS, "no-prompts").get("phase") not in {"Pending", None}, "the rollout goes on"
    )
    assert condition(operator.status(NS, "no-prompts"), "Valid")["status"] == "True"


def test_a_service_of_somebody_else_stays_as_it_is(operator: Installed) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    api = operator.api(NS)
    api.kubectl("apply", "-f", "-", stdin=json.dumps(theirs))
    operator.apply(NS, "taken", operator.spec())
    sentence = "Service taken exists and does not belong to this resource; rename one of them"
    status = operator.reaches(NS, "taken", "Pending", saying=sentence)
    told(operator, NS, "taken", status, "Valid", sentence)
    assert api.ddtreectl("rollout", "abort", "taken", "--wait").returncode == 0
    operator.reaches(NS, "taken", "RolledBack")
    api.kubectl("delete", "ddt", "taken")
    operator.until(lambda: not owned(operator, "taken"), "what it owned is gone")
    service = operator.reader.get(f"/api/v1/namespaces/{NS}/services/taken")
    assert service is not None
    assert service["spec"]["selector"] == {"app": "theirs"}


def owned(operator: Installed, name: str) -> list[Object]:
    labels = f"{LABEL_DEPLOYMENT}={name}"
    return [
        *operator.engines(NS, name),
        *operator.children(NS, "controllerrevisions", labels, "/apis/apps/v1"),
        *operator.children(NS, "configmaps", labels),
    ]
