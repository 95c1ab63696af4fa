"""While the spec has a mistake nothing new begins, and alerts, commands and failures still take back what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unit.world import World, stable

pytestmark = pytest.mark.unit

HALF = {"steps": [{"weight": 50}, {"analysis": {}}, {"pause": {}}]}
MISTAKES: dict[str, dict[str, Any]] = {
    "unknown field": {"replica": 3},
    "model gone": {"model": {}},
    "not available": {"engine": {"kind": "vllm"}},
    "in the canary's own steps": {"canary": {"steps": [{"weight": 50}]}},
}


def serves(world: World) -> str:
    assert world.selector is not None
    return world.selector.get("ddtree.dev/revision", "both")


def settle(world: World, looks: int = 30) -> World:
    for _ in range(looks):
        world.tick()
    return world


def canary(at: str = "Analyzing", **more: Any) -> tuple[World, str, str]:
    """A canary at half of the traffic, then a spec with a mistake; the stable hash and the canary's."""
    world = stable(replicas=2)
    old = world.status["revision"]
    world.edit(canary=HALF).retuned(15).until(at)
    assert serves(world) == "both"
    new = world.status["revision"]
    world.edit(**(more or MISTAKES["unknown field"])).until("Invalid")
    return world, old, new


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_abort_ends_a_canary(mistake: str) -> None:
    world, old, new = canary("Paused", **MISTAKES[mistake])
    settle(world)
    assert serves(world) == "both"  # until somebody says so
    settle(world.ask("abort"))
    assert serves(world) == old
    assert [run.action.revision for run in world.sets.values()] == [old]
    assert world.status["phase"] == "Invalid"
    assert "meanwhile: aborted by ann" in world.status["message"]
    assert [b["revision"] for b in world.status["blocked"]] == [new]
    assert world.status["lastAction"]["verb"] == "abort"
    assert not world.outages


def test_an_alert_ends_a_canary() -> None:
    world, old, new = canary()
    world.alert(new).tick()
    assert serves(world) == old
    settle(world)
    assert [run.action.revision for run in world.sets.values()] == [old]
    assert world.revisions[new].by == "alert AcceptLengthLow"
    assert not world.outages


def test_a_failing_analysis_and_a_crashing_engine_end_a_canary() -> None:
    for fault in ("analysis", "engine"):
        world, old, new = canary()
        if fault == "analysis":
            world.verdict = lambda revision: ("fail", "slower")
        else:
            world.crash[f"m-{new}"] = "RuntimeError: it broke"
        settle(world)
        assert (world.revisions[new].result, world.revisions[new].cause) == ("rolledBack", fault)
        assert serves(world) == old
        assert not world.outages


def test_a_passing_analysis_waits_for_the_correction_and_no_deadline_runs() -> None:
    world, _, new = canary()
    right = {k: v for k, v in world.spec.items() if k != "replica"}
    step = world.revisions[new].progress
    settle(world, 60).now += 86_400
    writes = world.writes
    settle(world)
    assert world.writes == writes
    assert step is not None
    assert world.revisions[new].progress == replace(step, stuck=True)
    world.spec = right
    world.edit().until("Paused")  # its third step
    world.ask("promote").until("Stable")
    assert serves(world) == new


@pytest.mark.parametrize("why", ["alert", "undo", "watch"])
def test_a_promoted_revision_goes_back_and_its_predecessor_is_started_anew(why: str) -> None:
    world = stable(rollback={"watch": "2h"})
    old = world.status["revision"]
    world.retuned(15).until("Stable")
    new = world.status["revision"]
    settle(world)
    assert list(world.sets) == [f"m-{new}"]
    world.edit(rollback={"watch": "never"}).until("Invalid")
    settle(world)
    if why == "alert":
        world.alert(new)
    elif why == "undo":
        world.ask("undo")
    else:
        world.fell[new] = "accept length fell"
    settle(world)
    assert serves(world) == old
    assert list(world.sets) == [f"m-{old}"]
    assert world.status["stable"]["revision"] == old
    assert not world.outages


def test_the_settings_that_held_last_stay_in_force() -> None:
    world = stable()
    world.retuned(15).until("Stable")
    new = world.status["revision"]
    world.edit(rollback={"alerts": {"dryRun": True}})
    settle(world, 3)
    world.edit(rollback={"alerts": {"dryRun": "perhaps"}}).until("Invalid")
    settle(world.alert(new))
    assert serves(world) == new
    assert [x["outcome"] for x in world.revisions[new].alarms] == ["dryRun"]


def test_nothing_that_leads_forward_is_done() -> None:
    world, _, new = canary("Paused")
    for verb in ("promote", "skip", "resume", "retry"):
        world.ask(verb, reason="now")
        world.tick()
        assert "the spec has a mistake, correct it first (spec.replica: unknown" in world.status["lastAction"]["result"]
    assert world.revisions[new].result == ""
    assert serves(world) == "both"


def test_the_size_is_followed_while_it_holds_by_itself() -> None:
    world = stable(replicas=2)
    world.edit(replica=2).until("Invalid")
    world.edit(replicas=3)
    settle(world, 3)
    assert [run.replicas for run in world.sets.values()] == [3]
    world.edit(replicas="many")
    settle(world, 3)
    assert [run.replicas for run in world.sets.values()] == [3]


def test_what_is_shown_stays_and_comes_back() -> None:
    world, _, new = canary()
    shown = dict(world.status)
    settle(world)
    assert world.status == shown
    world.status = {}
    settle(world, 3)
    assert world.status["phase"] == "Invalid"
    assert world.status["canary"]["revision"] == new
