"""A resource deleted in the middle of a canary: everything it owns goes, and nothing else."""

from __future__ import annotations

import json

import pytest

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from integration.operator_cluster import Installed, Object

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS = "op-deleted"
KINDS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "deployments": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1",
    "controllerrevisions": "/apis/apps/v1",
    "jobs": "/apis/batch/v1",
}


def everything(operator: Installed) -> dict[str, str]:
    """kind/name of all objects of the namespace, with their uid."""
    return {
        f"{kind}/{obj['metadata']['name']}": obj["metadata"]["uid"]
        for kind, prefix in KINDS.items()
        for obj in operator.children(NS, kind, prefix=prefix)
    }


def theirs() -> list[Object]:
    """What somebody else has there; one even carries our label, as a copied manifest would."""
    label = {LABEL_DEPLOYMENT: "m"}
    pod = {
        "metadata": {"labels": {"app": "theirs"}},
        "spec": {"containers": [{"name": "c", "image": "r.example/x@sha256:" + "1" * 64}]},
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m-notes", "labels": label}, "data": {"a": "b"}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "m-copy", "labels": {**label, "ddtree.dev/role": "engine"}},
            "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "theirs"}}, "template": pod},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "m-also"},
            "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
        },
    ]


def test_everything_owned_goes_and_nothing_else(operator: Installed) -> None:
    api = operator.api(NS)
    api.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": theirs()}))
    operator.apply(NS, "other", operator.spec("NONE"))
    operator.apply(NS, "m", operator.spec("DFLASH"))
    operator.reaches(NS, "other", "Stable")
    operator.reaches(NS, "m", "Stable")
    operator.until(lambda: settled(operator, "m") and settled(operator, "other"), "only the stable sets are left")
    slow = {"analysis": {"maxPairs": 100000, "minPairs": 50000, "deadline": "100h"}}
    operator.apply(NS, "m", operator.spec("DDTREE", canary=slow))
    operator.until(lambda: operator.status(NS, "m").get("analysis", {}).get("pairs", 0) > 2, "an analysis is under way")
    mine = {key for key in everything(operator) if key.split("/")[1].startswith("m-") or key.endswith("/m")}
    foreign = {"configmaps/m-notes", "deployments/m-copy", "services/m-also"}
    assert foreign < mine
    replicasets = {k for k in mine if k.startswith("replicasets/m-copy")}
    before = {k: u for k, u in everything(operator).items() if k not in mine - foreign - replicasets}
    api.kubectl("delete", "ddt", "m", "--wait=true")
    owned = mine - foreign - replicasets
    operator.until(lambda: not owned & everything(operator).keys(), "what it owned is gone")
    after = everything(operator)
    assert after.keys() <= before.keys()
    # The other resource's baseline may still have been leaving when `before` was read; all else is as it was.
    stays = {k: u for k, u in before.items() if "/other-base-" not in k}
    assert {k: u for k, u in after.items() if k in stays} == stays  # not even made anew
    assert operator.reaches(NS, "other", "Stable")

    operator.apply(NS, "m", operator.spec("DDTREE"))  # the same name again starts from nothing
    status = operator.reaches(NS, "m", "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    assert [e["number"] for e in status["history"]] == [1]
    api.kubectl("delete", "ddt", "--all", "--wait=false")


def settled(operator: Installed, name: str) -> bool:
    return len([d for d in operator.engines(NS, name) if d["metadata"]["name"] != "m-copy"]) == 1
