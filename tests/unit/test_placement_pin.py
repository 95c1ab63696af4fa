"""Pinning to alike nodes: deterministic, kept, never silently another kind."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_operator.placement import Kind, Pins, affinity, choose_group, match, still_wanted
from unit.test_placement_match import known, node, placement, pod

pytestmark = pytest.mark.unit

B200 = {"nvidia.com/gpu.product": "NVIDIA-B200", "nvidia.com/gpu.memory": "183359"}
FLEET = [node("h1"), node("h2"), node("b1", B200), node("b2", B200), node("b3", B200)]


def choose(nodes: list[dict[str, Any]], needed: int, pods: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    gpu = more.pop("gpu", {})
    return choose_group(match(known(nodes, pods), placement(gpu)), needed, **more)


def test_the_kind_with_most_room_is_chosen_whatever_the_order() -> None:
    one, two = choose(FLEET, 2), choose(FLEET[::-1], 2)
    assert one == two
    assert one.pins == Pins(Kind("NVIDIA-B200", 183359, ""), ("b1", "b2", "b3"))


def test_room_counts_before_size() -> None:
    full = [pod(f"b{i}", 8) for i in (1, 2, 3)]
    assert choose(FLEET, 2, full).pins.kind.product == "NVIDIA-H200"


def test_a_choice_is_kept_while_it_holds() -> None:
    kept = Pins(Kind("NVIDIA-H200", 143771, ""), ("h1", "h2"))
    assert choose(FLEET, 2, keep=kept).pins == kept
    assert choose(FLEET, 2, keep=["h1"]).pins == kept
    assert choose(FLEET, 2, keep=Pins.from_status(kept.to_status())).pins == kept


def test_a_lost_node_is_replaced_by_an_alike_one_and_never_by_another_kind() -> None:
    kept = Pins(Kind("NVIDIA-H200", 143771, ""), ("h0", "h1"))
    assert choose(FLEET, 1, keep=kept).pins.nodes == ("h1", "h2")
    lost = choose([n for n in FLEET if n["metadata"]["name"].startswith("b")], 1, keep=kept)
    assert lost.pins is None
    assert lost.reason == "no node is left that is alike (NVIDIA-H200, 140 GiB); another kind is not taken"


def test_missing_gpus_are_counted() -> None:
    taken = [pod("h1", 8), pod("h2", 7)]
    got = choose(FLEET[:2], 3, taken)
    assert (got.missing, got.pins.nodes) == (2, ("h1", "h2"))
    assert got.reason == "3 more replicas need room, but the nodes alike (NVIDIA-H200, 140 GiB) have room for 1"
    assert choose([], 1).reason == "no node fits"


def test_another_driver_is_another_kind() -> None:
    label = "nvidia.com/cuda.driver-version.full"
    nodes = [node("a", {label: "570.1"}), node("b", {label: "575.2"}), node("c", {label: "575.2"})]
    assert choose(nodes, 1).pins.nodes == ("b", "c")


def test_pinning_to_nodes_takes_as_few_as_needed_and_keeps_them() -> None:
    got = choose(FLEET, 2, pin="nodes", gpu={"perReplica": 8})
    assert got.pins.nodes == ("b1", "b2")
    assert choose(FLEET, 2, pin="nodes", gpu={"perReplica": 8}, keep=["b2", "b3"]).pins.nodes == ("b2", "b3")
    more = choose(FLEET, 3, pin="nodes", gpu={"perReplica": 8}, keep=["b2", "b3"])
    assert more.pins.nodes == ("b1", "b2", "b3")


def test_without_pinning_every_node_that_fits_is_one_group() -> None:
    got = choose(FLEET, 40, pin="none")
    assert len(got.pins.nodes) == 5
    terms = affinity(placement(pin="none"), got.pins)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert len(terms["nodeSelectorTerms"]) == 2
    assert Pins.from_status(got.pins.to_status()) == got.pins


def test_a_cpu_placement_has_room_and_needs_no_affinity() -> None:
    bare = node("c", gpus=0)
    bare["metadata"]["labels"] = {}
    got = choose([bare], 3, gpu={"perReplica": 0})
    assert (got.pins.nodes, got.missing) == (("c",), 0)
    assert affinity(placement({"perReplica": 0}), got.pins) == {}


def terms(p: Any, pins: Pins | None) -> list[Any]:
    made = affinity(p, pins)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert isinstance(made, list)
    return made


def test_affinity_pins_by_label_or_by_name() -> None:
    pins = Pins(Kind("NVIDIA-H200", 143771, "570.1"), ("h1", "h2"))
    (term,) = terms(placement(), pins)
    assert term["matchExpressions"] == [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]},
        {"key": "nvidia.com/gpu.memory", "operator": "In", "values": ["143771"]},
        {"key": "nvidia.com/cuda.driver-version.full", "operator": "In", "values": ["570.1"]},
        {"key": "nvidia.com/gpu.sharing-strategy", "operator": "NotIn", "values": ["mps", "time-slicing"]},
    ]
    assert len(terms(placement({"sharing": "allow"}), pins)[0]["matchExpressions"]) == 3
    (bare,) = terms(placement(), Pins(Kind("NVIDIA-H200", None, ""), ("h1",)))
    assert [e["operator"] for e in bare["matchExpressions"]] == ["In", "DoesNotExist", "DoesNotExist", "NotIn"]
    named = terms(placement(pin="nodes"), pins)
    assert [t["matchFields"][0]["values"] for t in named] == [["h1"], ["h2"]]
    (loose,) = terms(placement({"product": ["A", "B"]}), None)
    assert loose["matchExpressions"][0]["values"] == ["A", "B"]
    assert affinity(placement(), None) == {}


def test_a_status_that_makes_no_sense_is_forgotten() -> None:
    for value in (None, [], "x", {"nodes": "h1"}, {}):
        assert Pins.from_status(value) is None


def test_who_names_another_gpu_means_it() -> None:
    pins = Pins(Kind("NVIDIA-H100-SHARED", 81559, ""), ("h1",))
    assert still_wanted(pins, placement())
    assert still_wanted(pins, placement({"product": ["NVIDIA-H100"], "minMemoryGiB": 79}))
    assert not still_wanted(pins, placement({"product": ["NVIDIA-B200"]}))
    assert not still_wanted(pins, placement({"minMemoryGiB": 80}))
