"""What a rollout waits for: time that nobody can use counts for no deadline, and what serves is seen to meanwhile."""

from __future__ import annotations

import pytest

from ddtree_operator.core.facts import PlacementFact, Problem
from unit.world import World, first, fit, stable

pytestmark = pytest.mark.unit

MISSING = Problem("SecretMissing", "Secret regcred does not exist in namespace llm; create it")


def wait(world: World, seconds: float) -> None:
    for _ in range(20):
        world.tick(seconds / 20)


def test_a_build_has_all_its_time_after_what_it_lacked_is_there() -> None:
    world = stable()
    world.problems = (MISSING,)
    world.retuned(8).until("Pending")
    writes = world.writes
    wait(world, 7200)
    assert world.writes <= writes + 1
    assert world.status["message"] == MISSING.message
    world.problems = ()
    world.until("Building").until("Stable")
    assert world.status["stable"]["revision"] == world.status["revision"]


def test_an_analysis_has_all_its_time_after_its_prompts_are_there_again() -> None:
    world = stable()
    world.analysis_seconds = 600.0
    world.retuned(8).until("Analyzing")
    world.problems = (Problem("PromptsMissing", "ConfigMap prompts does not exist in namespace llm; create it"),)
    wait(world, 7200)
    assert world.status["phase"] == "Pending"
    world.problems = ()
    world.until("Stable")
    assert world.status["stable"]["revision"] == world.status["revision"]


def test_engines_that_the_api_server_refuses_do_not_get_more_time_with_each_attempt() -> None:
    world = stable()
    world.retuned(8).until("Starting")
    world.failure[f"m-{world.status['revision']}"] = "pods are refused"
    for _ in range(30):
        world.problems = (Problem("EnginesRefused", "the API server refused Deployment m"),)
        wait(world, 60)
        world.problems = ()
        world.tick()
    assert world.status["phase"] == "RolledBack"


def sizes(world: World) -> dict[str, int]:
    return {run.action.revision: run.replicas for run in world.sets.values()}


@pytest.mark.parametrize("phase", ["Pending", "Building", "Placing"])
def test_what_serves_is_scaled_while_a_revision_waits(phase: str) -> None:
    world = stable(replicas=2)
    before = world.status["stable"]["revision"]
    if phase == "Pending":
        world.problems = (MISSING,)
    elif phase == "Placing":
        world.placement = PlacementFact(False, "no node fits")
    world.build_seconds = 1000.0 if phase == "Building" else world.build_seconds
    world.retuned(8).until(phase)
    world.edit(replicas=5)
    wait(world, 60)
    assert world.status["phase"] == phase
    assert sizes(world) == {before: 5}
    world.sets.clear()  # somebody deletes it
    world.tick()
    assert sizes(world) == {before: 5}


def test_what_gave_engines_to_a_canary_does_not_take_them_back_while_it_waits() -> None:
    world = World(spec=first().spec | {"replicas": 3, "placement": {"strategy": "swap"}}, gpus=3)
    world.until("Stable").retuned(8).until("Analyzing")
    before = sizes(world)
    world.problems = (MISSING,)
    wait(world, 300)
    assert world.status["phase"] == "Pending"
    assert sizes(world) == before


def test_a_node_that_goes_in_a_long_pause_has_the_whole_deadline_to_come_back() -> None:
    world = stable()
    world.placement = fit()
    world.edit(canary={"steps": [{"analysis": {}}, {"pause": {}}]}).retuned(8).until("Paused")
    wait(world, 7200)
    world.placement = PlacementFact(False, "no node fits: a: it is not Ready")
    wait(world, 900)
    assert world.status["phase"] == "Placing"
    world.placement = fit()
    world.until("Paused")
    world.placement = PlacementFact(False, "no node fits: a: it is not Ready")
    wait(world, 1100)
    assert world.status["phase"] == "Placing"  # each time anew
    wait(world, 200)
    assert world.status["phase"] == "RolledBack"
    assert world.status["message"] == "no progress for 20m: no node fits: a: it is not Ready"


def test_a_node_that_goes_while_somebody_holds_the_rollout_ends_nothing() -> None:
    world = stable()
    world.placement = fit()
    world.retuned(8).until("Analyzing").ask("pause").until("Paused")
    world.placement = PlacementFact(False, "no node fits: a: it is not Ready")
    wait(world, 7200)
    assert world.status["phase"] == "Placing"
    world.placement = fit()
    world.until("Paused").ask("resume").until("Stable")
    assert world.status["stable"]["revision"] == world.status["revision"]


def test_an_analysis_against_a_set_that_is_scaled_to_nothing_says_so_and_ends() -> None:
    world = stable().edit(replicas=0)
    world.tick()
    world.retuned(8).until("Analyzing")
    assert world.status["message"] == "the baseline has 0 engines to send prompts to; spec.replicas is 0"
    world.until("Paused", seconds=60.0)
    assert "no verdict within 30m: the baseline has 0 engines" in world.status["message"]
    world.edit(replicas=1).ask("resume").until("Stable")
    assert world.status["stable"]["revision"] == world.status["revision"]
