"""What matching says is what the real scheduler does, on nodes in every odd state beside the real one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.api.names import GPU_RESOURCE
from ddtree_operator.api.spec import PlacementSpec
from ddtree_operator.placement import Inventory, NodeFit, affinity, choose_group, match, summary
from integration.build_cluster import until
from integration.operator_cluster import Installed

pytestmark = pytest.mark.integration

CLUSTER = str(Path(__file__).resolve().parents[2] / "dev/cluster/cluster")
PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"

H100 = "NVIDIA-H100-80GB-HBM3"
PLAIN = "fake-nvidia-h100-80gb-hbm3-"
SILENT = "silent"
DOWN = ("not-ready", "unreachable")
SHARED = f"{PRODUCT}={H100}-SHARED"
GPU_TAINT = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}  # as every engine pod has it

SLICED = {"status": {key: {GPU_RESOURCE: "0", "nvidia.com/mig-1g.10gb": "4"} for key in ("allocatable", "capacity")}}

# What is done to each of the fake nodes after it is Ready; the rest stay plain (three H100, two B200).
ODD: dict[str, tuple[str, ...]] = {
    "fake-nvidia-h100-80gb-hbm3-3": ("cordon", "{node}"),
    "fake-nvidia-h100-80gb-hbm3-4": ("taint", "node", "{node}", "team=x:NoSchedule"),
    "fake-nvidia-h100-80gb-hbm3-5": ("label", "node", "{node}", "--overwrite", SHARED),
    "fake-nvidia-h100-80gb-hbm3-6": ("label", "node", "{node}", "--overwrite", f"{PRODUCT}=NVIDIA-H100-MIG-1g.10gb"),
    "fake-nvidia-h100-80gb-hbm3-7": ("label", "node", "{node}", "--overwrite", f"{MEMORY}=eighty"),
    "fake-nvidia-h100-80gb-hbm3-8": ("label", "node", "{node}", f"{PRODUCT}-"),
    "fake-nvidia-h100-80gb-hbm3-9": ("label", "node", "{node}", "--overwrite", f"{PRODUCT}={H100}-MIG-INVALID"),
    "fake-nvidia-h100-80gb-hbm3-10": ("patch", "node", "{node}", "--subresource=status", "-p", json.dumps(SLICED)),
    "fake-nvidia-h100-80gb-hbm3-11": ("label", "node", "{node}", "--overwrite", "nvidia.com/gpu.sharing-strategy=mps"),
    "fake-nvidia-h100-80gb-hbm3-12": ("label", "node", "{node}", f"{MEMORY}-"),
}  # fmt: skip

Object = dict[str, Any]
NS = "op-nodes"


class Nodes:
    """kubectl against the cluster, in a namespace of our own."""

    def __init__(self) -> None:
        self.env = {**os.environ, "DDTREE_CLUSTER": os.environ.get("DDTREE_CLUSTER", "it")}
        subprocess.run([CLUSTER, "up"], env=self.env, check=True, stdout=subprocess.DEVNULL)
        told = subprocess.run([CLUSTER, "env"], env=self.env, check=True, capture_output=True, text=True).stdout
        for line in told.splitlines():
            key, _, value = line.removeprefix("export ").partition("=")
            self.env[key] = shlex.split(value)[0] if value else ""
        self.namespace = f"place-{uuid.uuid4().hex[:8]}"

    def fake(self, *args: str) -> None:
        subprocess.run([CLUSTER, "fake-nodes", *args], env=self.env, check=True, stdout=subprocess.DEVNULL)

    def kubectl(self, *args: str, stdin: str = "") -> str:
        done = subprocess.run(
            [self.env["DDTREE_KUBECTL"], *args], input=stdin, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"kubectl {shlex.join(args)}: {done.stderr}"
        return done.stdout

    def items(self, kind: str, *args: str) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", kind, *args, "-o", "json"))["items"]
        return found

    def fits(self, placement: PlacementSpec) -> list[NodeFit]:
        return match(Inventory.from_objects(self.items("nodes"), self.items("pods", "-A")), placement)

    def scheduled(self, placement: PlacementSpec, count: int) -> tuple[Counter[str], int]:
        """Where the scheduler puts ``count`` pods like an engine's, and how many it cannot place; then removes them."""
        pins = choose_group(self.fits(placement), 0, pin=placement.pin).pins
        resources = {"limits": {GPU_RESOURCE: str(placement.gpu.per_replica)}} if placement.gpu.per_replica else {}
        container = {"name": "c", "image": "registry.invalid/x:1", "resources": resources}
        spec = {
            "containers": [container],
            "affinity": affinity(placement, pins),
            "nodeSelector": placement.node_selector,
            "tolerations": [*placement.tolerations, *([GPU_TAINT] if placement.gpu.per_replica else [])],
            "terminationGracePeriodSeconds": 0,
        }
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"p{i}", "namespace": self.namespace},
                "spec": spec,
            }
            for i in range(count)
        ]
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))

        def decided() -> list[Object] | None:
            found = self.items("pods", "-n", self.namespace)
            done = [p for p in found if p["spec"].get("nodeName") or _refused(p)]
            return found if len(done) == count else None

        found = until(decided, 120, f"the scheduler decides on {count} pods")
        self.kubectl("delete", "pods", "--all", "-n", self.namespace, "--wait")
        places = Counter(p["spec"]["nodeName"] for p in found if p["spec"].get("nodeName"))
        return places, sum(1 for p in found if not p["spec"].get("nodeName"))


def _refused(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    made.fake("0")
    made.fake("13", H100, "2")
    made.fake("2", "NVIDIA-B200", "4")
    made.kubectl("create", "namespace", made.namespace)
    for node, change in ODD.items():
        made.kubectl(*(part.replace("{node}", node) for part in change))
    made.kubectl("create", "-f", "-", stdin=json.dumps(silent(made.items("nodes", "-l", f"{PRODUCT}={H100}")[0])))
    until(lambda: all(_seen(n) for n in made.items("nodes")), 60, "cordoned and silent nodes carry their taints")
    yield made
    made.kubectl("delete", "namespace", made.namespace, "--wait=false")
    made.fake("0")


def silent(like: Object) -> Object:
    """A node that nothing runs, and that is not Ready. It says so: without that condition no taint stays on it."""
    labels = {**like["metadata"]["labels"], "kubernetes.io/hostname": SILENT}
    status = {k: like["status"][k] for k in ("allocatable", "capacity")}
    status["conditions"] = [{"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "starting"}]
    spec = {"taints": [t for t in like["spec"]["taints"] if t["key"] == GPU_RESOURCE]}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": SILENT, "labels": labels},
        "spec": spec,
        "status": status,
    }


def _seen(node: Object) -> bool:
    taints = [t["key"] for t in node["spec"].get("taints") or [] if t["effect"] == "NoSchedule"]
    if node["metadata"]["name"] == SILENT and not {f"node.kubernetes.io/{why}" for why in DOWN} & set(taints):
        return False
    return not node["spec"].get("unschedulable") or "node.kubernetes.io/unschedulable" in taints


@pytest.mark.parametrize(
    ("placement", "nodes_expected"),
    [
        ({"gpu": {"product": [H100]}}, 3),
        # Of two products one is chosen, with most room; not a single engine goes to the other.
        ({"gpu": {"product": [H100, "NVIDIA-B200"]}, "pin": "product"}, 2),
        ({"gpu": {"product": [H100], "minMemoryGiB": 79}}, 3),
        ({"gpu": {"product": [H100], "perReplica": 2}, "tolerations": [{"key": "team", "operator": "Exists"}]}, 4),
        ({"gpu": {"product": ["NVIDIA-B200"], "perReplica": 3}}, 2),
        ({"gpu": {"product": [H100], "perReplica": 2}, "pin": "nodes"}, 1),
        ({"gpu": {"minMemoryGiB": 100}, "nodeSelector": {"kubernetes.io/os": "linux", PRODUCT: "NVIDIA-B200"}}, 2),
    ],
)
def test_the_scheduler_agrees(nodes: Nodes, placement: Object, nodes_expected: int) -> None:
    spec = PlacementSpec.model_validate(placement)
    fits = nodes.fits(spec)
    chosen = choose_group(fits, 1, pin=spec.pin)
    assert chosen.pins is not None, chosen.reason
    kinds = {fit.kind for fit in fits if fit.name in chosen.pins.nodes}
    room = {fit.name: fit.slots for fit in fits if fit.name in chosen.pins.nodes and fit.fits}
    assert len(room) == nodes_expected
    places, refused = nodes.scheduled(spec, sum(room.values()) + 1)
    assert len(kinds) == 1
    assert dict(places) == room  # every slot that was promised, and not one elsewhere
    assert refused == 1


def test_no_node_fits_and_each_says_why(nodes: Nodes) -> None:
    spec = PlacementSpec.model_validate({"gpu": {"product": ["NVIDIA-GB200"]}})
    fits = nodes.fits(spec)
    text = summary(fits)
    assert not any(fit.fits for fit in fits)
    for words in (f"product {H100}, not NVIDIA-GB200", "cordoned", "taint team=x:NoSchedule"):
        assert words in text, text
    assert f"no label {PRODUCT}" in {reason for fit in fits for reason in fit.reasons}
    assert nodes.scheduled(spec, 1)[1] == 1


def test_a_full_fleet_says_how_many_gpus_are_free(nodes: Nodes) -> None:
    spec = PlacementSpec.model_validate({"gpu": {"product": ["NVIDIA-B200"], "perReplica": 5}})
    assert "has 4 GPUs, 5 needed" in summary(nodes.fits(spec))


def test_ddtreectl_shows_the_table(nodes: Nodes, operator: Installed) -> None:
    """The operator in its pod, the nodes in the API server, the words in the user's shell."""
    full = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "full", "namespace": NS},
        "spec": {
            "nodeName": f"{PLAIN}2",
            "tolerations": [GPU_TAINT],
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "c",
                    "image": "registry.invalid/x:1",
                    "resources": {"limits": {GPU_RESOURCE: "1"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    nodes.kubectl("create", "-f", "-", stdin=json.dumps(full))
    # More than fits anywhere: while a revision lacks room, the table follows what the nodes say.
    gpu = {"product": [H100], "perReplica": 2, "minMemoryGiB": 79}
    asked = {"gpu": gpu, "nodeSelector": {"kubernetes.io/arch": "amd64"}}
    operator.apply(NS, "table", operator.spec(replicas=100, canary={"replicas": 100}, placement=asked))
    expected = {
        "0": f"yes 2 {H100}",
        "2": f"no 1 {H100} 1 of 2 GPUs free, 2 needed",
        "3": f"no 2 {H100} cordoned",
        "4": f"no 2 {H100} taint team=x:NoSchedule is not tolerated",
        "5": f"no 2 {H100}-SHARED GPUs are shared (time-slicing) and placement.gpu.sharing is forbid",
        "6": "no 2 NVIDIA-H100-MIG-1g.10gb MIG slices (single) and placement.gpu.mig is forbid, "
        f"product NVIDIA-H100-MIG-1g.10gb, not {H100}",
        "7": f"no 2 {H100} label {MEMORY} is 'eighty', not a number",
        "8": f"no 2 no label {PRODUCT}",
        "9": f"no 2 {H100}-MIG-INVALID its MIG layout is invalid (product label says MIG-INVALID)",
        "10": f"no 0 {H100} offers nvidia.com/mig-1g.10gb instead of {GPU_RESOURCE}",
        "11": f"no 2 {H100} GPUs are shared (mps) and placement.gpu.sharing is forbid",
        "12": f"no 2 {H100} no label {MEMORY}",
    }
    wanted = {f"{PLAIN}{number}": told for number, told in expected.items()} | {
        SILENT: f"no 2 {H100} not Ready",
        "fake-nvidia-b200-0": f"no 4 NVIDIA-B200 product NVIDIA-B200, not {H100}",
    }
    shown: dict[str, str] = {}

    def told() -> bool:
        done = operator.api(NS).ddtreectl("nodes", "table")
        shown.clear()
        shown.update((line.split()[0], " ".join(line.split()[1:])) for line in done.stdout.splitlines() if line)
        return {name: shown.get(name) for name in wanted} == wanted

    try:
        operator.until(told, "ddtreectl shows the nodes as they are", 60)
    except AssertionError:
        assert {name: shown.get(name) for name in wanted} == wanted
        raise
    message = operator.reaches(NS, "table", "Placing")["message"]
    assert "GPUs are missing: 101 more replicas need room, " in message
    operator.api(NS).kubectl("delete", "ddt,pod", "--all", "--wait=true")
