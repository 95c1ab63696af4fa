"""Placement as the core sees it: one sentence, and nothing said twice."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.facts import PlacementFact
from ddtree_operator.handlers import places
from unit.test_placement_match import known, node, pod

pytestmark = pytest.mark.unit


def spec(**gpu: Any) -> DDTreeSpec:
    return DDTreeSpec.model_validate(
        {"model": {"path": "/m"}, "drafter": {"path": "/d"}, "placement": {"gpu": {"product": ["NVIDIA-H200"], **gpu}}}
    )


def place(nodes: list[dict[str, Any]], pods: list[dict[str, Any]], spec: DDTreeSpec, *, needed: int) -> PlacementFact:
    return places.place(known(nodes, pods), spec, keep={}, needed=needed)


def test_no_node_fits_is_said_once() -> None:
    fact = place([node("a", unschedulable=True)], [], spec(), needed=1)
    assert (fact.fits, fact.message) == (False, "no node fits: a: cordoned")
    assert place([], [], spec(), needed=1).message == "the cluster has no nodes"


def test_a_full_cluster_says_how_many_gpus_are_missing() -> None:
    fact = place([node("a")], [pod("a", 7)], spec(perReplica=2), needed=2)
    assert not fact.fits
    assert fact.message == (
        "4 GPUs are missing: 2 more replicas need room, but the nodes alike (NVIDIA-H200, 140 GiB) have room for 0: "
        "a: 1 of 8 GPUs free, 2 needed"
    )
    one = place([node("a"), node("b", ready="False")], [pod("a", 7)], spec(), needed=2)
    assert one.message.startswith("1 GPU is missing: 2 more replicas need room, ")
    assert one.message.endswith("have room for 1: b: not Ready")


def test_a_node_that_fits_is_named() -> None:
    fact = place([node("a"), node("b", unschedulable=True)], [], spec(), needed=1)
    assert (fact.fits, fact.message) == (True, "1 of 2 nodes fits (a); not b: cordoned")


def test_of_a_large_fleet_the_table_holds_what_fits_and_one_of_each_reason() -> None:
    wrong = [node(f"a{i:03d}", unschedulable=True) for i in range(100)] + [node("z-last", ready="False")]
    rows = place([*wrong, *(node(f"m{i:03d}") for i in range(60))], [], spec(), needed=1).nodes
    assert len(rows) == 50
    assert [row["name"] for row in rows[:25]] == [f"m{i:03d}" for i in range(25)]
    assert [(row["name"], row["reason"]) for row in rows[25:27]] == [("a000", "cordoned"), ("z-last", "not Ready")]
    assert all(row["fits"] for row in rows[27:])
