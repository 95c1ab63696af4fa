"""What a rollout waits for: time that nobody can use counts for no deadline, and what serves is seen to meanwhile."""

from __future__ import annotations

import pytest

from ddtree_operator.core.facts import Problem
from unit.world import World, stable

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
