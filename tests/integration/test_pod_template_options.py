"""Queues of Kueue and claims of DRA by the pod template, as docs/how-to/full-cluster.md shows: a real API server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from ddtree_operator.api import names
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import ApplyEngines
from ddtree_operator.handlers.places import affinity_of, place
from ddtree_operator.placement.match import Inventory
from ddtree_operator.rollout.manifests import EngineDefaults, engines
from integration.ddt_api import DIGEST, ROOT, Api, open_api

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Object = dict[str, Any]
PAGE = (ROOT / "docs/how-to/full-cluster.md").read_text()
QUEUE = "kueue.x-k8s.io/queue-name"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with open_api("options") as found:
        yield found


def documented(section: str) -> Object:
    """The spec in the first YAML block of a section of the page, completed to one that is accepted."""
    text = PAGE.partition(section)[2]
    block = re.search(r"```yaml\n(.+?)```", text, re.S)
    assert block is not None
    spec: Object = yaml.safe_load(block[1])["spec"]
    engine = {"image": f"registry.example/engine@{DIGEST}", **spec.get("engine", {})}
    return {"model": {"path": "/m"}, "drafter": {"path": "/d"}, **spec, "engine": engine}


def deployment(api: Api, spec: Object) -> Object:
    """The engines' Deployment as the API server would store it."""
    parsed = DDTreeSpec.model_validate(spec)
    action = ApplyEngines("m-0123456789", "0123456789", False, 1, str(parsed.engine.image), spec)
    resource = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": api.namespace, "uid": "u"},
    }
    made = engines(action, parsed, resource, EngineDefaults(), affinity_of(parsed, {}))
    made["metadata"].pop("ownerReferences")
    stored = api.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(made)
    )
    found: Object = json.loads(stored.stdout)
    return found


@pytest.mark.parametrize("section", ["# Roll out on a full cluster", "## Queues: Kueue", "## Claims: DRA"])
def test_what_the_page_shows_is_accepted(api: Api, section: str) -> None:
    done = api.apply(documented(section), dry=True)
    assert done.returncode == 0, done.stderr


def test_a_queue_name_reaches_the_pods(api: Api) -> None:
    stored = deployment(api, documented("## Queues: Kueue"))
    labels = stored["spec"]["template"]["metadata"]["labels"]
    assert labels[QUEUE] == "gpus"
    assert labels[names.LABEL_DEPLOYMENT] == "m"
    assert QUEUE not in stored["spec"]["selector"]["matchLabels"]


def test_claims_reach_the_pods_and_take_the_place_of_counted_gpus(api: Api) -> None:
    spec = documented("## Claims: DRA")
    pod = deployment(api, spec)["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "h200"}]
    (engine,) = pod["containers"]
    assert engine["resources"] == {"claims": [{"name": "gpu"}]}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "h200"},
        "spec": {
            "spec": {
                "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 1}}]}
            }
        },
    }
    api.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(template))


def test_nodes_are_still_chosen_by_label_with_claims() -> None:
    node = {
        "metadata": {"name": "a", "labels": {names.GPU_PRODUCT_LABEL: "NVIDIA-H200"}},
        "status": {"allocatable": {}, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    other = {**node, "metadata": {"name": "b", "labels": {names.GPU_PRODUCT_LABEL: "NVIDIA-B200"}}}
    nodes = Inventory.from_objects([node, other], ())
    fact = place(nodes, DDTreeSpec.model_validate(documented("## Claims: DRA")), keep={}, needed=2)
    assert (fact.fits, fact.room, fact.pins["nodes"]) == (True, None, ["a"])
