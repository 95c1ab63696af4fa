"""Which nodes fit, and the reasons the others give."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddtree_operator.api.spec import PlacementSpec
from ddtree_operator.placement import Inventory, NodeFacts, NodeFit, gpu_usage, match, summary

pytestmark = pytest.mark.unit

H200 = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"}


def node(name: str = "a", labels: dict[str, Any] | None = None, *, gpus: Any = 8, **more: Any) -> dict[str, Any]:
    spec = {k: more[k] for k in ("unschedulable", "taints") if k in more}
    return {
        "metadata": {"name": name, "labels": {**H200, **(labels or {})}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "8", "nvidia.com/gpu": str(gpus), **more.get("allocatable", {})},
            "conditions": [{"type": "Ready", "status": more.get("ready", "True")}],
        },
    }


def pod(on: str | None, gpus: int, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    limits = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"spec": {"nodeName": on, "containers": [limits], **spec}, "status": {"phase": phase}}


def placement(gpu: dict[str, Any] | None = None, **more: Any) -> PlacementSpec:
    return PlacementSpec.model_validate({"gpu": gpu or {}, **more})


def known(nodes: list[dict[str, Any]], pods: list[dict[str, Any]] | None = None) -> Inventory:
    return Inventory.from_objects(nodes, pods or [])


def one(n: dict[str, Any], p: PlacementSpec, pods: list[dict[str, Any]] | None = None) -> NodeFit:
    (fit,) = match(known([n], pods), p)
    return fit


def test_a_plain_node_fits() -> None:
    fit = one(node(), placement({"product": ["NVIDIA-H200"], "minMemoryGiB": 140}))
    assert fit.fits
    assert fit.reasons == ()
    assert (fit.free, fit.product, fit.memory, fit.slots) == (8, "NVIDIA-H200", 143771, 8)


MIG_SINGLE = {"nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.18gb", "nvidia.com/mig.strategy": "single"}
SHARED = {"nvidia.com/gpu.product": "NVIDIA-H200-SHARED", "nvidia.com/gpu.replicas": "4"}


@pytest.mark.parametrize(
    ("made", "wanted", "why"),
    [
        (node(unschedulable=True), {}, "cordoned"),
        (node(ready="Unknown"), {}, "not Ready"),
        (
            node(taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}]),
            {},
            "taint team=x:NoSchedule is not tolerated",
        ),
        (node(gpus=0), {}, "has no nvidia.com/gpu"),
        (node(gpus="many"), {}, "has no nvidia.com/gpu"),
        (node(gpus=2), {"perReplica": 4}, "has 2 GPUs, 4 needed"),
        (node(), {"product": ["NVIDIA-B200", "NVIDIA-GB200"]}, "product NVIDIA-H200, not NVIDIA-B200 or NVIDIA-GB200"),
        (
            node(labels={"nvidia.com/gpu.product": ""}),
            {"product": ["NVIDIA-H200"]},
            "no label nvidia.com/gpu.product",
        ),
        (node(labels={"nvidia.com/gpu.memory": "81559"}), {"minMemoryGiB": 80}, "79.6 GiB of GPU memory, 80 needed"),
        (
            node(labels={"nvidia.com/gpu.memory": "141GB"}),
            {"minMemoryGiB": 80},
            "label nvidia.com/gpu.memory is '141GB', not a number",
        ),
        (node(labels=MIG_SINGLE), {}, "MIG slices (single) and placement.gpu.mig is forbid"),
        (
            node(gpus=0, allocatable={"nvidia.com/mig-1g.18gb": "7"}),
            {},
            "offers nvidia.com/mig-1g.18gb instead of nvidia.com/gpu",
        ),
        (
            node(labels={"nvidia.com/gpu.product": "NVIDIA-H200-MIG-INVALID"}, gpus=0),
            {"mig": "allow"},
            "its MIG layout is invalid (product label says MIG-INVALID)",
        ),
        (node(labels=SHARED), {}, "GPUs are shared (time-slicing) and placement.gpu.sharing is forbid"),
        (
            node(labels={"nvidia.com/gpu.sharing-strategy": "mps"}),
            {},
            "GPUs are shared (mps) and placement.gpu.sharing is forbid",
        ),
        (
            node(labels={"nvidia.com/gpu.replicas": "four"}),
            {},
            "label nvidia.com/gpu.replicas is 'four', not a number",
        ),
        (
            node(labels={"nvidia.com/gpu.sharing-strategy": "magic"}),
            {},
            "label nvidia.com/gpu.sharing-strategy is 'magic', which is not known",
        ),
    ],
)
def test_a_node_that_does_not_fit_says_why(made: dict[str, Any], wanted: dict[str, Any], why: str) -> None:
    fit = one(made, placement(wanted))
    assert not fit.fits
    assert not fit.eligible
    assert fit.reasons == (why,)


def test_missing_memory_label_only_matters_when_memory_is_asked_for() -> None:
    bare = node()
    del bare["metadata"]["labels"]["nvidia.com/gpu.memory"]
    assert one(bare, placement()).fits
    assert one(bare, placement({"minMemoryGiB": 8})).reasons == ("no label nvidia.com/gpu.memory",)


def test_what_is_allowed_fits() -> None:
    assert one(node(labels=SHARED), placement({"sharing": "allow", "product": ["NVIDIA-H200"]})).fits
    assert one(node(labels=MIG_SINGLE), placement({"mig": "allow", "product": ["NVIDIA-H200"]})).fits


def test_a_mixed_mig_node_with_whole_gpus_left_is_told_from_a_plain_one() -> None:
    mixed = node(gpus=4, allocatable={"nvidia.com/mig-1g.18gb": "7"})
    assert "MIG slices (mixed)" in one(mixed, placement()).reasons[0]
    assert one(mixed, placement({"mig": "allow"})).fits


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "team", "value": "x"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "team", "value": "y"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_tolerations_follow_kubernetes(toleration: dict[str, str], fits: bool) -> None:
    tainted = node(taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    assert one(tainted, placement(tolerations=[toleration])).fits is fits


def test_a_soft_taint_keeps_nobody_away_and_kubernetes_own_taints_are_not_said_twice() -> None:
    soft = {"key": "team", "effect": "PreferNoSchedule"}
    assert one(node(taints=[soft]), placement()).fits
    own = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    assert one(node(taints=[own], unschedulable=True), placement()).reasons == ("cordoned",)


def test_the_taint_of_gpu_nodes_keeps_only_other_pods_away() -> None:
    tainted = node(taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}])
    assert one(tainted, placement()).fits
    assert one(tainted, placement({"perReplica": 0})).reasons == (
        "taint nvidia.com/gpu=present:NoSchedule is not tolerated",
    )


def test_node_selectors_count_labels() -> None:
    p = placement(nodeSelector={"zone": "1", "rack": "7"})
    assert one(node(labels={"zone": "2"}), p).reasons == ("label zone is '2', not '1'", "no label rack=7")
    assert one(node(labels={"zone": "1", "rack": "7"}), p).fits


def test_a_full_node_is_eligible_but_does_not_fit() -> None:
    fit = one(node(), placement({"perReplica": 2}), [pod("a", 7)])
    assert (fit.eligible, fit.fits, fit.free, fit.slots) == (True, False, 1, 0)
    assert fit.reasons == ("1 of 8 GPUs free, 2 needed",)


def test_pods_take_what_kubernetes_counts() -> None:
    init = [{"resources": {"requests": {"nvidia.com/gpu": "3"}}}]
    sidecar = [{"restartPolicy": "Always", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    pods = [
        pod("a", 1),
        pod("a", 2, "Succeeded"),
        pod("a", 2, "Failed"),
        pod(None, 4, "Pending"),
        pod("b", 1, initContainers=init),
        pod("c", 1, initContainers=[*sidecar, *init]),
        {"spec": {"nodeName": "d", "containers": [{}]}, "status": {}},
    ]
    assert gpu_usage(pods) == {"a": 1, "b": 3, "c": 4}


def test_a_cpu_placement_looks_at_no_gpu() -> None:
    cpu = node(gpus=0)
    cpu["metadata"]["labels"] = {}
    assert one(cpu, placement({"perReplica": 0})).fits
    assert one(node(unschedulable=True), placement({"perReplica": 0})).reasons == ("cordoned",)


def test_an_empty_node_object_is_no_crash() -> None:
    assert one({}, placement()).reasons == ("not Ready", "has no nvidia.com/gpu")
    assert NodeFacts.from_object({"metadata": {"labels": None}, "spec": None}).name == ""


def test_the_summary_groups_alike_reasons_and_stays_short() -> None:
    nodes = [node(f"n{i:03d}", unschedulable=True) for i in range(300)] + [node("z")]
    fits = match(known(nodes), placement())
    text = summary(fits)
    assert text == "1 of 301 nodes fits (z); not n000, n001, n002, n003, n004 and 295 more: cordoned"
    odd = [node(f"n{i:03d}", labels={"nvidia.com/gpu.memory": f"x{i}"}) for i in range(300)]
    text = summary(match(known(odd), placement({"minMemoryGiB": 1})))
    assert len(text) <= 900
    assert text.startswith("no node fits: n000: label nvidia.com/gpu.memory is 'x0', not a number; n001")
    assert text.endswith("more nodes for other reasons")
    assert summary([]) == "the cluster has no nodes"


def test_a_thousand_nodes_and_two_hundred_placements_take_less_than_a_second() -> None:
    nodes = [
        node(f"n{i:04d}", labels={"zone": str(i % 7), "nvidia.com/gpu.memory": str(80000 + i % 5)}, gpus=i % 9)
        for i in range(1000)
    ]
    pods = [pod(f"n{i % 1000:04d}", 1) for i in range(3000)]
    wanted = [
        placement({"product": ["NVIDIA-H200"], "perReplica": 1 + i % 4}, nodeSelector={"zone": str(i % 7)})
        for i in range(200)
    ]
    started = time.process_time()
    inventory = Inventory.from_objects(nodes, pods)
    fitting = sum(fit.fits for p in wanted for fit in match(inventory, p))
    seconds = time.process_time() - started
    assert fitting > 0
    assert seconds < 1.0
