"""Analyses that end without a verdict, and people who decide instead: what happens, and who is said to have done it."""

from __future__ import annotations

from typing import Any

import pytest

from unit.world import World, stable

pytestmark = pytest.mark.unit


def undecided(**analysis: Any) -> World:
    """A second revision whose analysis never decides."""
    world = stable(canary={"analysis": {"deadline": "10m", **analysis}})
    world.verdict = lambda revision: ("notYet", "3 usable pairs of at least 10")
    return world.retuned(15).until("Analyzing")


def entry(world: World) -> dict[str, Any]:
    return dict(world.status["history"][-1])


def said(world: World) -> list[tuple[str, str, str]]:
    return [(e["verb"], e["by"], e["text"]) for e in entry(world).get("log", [])]


def test_suna_3403_too_few_samples_pause_at_the_deadline_and_say_what_may_be_done() -> None:
    world = undecided().until("Paused")
    assert "no verdict within 10m: 3 usable pairs" in world.status["message"]
    assert "promote, resume or abort decides" in world.status["message"]
    assert said(world) == [
        ("hold", "operator", "analysis inconclusive, no verdict within 10m: 3 usable pairs of at least 10")
    ]
    for _ in range(20):
        world.tick(600)
    assert world.status["phase"] == "Paused"
    assert len(said(world)) == 1


def test_resume_gives_another_deadline_and_promote_ends_it() -> None:
    world = undecided().until("Paused")
    world.ask("resume").until("Analyzing")
    world.until("Paused")
    world.ask("promote", reason="measured by hand").until("Stable")
    done = entry(world)
    assert (done["result"], done["by"]) == ("promoted", "ann")
    assert done["reason"] == "step 2 (analysis) passed over by ann (measured by hand)"
    assert [verb for verb, _, _ in said(world)] == ["hold", "resume", "hold", "promote"]
    assert all(e["at"].endswith("Z") for e in done["log"])


def test_an_inconclusive_analysis_rolls_back_when_so_asked() -> None:
    world = undecided(onInconclusive="rollback").until("RolledBack")
    assert "analysis inconclusive, no verdict within 10m" in world.status["message"]
    assert entry(world)["result"] == "rolledBack"


def test_an_inconclusive_analysis_is_passed_over_for_the_stated_reason() -> None:
    world = undecided(onInconclusive="promote", onInconclusiveReason="a test cluster").until("Stable")
    done = entry(world)
    assert (done["result"], done["by"]) == ("promoted", "operator")
    assert "passed over because: a test cluster" in done["reason"]
    assert "every step passed" not in done["reason"]


def test_a_skipped_analysis_is_never_said_to_have_passed() -> None:
    world = undecided()
    world.ask("skip").tick()
    assert "skip refused: it needs a reason" in world.status["lastAction"]["result"]
    assert said(world) == []
    world.ask("skip", reason="hotfix").until("Stable")
    done = entry(world)
    assert (done["by"], done["reason"]) == ("ann", "step 2 (analysis) passed over by ann (hotfix)")
    condition = next(c for c in world.status["conditions"] if c["type"] == "Verdict")
    assert condition["status"] != "True"


def test_what_was_measured_is_kept_when_nobody_waits_for_the_verdict() -> None:
    for verb in ("skip", "abort"):
        world = undecided()
        world.tick()
        world.ask(verb, reason="enough").tick()
        assert world.revisions[world.status["revision"]].summary["acceptLength"] == 2.5


def test_pause_and_resume_are_recorded_with_who_and_when() -> None:
    world = undecided()
    world.ask("pause", reason="lunch").until("Paused")
    assert world.status["message"] == "paused by ann (lunch)"
    world.verdict = lambda revision: ("pass", "fine")
    for _ in range(20):
        world.tick(60)
    assert world.status["phase"] == "Paused"
    world.ask("resume").until("Stable")
    assert [(verb, by) for verb, by, _ in said(world)] == [("pause", "ann"), ("resume", "ann")]
    assert (entry(world)["by"], entry(world)["reason"]) == ("operator", "every step passed")


def test_time_paused_by_the_spec_counts_for_no_deadline() -> None:
    world = undecided()
    world.tick(500)
    world.edit(paused=True).until("Paused")
    assert world.status["message"] == "spec.paused is true"
    for _ in range(10):
        world.tick(600)
    world.edit(paused=False).until("Analyzing")
    world.tick(500)
    assert world.status["phase"] == "Analyzing"
    world.until("Paused")
    assert "no verdict within 10m" in world.status["message"]
    assert [(verb, by) for verb, by, _ in said(world)] == [("pause", "spec"), ("resume", "spec"), ("hold", "operator")]


def test_a_retry_forgets_what_was_passed_over_before() -> None:
    world = stable(canary={"steps": [{"analysis": {}}, {"analysis": {}}]})
    world.verdict = lambda revision: ("notYet", "3 pairs")
    world.retuned(15).until("Analyzing")
    world.ask("skip", reason="hotfix").tick()
    world.verdict = lambda revision: ("fail", "slower")
    world.until("RolledBack")
    world.verdict = lambda revision: ("pass", "fine")
    world.ask("retry").until("Stable")
    assert entry(world)["reason"] == "every step passed"
    assert [verb for verb, _, _ in said(world)] == ["skip", "retry"]


def test_the_log_stays_small() -> None:
    world = undecided()
    for _ in range(30):
        world.ask("pause", reason="x" * 400).until("Paused")
        world.ask("resume", reason="y" * 400).until("Analyzing")
    log = entry(world)["log"]
    assert len(log) == 8
    assert max(len(e["text"]) for e in log) <= 240
