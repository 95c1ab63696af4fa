"""Five hundred histories of edits, commands and accidents, each back to a good spec: healthy, and nothing stuck."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unit.world import World, first

pytestmark = pytest.mark.faults

SEQUENCES = 500
GOOD: dict[str, Any] = {
    "model": {"path": "/m"},
    "drafter": {"path": "/d"},
    "engine": {"speculative": {"algorithm": "DDTREE", "budget": 63}},
    "replicas": 2,
}


def mutation(rng: random.Random) -> dict[str, Any]:
    """One field or two of a spec, good or bad."""
    choices: list[Any] = [
        ("replicas", rng.choice([0, 1, 2, 5, -1, "two", None])),
        ("paused", rng.choice([True, False, "yes"])),
        ("drafter", rng.choice([{"path": "/d"}, {"path": "/e"}, None, {}])),
        ("model", rng.choice([{"path": "/m"}, {"path": "/n", "revision": "1"}, {"path": ""}])),
        ("engine", {"speculative": {"algorithm": rng.choice(["DDTREE", "DFLASH", "NONE", "NGRAM", "FASTER"])}}),
        ("engine", {"speculative": {"algorithm": "DDTREE", "budget": rng.choice([1, 15, 255, 256, 0])}}),
        ("engine", {"image": rng.choice(["r/i@sha256:" + "a" * 64, "r/i:latest"])}),
        ("engine", {"args": rng.choice([["--tp", "2"], ["--mem-fraction-static", "0.8"], "x"])}),
        ("baseline", rng.choice([{"from": "spec"}, {"from": "stable"}, {"from": "nowhere"}])),
        ("canary", {"steps": rng.choice([[], [{"weight": 50}, {"analysis": {}}], [{"analysis": {}}, {"pause": {}}]])}),
        (
            "canary",
            {"steps": [{"weight": rng.choice([0, 20, 100])}, {"analysis": {}}, {"weight": 50}, {"analysis": {}}]},
        ),
        ("canary", {"replicas": rng.choice([1, 3]), "analysis": {"onInconclusive": rng.choice(["pause", "rollback"])}}),
        ("rollback", {"keep": rng.choice([1, 2, 5]), "watch": rng.choice(["0s", "10m", "soon"])}),
        ("rollback", {"alerts": {"enabled": rng.random() < 0.5, "dryRun": rng.random() < 0.5}, "onDrop": "alert"}),
        ("traffic", rng.choice([{"drain": "1m"}, {"gateway": {"httpRoute": "r"}}, {"drain": -1}])),
        ("unknown", 1),
    ]
    key, value = rng.choice(choices)
    return {key: value}


def accident(world: World, rng: random.Random) -> None:
    """Something that people, alerts, or the cluster do meanwhile."""
    revisions = list(world.revisions)
    match rng.randrange(9):
        case 0:
            world.ask(rng.choice(["promote", "abort", "retry", "undo", "pause", "resume", "skip"]), reason="r")
        case 1 if revisions:
            world.alert(rng.choice(revisions), fingerprint=str(rng.randrange(3)))
        case 2 if revisions:
            world.fell = {rng.choice(revisions): "worse"}
        case 3:
            world.status = {}
        case 4 if revisions:  # the state annotation of a revision is wiped
            hash_ = rng.choice(revisions)
            old = world.revisions[hash_]
            world.revisions[hash_] = type(old)(hash=old.hash, number=old.number, spec=old.spec)
        case 5:
            verdict = rng.choice([("pass", "fine"), ("fail", "slower"), ("notYet", "3 pairs")])
            world.verdict = lambda revision: verdict
        case 6:
            world.build_error = rng.choice(["", "patch does not apply"])
        case 7 if world.sets and len(world.sets) > 1:  # somebody deletes a Deployment that no traffic reaches
            selected = (world.selector or {}).get("ddtree.dev/revision")
            idle = [n for n, s in world.sets.items() if s.action.baseline or s.action.revision != selected]
            if selected and idle:
                world.sets.pop(rng.choice(idle))
        case _:
            world.tick(0, stop_after=rng.randrange(4))


def history(seed: int) -> World:
    """A world after some edits and accidents."""
    rng = random.Random(seed)
    world = first(replicas=2)
    for _ in range(rng.randint(2, 7)):
        changes = mutation(rng)
        spec = {**world.spec, **changes}
        world.spec = {k: v for k, v in spec.items() if v is not None}
        world.generation += 1
        for _ in range(rng.randint(1, 12)):
            world.tick(rng.choice([1, 5, 30, 600]))
            if rng.random() < 0.3:
                accident(world, rng)
    return world


@pytest.mark.parametrize("block", range(10))
def test_after_any_history_a_good_spec_ends_well(block: int) -> None:
    for seed in range(block * SEQUENCES // 10, (block + 1) * SEQUENCES // 10):
        world = history(seed)
        world.verdict, world.build_error, world.fell = (lambda revision: ("pass", "fine")), "", {}
        world.outages.clear()
        world.spec, world.generation = dict(GOOD), world.generation + 1
        for _ in range(60):
            world.tick(30)
            if (
                world.status.get("phase") in {"RolledBack", "Paused"}
                and world.status["observedGeneration"] == world.generation
            ):
                # tried before, and blocked or held then: that is what it says, and how one goes on
                assert world.status["message"], seed
                world.ask("retry" if world.status["phase"] == "RolledBack" else "promote", reason="fixed")
            if world.status.get("phase") == "Stable" and world.status["observedGeneration"] == world.generation:
                break
        assert world.status["phase"] == "Stable", f"seed {seed}: {world.status['phase']}: {world.status['message']}"
        for _ in range(40):
            world.tick(30)
        assert world.status["readyReplicas"] == 2, seed
        assert world.selector is not None
        assert world.selector["ddtree.dev/revision"] == world.status["revision"], seed
        assert [s.action.revision for s in world.sets.values()] == [world.status["revision"]], seed
        assert not world.outages, f"seed {seed}: {world.outages}"
        writes = world.writes
        for _ in range(20):
            world.tick(30)
        assert world.writes == writes, f"seed {seed}: still writing at rest"
