"""No canary starts before it is known that what serves could be started again."""

from __future__ import annotations

import pytest

from unit.world import World, stable

pytestmark = pytest.mark.unit


def canaries(world: World) -> list[str]:
    return [n for n, s in world.sets.items() if s.action.revision == world.status["revision"]]


def test_the_image_of_what_serves_is_tagged_before_the_canary_starts() -> None:
    world = stable()
    old = world.status["revision"]
    assert not world.kept  # a first rollout has nothing to go back to
    world.retuned(15).until("Starting")
    assert world.kept == {old}
    world.until("Stable")
    assert world.kept == {old}


def test_a_lost_image_stops_the_rollout_before_its_first_engine_and_asks() -> None:
    world = stable()
    world.way_back = "lost"
    world.retuned(15).until("Paused")
    assert canaries(world) == []
    assert world.status["message"].startswith(
        "revision 1 serves, but its registry has lost the manifest of r/e@sha256:"
    )
    assert [e.reason for e in world.events].count("RollbackImageLost") == 1
    writes = world.writes
    for _ in range(5):
        world.tick(3600)
    assert (world.writes, world.status["phase"]) == (writes, "Paused")  # it waits for a person, however long


def test_who_resumes_goes_on_without_a_way_back() -> None:
    world = stable()
    world.way_back = "lost"
    world.retuned(15).until("Paused")
    world.ask("resume").until("Stable")
    assert world.status["history"][-1]["result"] == "promoted"
    assert not world.kept


def test_who_aborts_keeps_what_serves() -> None:
    world = stable()
    good = world.status["revision"]
    world.way_back = "lost"
    world.retuned(15).until("Paused")
    world.ask("abort").until("RolledBack")
    assert world.status["stable"]["revision"] == good


def test_a_retry_asks_anew() -> None:
    world = stable()
    world.way_back = "lost"
    world.retuned(15).until("Paused")
    world.ask("abort").until("RolledBack")
    world.ask("retry").until("Paused")
    world.way_back = "there"
    world.ask("resume").until("Stable")


def test_a_registry_that_is_away_is_waited_for_until_the_deadline() -> None:
    world = stable()
    world.way_back = "away"
    world.retuned(15).until("Starting")
    for _ in range(5):
        world.tick()
    assert canaries(world) == []
    progressing = next(c for c in world.status["conditions"] if c["type"] == "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "RegistryUnreachable")
    world.way_back = "there"
    world.until("Stable")
    world.way_back = "away"
    world.retuned(31).until("RolledBack", seconds=60)
    assert "no progress for 20m: the image to go back to cannot be looked for" in world.status["message"]


def test_a_canary_that_runs_is_not_stopped_by_a_registry_that_goes_away() -> None:
    world = stable().retuned(15).until("Analyzing")
    world.way_back = "lost"
    world.until("Stable")
