"""Rollouts from beginning to end, on a simulated cluster with a simulated clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddtree_operator.core.facts import PlacementFact, Problem, Revision
from unit.world import World, first, fit, stable

pytestmark = pytest.mark.unit


def revision_named(world: World, number: int) -> Any:
    return next(r for r in world.revisions.values() if r.number == number)


def test_a_first_rollout_is_held_against_its_own_baseline_and_serves() -> None:
    world = first()
    world.until("Analyzing")
    assert sorted(s.action.baseline for s in world.sets.values()) == [False, True]
    base = next(s.action for s in world.sets.values() if s.action.baseline)
    assert base.spec["engine"]["speculative"]["algorithm"] == "NONE"  # the canary itself is the chain
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == "none"  # no traffic before the verdict
    world.until("Stable")
    assert world.attested == [world.status["stable"]["image"]]
    assert len(world.sets) == 1
    assert world.status["stable"]["revision"] == world.status["revision"]
    assert world.status["history"][-1]["result"] == "promoted"


@pytest.mark.parametrize(
    ("algorithm", "drafter", "baseline"),
    [("NONE", None, "NONE"), ("NONE", "/d", "NONE"), ("NGRAM", None, "NONE"), ("DDTREE", "/d", "DFLASH")],
)
def test_a_baseline_is_one_that_can_run_and_be_held_against(algorithm: str, drafter: str | None, baseline: str) -> None:
    world = first(engine={"speculative": {"algorithm": algorithm}})
    world.edit(drafter={"path": drafter} if drafter else None).until("Analyzing")
    [base] = [s.action for s in world.sets.values() if s.action.baseline]
    assert base.spec["engine"]["speculative"]["algorithm"] == baseline


def test_a_better_revision_replaces_the_stable_one_without_a_gap() -> None:
    world = stable()
    old = world.status["revision"]
    world.retuned(15).until("Stable")
    assert world.status["revision"] != old
    assert not world.outages
    for _ in range(20):
        world.tick()
    assert [s.action.revision for s in world.sets.values()] == [world.status["revision"]]


def test_the_old_set_stays_until_it_has_drained() -> None:
    world = stable(traffic={"drain": "2m"}).retuned(15).until("Stable")
    assert len(world.sets) == 2
    world.now = world.switched_at + 119
    world.tick(0)
    assert len(world.sets) == 2
    world.now = world.switched_at + 121
    world.tick(0)
    assert len(world.sets) == 1


def test_a_failed_analysis_blocks_the_spec_and_leaves_stable_alone() -> None:
    world = stable()
    good = world.status["revision"]
    world.verdict = lambda revision: ("fail", "accept length 1.02 against 2.11")
    world.retuned(15).until("RolledBack")
    bad = world.status["revision"]
    for _ in range(5):
        world.tick()
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == good
    assert [s.action.revision for s in world.sets.values()] == [good]
    assert "1.02 against 2.11" in world.status["message"]
    assert [b["revision"] for b in world.status["blocked"]] == [bad]
    writes = world.writes
    for _ in range(100):
        world.tick(60)
    assert world.writes == writes  # nothing more is tried, and nothing is written
    assert not world.outages


def test_retry_lifts_the_block() -> None:
    world = stable()
    world.verdict = lambda revision: ("fail", "bad day")
    world.retuned(15).until("RolledBack")
    world.verdict = lambda revision: ("pass", "fine")
    world.ask("retry").until("Stable")
    assert "blocked" not in world.status
    assert world.status["stable"]["revision"] == world.status["revision"]


def test_a_new_spec_lifts_the_block_too() -> None:
    world = stable()
    world.verdict = lambda revision: ("fail", "bad")
    world.retuned(15).until("RolledBack")
    world.verdict = lambda revision: ("pass", "fine")
    world.retuned(31).until("Stable")


def test_a_refusing_engine_is_rolled_back_in_its_own_words() -> None:
    world = stable().retuned(15)
    world.tick()
    name = f"m-{world.status['revision']}"
    world.crash[name] = "noise\nddtree: refused: the tree mask is not applied (node 3 differs)\nkilled"
    world.until("RolledBack")
    assert (
        "the canary engine refused to serve: the tree mask is not applied (node 3 differs)" in world.status["message"]
    )
    for _ in range(5):
        world.tick()
    verdict = next(c for c in world.status["conditions"] if c["type"] == "Verdict")
    assert (verdict["status"], verdict["reason"]) == ("False", "RolledBack")
    assert "node 3 differs" in verdict["message"]


def test_a_crash_loop_is_rolled_back_with_the_engines_error_line() -> None:
    world = stable().retuned(15)
    world.tick()
    world.crash[f"m-{world.status['revision']}"] = (
        "Traceback\nOSError: /models/nope is not a folder\nresource_tracker: x"
    )
    world.until("RolledBack")
    assert "OSError: /models/nope is not a folder" in world.status["message"]


def test_a_failed_build_is_rolled_back_with_its_sentence() -> None:
    world = stable()
    world.build_error = "patch 0002-mask.patch does not apply: hunk 3 of sglang/x.py"
    world.retuned(15).until("RolledBack")
    assert "hunk 3" in world.status["message"]
    assert world.status["build"]["log"][0] == "#9 ERROR"
    assert len(world.sets) == 1
    world.tick()
    built = next(c for c in world.status["conditions"] if c["type"] == "Built")
    assert (built["status"], built["reason"]) == ("False", "BuildFailed")
    assert "hunk 3" in built["message"]


def test_too_few_samples_never_pass() -> None:
    world = stable()
    world.verdict = lambda revision: ("notYet", "4 usable pairs")
    world.retuned(15).until("Paused", seconds=60)
    assert "inconclusive" in world.status["message"]
    for _ in range(50):
        world.tick(600)
    assert world.status["phase"] == "Paused"


def test_no_fitting_node_is_reported_and_heals() -> None:
    world = stable()
    world.placement = PlacementFact(False, "no node fits: a has NVIDIA-A100", nodes=({"name": "a", "fits": False},))
    world.retuned(15).until("Placing")
    placed = next(c for c in world.status["conditions"] if c["type"] == "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "NoNodeFits")
    assert "NVIDIA-A100" in placed["message"]
    world.placement = fit()
    world.until("Stable")
    assert world.status["pinned"] == ["product=NVIDIA-H200"]


def test_a_quota_is_a_condition_and_one_event_and_heals() -> None:
    world = stable().retuned(15)
    world.tick()
    name = f"m-{world.status['revision']}"
    world.failure[name] = 'pods "m-x" is forbidden: exceeded quota: gpus'
    for _ in range(20):
        world.tick()
    progressing = next(c for c in world.status["conditions"] if c["type"] == "Progressing")
    assert (world.status["phase"], progressing["status"], progressing["reason"]) == (
        "Starting",
        "False",
        "QuotaExceeded",
    )
    assert "exceeded quota: gpus" in progressing["message"]
    assert [e.type for e in world.events if e.reason == "QuotaExceeded"] == ["Warning"]
    world.failure = {}
    world.until("Stable")


def test_a_foreign_service_is_left_alone() -> None:
    world = first()
    world.service_problem = "Service m exists and does not belong to this resource; rename one of them"
    world.problems = (Problem("ServiceTaken", world.service_problem),)
    world.tick()
    world.ask("abort").until("RolledBack")
    for _ in range(10):
        world.tick()
    assert world.selector is None


def test_what_time_alone_changes_is_looked_at_in_time() -> None:
    world = stable(traffic={"drain": "40s"}, rollback={"watch": "0s"})
    world.edit(canary={"steps": [{"analysis": {}}, {"pause": {"duration": "10m"}}]}).retuned(15).until("Paused")
    assert 0 < world.decide().wake <= 600.2
    world.tick(600)
    world.until("Stable", seconds=0.1)
    assert 0 < world.decide().wake <= 40.2
    world.tick(41)
    world.tick()
    assert len(world.sets) == 1
    assert world.decide().wake == math.inf


def test_the_progress_deadline_ends_a_rollout_that_cannot_start() -> None:
    world = stable(rollback={"progressDeadline": "5m"})
    world.placement = PlacementFact(False, "no node fits")
    world.retuned(15).until("RolledBack", seconds=30)
    assert "no progress for 5m" in world.status["message"]


def test_an_engine_that_goes_in_a_long_pause_has_the_whole_deadline_to_come_back() -> None:
    world = stable(rollback={"progressDeadline": "5m"})
    serving = next(iter(world.sets))
    world.edit(canary={"steps": [{"pause": {"duration": "2h"}}, {"analysis": {}}]}).retuned(15).until("Paused")
    world.tick(3600)
    canary = next(run for name, run in world.sets.items() if name != serving)
    canary.since = world.now + 240 - world.start_seconds  # its node went: ready again in four minutes
    world.tick(1)
    assert world.status["phase"] == "Starting"
    world.until("Paused", seconds=30)
    world.tick(600)
    canary.since = world.now + 3600
    gone = world.now
    world.tick(1)
    world.until("RolledBack", seconds=30)
    assert 300 < world.now - gone < 400
    assert "no progress for 5m" in world.status["message"]


def test_a_missing_reference_is_named_and_heals() -> None:
    world = stable()
    world.problems = (Problem("PromptsMissing", "ConfigMap prompts does not exist in namespace llm; create it"),)
    world.retuned(15).until("Pending")
    assert "ConfigMap prompts does not exist" in world.status["message"]
    world.problems = ()
    world.until("Stable")


def test_what_is_not_there_yet_starts_nothing() -> None:
    world = stable()
    writes = world.writes
    world.edit(traffic={"gateway": {"httpRoute": "r", "sessionHeader": "x"}}).until("Invalid")
    assert "sticky sessions are not available" in world.status["message"]
    assert world.writes == writes


def test_an_invalid_spec_changes_nothing_that_runs() -> None:
    world = stable()
    writes = world.writes
    world.edit(replica=3).until("Invalid")
    assert world.writes == writes
    assert world.status["message"].startswith("spec.replica: unknown field")
    assert world.status["stable"]
    world.edit(replicass=3).tick()
    world.tick()
    assert len([e for e in world.events if e.reason == "InvalidSpec"]) == 2  # one for each mistake


def test_abort_and_undo() -> None:
    world = stable()
    one = world.status["revision"]
    world.retuned(15).until("Analyzing")
    world.ask("abort", reason="wrong budget").until("RolledBack")
    assert "aborted by ann (wrong budget)" in world.status["message"]
    world.retuned(31).until("Stable")
    two = world.status["revision"]
    world.ask("undo").until("RolledBack")
    for _ in range(30):
        world.tick()
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == one
    assert [b["revision"] for b in world.status["blocked"]][-1] == two
    assert not world.outages


def test_undo_names_what_is_missing() -> None:
    world = stable().ask("undo")
    world.tick()
    assert "no earlier promoted revision" in world.status["lastAction"]["result"]


def test_a_request_is_acted_on_once() -> None:
    world = stable()
    world.retuned(15).until("Analyzing")
    world.ask("abort").until("RolledBack")
    request = world.request
    taken = world.status["lastAction"]["at"]
    assert taken == world.status["history"][-1]["log"][-1]["at"]
    world.ask("retry").until("Analyzing")
    assert world.status["lastAction"]["at"] > taken
    world.status = {}
    handled = world.writes
    world.tick()
    assert world.status["phase"] == "Analyzing"
    assert world.writes == handled
    assert request is not None


def test_a_request_is_not_forgotten_with_its_revision() -> None:
    world = stable(rollback={"keep": 1}).retuned(15).until("Stable")
    world.ask("undo").until("RolledBack")
    for budget in range(20, 26):
        world.retuned(budget).until("Stable")
    for _ in range(5):
        world.tick()
    assert world.status["phase"] == "Stable"
    assert world.status["stable"]["revision"] == world.status["revision"]
    assert not [e for e in world.events if e.reason == "RequestRefused"]
    assert len([e for e in world.events if e.reason == "RequestDone"]) == 1


def test_a_pause_waits_for_promote() -> None:
    world = stable().edit(canary={"steps": [{"analysis": {}}, {"pause": {}}]}).retuned(15).until("Paused")
    for _ in range(50):
        world.tick(600)
    assert world.status["phase"] == "Paused"
    world.ask("promote").until("Stable")


def test_weights_share_traffic_by_replicas_and_never_leave_a_gap() -> None:
    steps = [{"weight": 0}, {"analysis": {}}, {"weight": 50}, {"pause": {"duration": "1m"}}, {"analysis": {}}]
    world = stable(replicas=4, canary={"steps": steps}).retuned(15)
    seen = set()
    for _ in range(200):
        world.tick()
        assert world.selector is not None
        seen.add(world.selector.get("ddtree.dev/revision", "shared"))
        if world.status["phase"] == "Stable":
            break
    assert "shared" in seen
    assert not world.outages
    assert world.status["stable"]["revision"] == world.status["revision"]


def stable_engines_gone(deadline: str) -> tuple[World, str]:
    """A canary at half of the Service's traffic, whose stable set has no ready engine for four minutes, is aborted."""
    world = stable(replicas=2, rollback={"progressDeadline": deadline})
    good = world.status["revision"]
    steps = [{"analysis": {}}, {"weight": 50}, {"pause": {}}]
    world.edit(canary={"steps": steps}).retuned(15).until("Paused")
    world.sets[f"m-{good}"].since = world.now + 240 - world.start_seconds
    world.tick()
    world.ask("abort", reason="slow")
    world.tick(0)
    return world, good


def test_an_abort_leaves_the_service_shared_while_no_stable_engine_could_answer() -> None:
    world, good = stable_engines_gone("20m")
    assert world.status["phase"] == "Degraded"
    assert "stable: 0/2 engines ready; aborted by ann (slow)" in world.status["message"]
    for _ in range(45):
        world.tick()
        assert world.selector is not None
        assert "ddtree.dev/revision" not in world.selector
    for _ in range(10):
        world.tick()
    assert world.selector["ddtree.dev/revision"] == good
    assert [s.action.revision for s in world.sets.values()] == [good]
    assert not world.outages


def test_an_abort_is_at_weight_0_in_the_next_look() -> None:
    world = stable(replicas=2)
    good = world.status["revision"]
    world.edit(canary={"steps": [{"analysis": {}}, {"weight": 50}, {"pause": {}}]}).retuned(15).until("Paused")
    assert world.status["weight"] == 50
    world.ask("abort").tick(0)
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == good
    assert (world.status["phase"], world.status["weight"]) == ("RolledBack", 0)


def test_an_abort_ends_at_the_progress_deadline_at_the_latest() -> None:
    world, good = stable_engines_gone("2m")
    aborted = world.now
    while "ddtree.dev/revision" not in (world.selector or {}):
        world.tick()
        assert world.now < aborted + 140
    assert world.now > aborted + 120
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == good


def test_on_its_way_back_a_resource_says_what_it_waits_for() -> None:
    world = stable(replicas=2).retuned(15).until("Stable")
    for _ in range(30):
        world.tick()
    one = next(r.hash for r in world.revisions.values() if r.number == 1)
    world.failure[f"m-{one}"] = "exceeded quota: gpus"
    world.ask("undo", reason="slow at noon").until("Promoting")
    world.tick()
    assert world.status["message"].startswith("going back to revision 1: engines: 0/2 engines ready, exceeded quota")
    assert world.status["message"].endswith("undone by ann (slow at noon)")
    world.failure.clear()
    world.until("RolledBack")
    assert world.status["message"] == "undone by ann (slow at noon)"


def test_undo_goes_to_any_kept_revision() -> None:
    for to in (1, 2, 3):
        world = stable()
        for budget in (15, 31, 63):
            world.retuned(budget).until("Stable")
        wanted = revision_named(world, to)
        world.ask("undo", to=str(to) if to < 3 else wanted.hash).until("RolledBack")
        assert world.selector is not None
        assert world.selector["ddtree.dev/revision"] == wanted.hash
        assert not world.outages


def test_a_new_spec_in_the_middle_replaces_the_canary() -> None:
    world = stable().retuned(15).until("Analyzing")
    middle = world.status["revision"]
    world.retuned(31).until("Stable")
    assert revision_named(world, 2).result == "superseded"
    assert middle not in {s.action.revision for s in world.sets.values()}


def test_going_back_to_an_old_spec_is_quick_and_needs_no_analysis() -> None:
    world = stable()
    chain = dict(world.spec)
    world.retuned(15).until("Stable")
    analyses = len(world.analyses)
    world.edit(**chain).until("Stable")
    for _ in range(5):
        world.tick()
    assert world.selector is not None
    assert world.selector["ddtree.dev/revision"] == revision_named(world, 1).hash
    assert len(world.analyses) == analyses
    assert not world.outages


def test_wiped_status_and_restart_anywhere_reach_the_same_end() -> None:
    plain = stable().retuned(15).until("Stable")
    for crash_at in range(12):
        world = stable().retuned(15)
        world.tick(stop_after=crash_at)
        world.status = {}
        world.until("Stable")
        for _ in range(20):
            world.tick()
        assert not world.outages
        assert world.status["revision"] == plain.status["revision"]
        assert len(world.sets) == 1
        assert len(world.builds) <= 2  # one per revision: never started twice


def test_what_serves_is_kept_when_its_record_is_lost() -> None:
    world = stable()
    first_hash = revision_named(world, 1).hash
    world.verdict = lambda revision: ("fail", "slower")
    world.retuned(15).until("RolledBack")
    lost = world.revisions[first_hash]
    world.revisions[first_hash] = Revision(hash=lost.hash, number=lost.number, spec=lost.spec)
    world.status = {}
    for _ in range(30):
        world.tick()
    assert not world.outages
    assert [s.action.revision for s in world.sets.values()] == [first_hash]
    made_anew = world.revisions[first_hash]
    assert (made_anew.result, made_anew.image) == ("promoted", lost.image)
    assert world.status["stable"]["revision"] == first_hash
    assert "RecordLost" in {event.reason for event in world.events}


@pytest.mark.parametrize("crash_every", [0, 1, 2, 3])
def test_a_crash_after_every_write_still_rolls_back_clean(crash_every: int) -> None:
    world = stable()
    world.verdict = lambda revision: ("fail", "slower")
    world.retuned(15)
    for _ in range(400):
        world.tick(stop_after=crash_every)
        world.status = {}
    world.tick()
    assert world.status["phase"] == "RolledBack"
    assert len(world.sets) == 1
    assert not world.outages


def test_steady_state_writes_nothing() -> None:
    world = stable()
    for _ in range(10):
        world.tick()
    before, status = world.writes, world.status
    for _ in range(200):
        world.tick(30)
    assert (world.writes, world.status) == (before, status)
