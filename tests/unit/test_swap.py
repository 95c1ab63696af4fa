"""placement.strategy swap: the canary takes the GPU of a serving engine, and gives it back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unit.world import World, first

pytestmark = pytest.mark.unit

SWAP = {"strategy": "swap"}


def full(replicas: int = 3, gpus: int | None = None, placement: dict[str, Any] | None = None, **more: Any) -> World:
    """A revision that serves with every GPU (``gpus``, else one for each engine) in its hands."""
    world = first(replicas=replicas, placement=placement or SWAP, **more)
    world.gpus = max(2, replicas)  # a first rollout has a baseline beside it
    world.until("Stable")
    for _ in range(20):
        world.tick()
    world.gpus = gpus or replicas
    assert serving(world) == replicas
    world.fewest = None
    return world


def size(world: World, revision: str) -> int:
    return sum(s.replicas for s in world.sets.values() if s.action.revision == revision and not s.action.baseline)


def serving(world: World) -> int:
    return len([p for s in world.sets.values() for p in s.pods if p.at is not None and p.leaves is None])


def placed(world: World) -> tuple[str, str, str]:
    found = next(c for c in world.status["conditions"] if c["type"] == "Placed")
    return found["status"], found["reason"], found["message"]


def test_one_serving_engine_makes_room_and_a_rollback_gives_it_back() -> None:
    world = full()
    good = world.status["revision"]
    world.verdict = lambda revision: ("fail", "slower")
    world.retuned(15).until("Placing")
    assert (size(world, good), len(world.sets)) == (2, 1)  # no canary before its GPU is free
    assert placed(world)[:2] == ("True", "Swapped")
    world.until("Analyzing")
    bad = world.status["revision"]
    assert (size(world, good), size(world, bad)) == (2, 1)
    assert placed(world)[2] == "no GPU is free: 1 of 3 serving engines gave way to the canary"
    world.until("RolledBack")
    for _ in range(20):
        world.tick()
    assert (size(world, good), serving(world)) == (3, 3)
    assert world.fewest == 2
    assert not world.outages


def test_promotion_goes_engine_by_engine_and_the_last_one_leaves_after_the_switch() -> None:
    world = full()
    old = world.status["revision"]
    world.retuned(15).until("Promoting")
    while world.status["phase"] != "Stable":
        world.tick(1)
        assert size(world, old) + size(world, world.status["revision"]) <= 4
    for _ in range(30):
        world.tick()
    assert size(world, old) == 0
    assert (size(world, world.status["revision"]), serving(world)) == (3, 3)
    assert world.fewest == 2  # never more than one engine short
    assert not world.outages


def test_the_last_serving_engine_is_never_given_up() -> None:
    world = full(replicas=1)
    good = world.status["revision"]
    world.retuned(15).until("Placing")
    status, reason, message = placed(world)
    assert (status, reason) == ("False", "GPUsMissing")
    assert message == "1 GPU is missing; swap never gives up the last serving engine"
    for _ in range(50):
        world.tick()
        assert size(world, good) == 1
    world.until("RolledBack", seconds=60)
    assert world.fewest == 1


def test_surge_says_how_many_gpus_are_missing_and_what_swap_would_do() -> None:
    world = full(placement={"strategy": "surge"})
    good = world.status["revision"]
    world.retuned(15).until("Placing")
    assert placed(world) == (
        "False",
        "GPUsMissing",
        "1 GPU is missing; placement.strategy swap takes a serving engine's",
    )
    assert size(world, good) == 3
    world.gpus = 6
    world.until("Stable")


def test_with_free_gpus_swap_is_surge() -> None:
    world = full(gpus=6)
    old = world.status["revision"]
    world.retuned(15).until("Analyzing")
    assert size(world, old) == 3
    world.until("Stable")
    assert world.fewest == 3


def test_a_gpu_that_becomes_free_goes_back_to_the_serving_set_while_the_canary_is_judged() -> None:
    world = full()
    old = world.status["revision"]
    world.analysis_seconds = 100_000
    world.retuned(15).until("Analyzing")
    assert size(world, old) == 2
    world.gpus = 4
    world.tick()
    assert size(world, old) == 3


def test_a_freed_gpu_that_somebody_else_takes_costs_no_second_engine() -> None:
    world = full()
    good = world.status["revision"]
    world.retuned(15).until("Placing")
    for _ in range(30):
        world.gpus = 2  # gone as soon as the engine has left
        world.tick()
        assert size(world, good) == 2
    world.until("RolledBack", seconds=60)
    world.gpus = 3
    for _ in range(20):
        world.tick()
    assert serving(world) == 3


def test_weights_shift_gpus_one_by_one() -> None:
    steps: list[dict[str, Any]] = [{"weight": 0}, {"analysis": {}}, {"weight": 50}, {"analysis": {}}]
    world = full(replicas=4, canary={"steps": steps})
    old = world.status["revision"]
    world.retuned(15)
    seen = set()
    while world.status.get("phase") != "Stable" or world.status["stable"]["revision"] == old:
        world.tick(1)
        seen.add((size(world, old), size(world, world.status["revision"])))
    assert (2, 2) in seen  # half and half, as asked
    assert world.fewest == 3
    assert not world.outages


def test_a_canary_of_two_gets_one_gpu_while_it_has_no_traffic() -> None:
    world = full(canary={"replicas": 2})
    old = world.status["revision"]
    world.retuned(15).until("Analyzing")
    assert (size(world, old), size(world, world.status["revision"])) == (2, 1)


def test_a_dedicated_baseline_takes_one_more() -> None:
    world = full(replicas=4, baseline={"from": "spec"})
    old = world.status["revision"]
    world.retuned(15).until("Analyzing")
    assert size(world, old) == 2
    assert len(world.sets) == 3
    world.until("Stable")
    assert not world.outages


@pytest.mark.parametrize("seed", range(40))
def test_crashes_after_any_write_and_wiped_status_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = full(replicas=rng.choice([2, 3, 4]))
    old = world.status["revision"]
    bad = rng.random() < 0.5
    world.verdict = lambda revision: ("fail", "slower") if bad else ("pass", "fine")
    world.retuned(15)
    for _ in range(400):
        world.tick(rng.choice([1, 3, 7]), stop_after=rng.choice([None, 0, 1, 2]))
        if rng.random() < 0.1:
            world.status = {}
    for _ in range(30):
        world.tick()
    assert world.status["phase"] == ("RolledBack" if bad else "Stable")
    expected = old if bad else world.status["revision"]
    assert [s.action.revision for s in world.sets.values()] == [expected]
    assert serving(world) == size(world, expected) == world.spec["replicas"]
    assert world.fewest is not None
    assert world.fewest >= max(1, world.spec["replicas"] - 1)
    assert not world.outages
