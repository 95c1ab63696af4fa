"""Traffic between revisions: what a canary may have before it is judged, and what stays of it when it ends."""

from __future__ import annotations

import pytest

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.core.facts import Problem
from unit.world import World, first, stable

pytestmark = pytest.mark.unit


def at_full_weight() -> tuple[World, str, str]:
    """A canary that has the Service to itself and waits, before its analysis; with the hashes of stable and canary."""
    world = stable(replicas=2)
    before = str(world.status["stable"]["revision"])
    world.edit(canary={"steps": [{"weight": 100}, {"pause": {}}, {"analysis": {}}]})
    world.retuned(8).until("Paused")
    return world, before, str(world.status["revision"])


def test_a_weight_of_100_is_no_promotion() -> None:
    world, before, canary = at_full_weight()
    assert world.selector is not None
    assert world.selector[LABEL_REVISION] == canary
    assert world.status["stable"]["revision"] == before
    assert world.status["step"] == "2/3 pause"
    assert world.revisions[canary].result == ""
    world.ask("promote").until("Analyzing")
    world.until("Stable")
    assert world.revisions[canary].result == "promoted"
    assert len(world.analyses) == 2  # the first rollout's, and this one's
    assert not world.outages


def test_what_fails_at_a_weight_of_100_gives_the_traffic_back() -> None:
    world, before, canary = at_full_weight()
    world.verdict = lambda revision: ("fail", "slow")
    world.ask("promote").until("RolledBack")
    for _ in range(20):
        world.tick()
    assert world.selector is not None
    assert world.selector[LABEL_REVISION] == before
    assert {run.action.revision for run in world.sets.values()} == {before}
    assert not world.revisions[before].returned  # it never left: alerts about it count as before
    assert not world.outages
    assert canary in {row["revision"] for row in world.status["blocked"]}


@pytest.mark.parametrize("weight", [50, 100])
def test_a_canary_that_is_replaced_gives_its_traffic_back_while_the_next_one_is_built(weight: int) -> None:
    world = stable(replicas=2)
    before = world.status["stable"]["revision"]
    world.edit(canary={"steps": [{"weight": weight}, {"pause": {}}, {"analysis": {}}]}).retuned(8).until("Paused")
    replaced = world.status["revision"]
    world.build_seconds = 1200.0
    world.retuned(16).until("Building")
    assert world.selector is not None
    assert world.selector.get(LABEL_REVISION) == before
    assert world.revisions[replaced].result == "superseded"
    for _ in range(10):
        world.tick()
    assert {run.action.revision for run in world.sets.values()} == {before}
    assert not world.outages


def test_a_canary_whose_first_step_is_a_weight_does_not_wait_for_the_one_it_replaces() -> None:
    world = stable(replicas=2).edit(canary={"steps": [{"weight": 50}, {"pause": {}}, {"analysis": {}}]})
    world.retuned(8).until("Paused")
    world.retuned(16).until("Paused")
    assert world.status["step"] == "2/3 pause"
    assert len(world.sets) == 2
    assert not world.outages


def test_failed_canaries_do_not_push_out_the_revision_to_go_back_to() -> None:
    world = stable(rollback={"keep": 2})
    before = world.status["stable"]["revision"]
    world.verdict = lambda revision: ("fail", "slow")
    for budget in (8, 16, 24, 32):
        world.retuned(budget).until("RolledBack")
    world.verdict = lambda revision: ("pass", "fine")
    world.retuned(64).until("Stable")
    for _ in range(5):
        world.tick()
    assert before in world.revisions
    assert len(world.revisions) == 4  # what serves, the one before it, and two more
    world.alert(world.status["revision"]).until("RolledBack")
    assert world.status["stable"]["revision"] == before


@pytest.mark.parametrize("by", ["ann", "spec"])
def test_who_pauses_a_promotion_holds_it(by: str) -> None:
    world = World(spec=first().spec | {"replicas": 3}, gpus=20).until("Stable")
    before = world.status["stable"]["revision"]
    world.retuned(8).until("Promoting", seconds=1.0)
    world = world.ask("pause") if by == "ann" else world.edit(paused=True)
    world.until("Paused")
    for _ in range(50):
        world.tick(60)
    assert world.status["phase"] == "Paused"
    assert world.status["stable"]["revision"] == before
    if by == "ann":
        world.ask("promote").tick()
        assert "ddtreectl rollout resume" in world.status["lastAction"]["result"]
    world = world.ask("resume") if by == "ann" else world.edit(paused=False)
    world.until("Stable")
    assert world.status["stable"]["revision"] == world.status["revision"] != before


def test_what_keeps_the_stable_set_from_serving_is_said() -> None:
    world = stable()
    world.service_problem = "Service m exists and does not belong to this resource; rename one of them"
    world.until("Degraded")
    assert world.status["message"] == world.service_problem
    world.service_problem = ""
    world.until("Stable")
    world.sets.clear()  # and what is to come in its place is refused
    world.start_seconds = 1e9
    world.problems = (Problem("EnginesRefused", "the API server refused Deployment m-1 (webhook says no)"),)
    world.until("Degraded")
    assert world.status["message"] == f"stable: 0/1 engines ready; {world.problems[0].message}"


def test_a_revision_that_is_asked_for_again_is_promoted_for_what_happened_then() -> None:
    world = stable().edit(canary={"steps": [{"analysis": {}}, {"pause": {}}]}).retuned(8).until("Analyzing")
    again = world.spec["engine"]
    world.ask("skip", reason="known").until("Paused")
    world.retuned(16).until("Analyzing")
    world.edit(engine=again, canary={"steps": [{"analysis": {}}]}).until("Stable")
    row = next(x for x in world.status["history"] if x["revision"] == world.status["revision"])
    assert (row["result"], row["by"], row["reason"]) == ("promoted", "operator", "every step passed")
    assert [entry["verb"] for entry in row["log"]] == ["skip", "reopen"]
