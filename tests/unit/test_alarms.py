"""What the core makes of alerts, on a simulated cluster: one rollback at most, and never of a revert."""

from __future__ import annotations

import random

import pytest

from unit.world import World, first, stable

pytestmark = pytest.mark.unit


def settle(world: World, looks: int = 12) -> World:
    for _ in range(looks):
        world.tick()
    return world


def serves(world: World) -> str:
    assert world.selector is not None
    return world.selector["ddtree.dev/revision"]


def promoted(**more: object) -> tuple[World, str, str]:
    """A world whose second revision has just been promoted; the first one's hash and the second's."""
    world = stable(**more)
    old = world.status["revision"]
    world.retuned(15).until("Stable")
    return world, old, world.status["revision"]


def outcomes(world: World, revision: str) -> list[str]:
    return [x["outcome"] for x in world.revisions[revision].alarms]


def test_an_alert_about_a_promoted_revision_goes_back_to_the_one_before() -> None:
    world, old, new = promoted()
    settle(world.alert(new))
    assert serves(world) == old
    assert [s.action.revision for s in world.sets.values()] == [old]
    assert world.status["phase"] == "RolledBack"
    assert world.status["message"] == "alert AcceptLengthLow: 1.4 instead of 2.5"
    [row] = [h for h in world.status["history"] if h["revision"] == new]
    assert (row["result"], row["by"]) == ("rolledBack", "alert AcceptLengthLow")
    assert (row["cause"], row["wentBackTo"]) == ("alert", old)
    assert row["alert"]["name"] == "AcceptLengthLow"
    assert row["alert"]["labels"] == {"a": "b"}
    assert [e["verb"] for e in row["log"]] == ["alert"]
    assert not world.outages


def test_an_alert_about_a_canary_removes_it_in_one_look() -> None:
    world = stable(replicas=2)
    old = world.status["revision"]
    world.edit(canary={"steps": [{"analysis": {}}, {"weight": 50}, {"pause": {}}]}).retuned(15).until("Paused")
    assert world.status["weight"] == 50
    world.alert(world.status["revision"]).tick()
    assert serves(world) == old
    settle(world)
    assert world.status["phase"] == "RolledBack"
    assert world.status["weight"] == 0
    assert not world.outages


def test_repeats_and_news_about_a_revision_that_was_rolled_back_do_nothing() -> None:
    """The report of xdlc-agent#40: each repeat reverted the revert before it."""
    world, old, new = promoted()
    settle(world.alert(new, began=world.now - 1))
    writes, events = world.writes, len(world.events)
    for _ in range(5):
        settle(world.alert(new, began=world.alerts[0].starts_at))
    assert (world.writes, len(world.events)) == (writes, events)
    settle(world.alert(new, fingerprint="other"))
    assert serves(world) == old
    assert outcomes(world, new) == ["rolledBack", "ignored"]


def test_an_alert_never_reverts_a_revert() -> None:
    world = stable()
    for budget in (15, 31):
        world.retuned(budget).until("Stable")
    by_number = {r.number: r.hash for r in world.revisions.values()}
    settle(world.alert(by_number[3]))
    assert serves(world) == by_number[2]
    settle(world.alert(by_number[2]))  # the spec still asks for 3
    assert serves(world) == by_number[2]
    settle(world.retuned(15))  # and now for 2
    settle(world.alert(by_number[2], fingerprint="again"))
    assert serves(world) == by_number[2]
    assert world.status["phase"] == "Stable"
    assert outcomes(world, by_number[2]) == ["ignored", "ignored"]
    assert "never reverts a revert" in world.revisions[by_number[2]].alarms[-1]["note"]


def test_an_alert_about_an_older_revision_does_not_touch_the_newer_one() -> None:
    world, old, new = promoted()
    settle(world.alert(old))
    assert serves(world) == new
    world.retuned(31).until("Analyzing")
    canary = world.status["revision"]
    settle(world.alert(new, fingerprint="late"), 1)
    assert world.status["phase"] == "Analyzing"
    world.until("Stable")
    assert serves(world) == canary


def test_after_the_watch_an_alert_is_only_recorded() -> None:
    world, old, new = promoted(rollback={"watch": "10m"})
    world.now = world.revisions[new].at + 601
    settle(world.alert(new))
    assert serves(world) == new
    assert "more than rollback.watch (10m) ago" in world.revisions[new].alarms[0]["note"]
    assert [e.reason for e in world.events][-1] == "AlertIgnored"
    assert old in world.revisions


def test_an_alert_recorded_in_time_is_acted_on_by_an_operator_that_comes_back_later() -> None:
    world, old, new = promoted(rollback={"watch": "10m"})
    world.alert(new)
    world.now += 900
    assert serves(settle(world)) == old


def test_an_alert_that_waited_too_long_says_nothing_about_now() -> None:
    world, _, new = promoted(rollback={"watch": "24h"})
    world.alert(new)
    world.now += 3601
    assert serves(settle(world)) == new


def test_an_alert_from_before_the_attempt_is_not_about_it() -> None:
    world = stable()
    world.verdict = lambda revision: ("fail", "bad day")
    began = world.now
    world.retuned(15).until("RolledBack")
    world.now += 300
    world.verdict = lambda revision: ("pass", "fine")
    world.ask("retry").until("Analyzing")
    settle(world.alert(world.status["revision"], began=began), 1)
    world.until("Stable")


def test_a_retry_is_not_undone_by_the_alert_that_was_acted_on_but_by_a_new_one() -> None:
    world, old, new = promoted()
    settle(world.alert(new))
    world.ask("retry").until("Stable")
    assert serves(world) == new
    settle(world.alert(new, began=world.now, fingerprint="new"))
    assert serves(world) == old
    assert outcomes(world, new) == ["rolledBack", "rolledBack"]


@pytest.mark.parametrize(
    ("policy", "outcome", "words"),
    [
        ({"enabled": False}, "ignored", "spec.rollback.alerts.enabled is false"),
        ({"dryRun": True}, "dryRun", "would go back from revision 2"),
    ],
)
def test_off_and_dry_run_only_say_so(policy: dict[str, bool], outcome: str, words: str) -> None:
    world, _, new = promoted(rollback={"alerts": policy})
    settle(world.alert(new))
    assert serves(world) == new
    assert outcomes(world, new) == [outcome]
    assert words in world.revisions[new].alarms[0]["note"]
    writes = world.writes
    settle(world, 30)
    assert world.writes == writes


def test_dry_run_of_a_canary() -> None:
    world = stable(rollback={"alerts": {"dryRun": True}}).retuned(15).until("Analyzing")
    settle(world.alert(world.status["revision"]), 1)
    assert world.status["phase"] == "Analyzing"
    assert [e.reason for e in world.events if e.reason.startswith("Alert")] == ["AlertDryRun"]
    world.until("Stable")


def test_with_nothing_to_go_back_to_the_only_revision_stays() -> None:
    world = stable()
    only = world.status["revision"]
    settle(world.alert(only))
    assert serves(world) == only
    assert world.status["phase"] == "Stable"
    assert "no earlier promoted revision" in world.revisions[only].alarms[0]["note"]
    fresh = first().until("Analyzing")
    settle(fresh.alert(fresh.status["revision"]))
    assert fresh.status["phase"] == "RolledBack"  # a first canary has no traffic to lose


@pytest.mark.parametrize("crash_after", range(14))
def test_killed_after_any_write_of_a_rollback_by_alert(crash_after: int) -> None:
    world, old, new = promoted()
    settle(world)  # the old engines are gone by now and have to come back
    world.alert(new).tick(stop_after=crash_after)
    world.status = {}
    settle(world, 20)
    assert serves(world) == old
    assert [s.action.revision for s in world.sets.values()] == [old]
    assert outcomes(world, new) == ["rolledBack"]
    assert not world.outages
    spec = dict(world.spec, engine={"speculative": {"algorithm": "DFLASH"}})
    settle(world.edit(**spec))
    settle(world.alert(old, fingerprint="revert"))
    assert serves(world) == old  # wherever it was killed, it knows that it went back


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_notifications_rolls_back_once(seed: int) -> None:
    """Ten thousand in all: about every revision that ever was, repeated, reordered, with new starts."""
    rng = random.Random(seed)
    world, old, new = promoted()
    hashes = [*world.revisions, "0123456789"]
    for _ in range(25):
        for _ in range(20):
            revision = rng.choice(hashes)
            world.alert(revision, began=world.now - rng.choice([0, 5, 1e5]), fingerprint=f"{rng.randrange(4)}")
        rng.shuffle(world.alerts)
        world.tick()
    settle(world)
    assert serves(world) == old
    restored = [e for e in world.events if e.reason in {"RolledBack", "Restored"}]
    assert [e.reason for e in restored] == ["RolledBack", "Restored"]
    assert world.revisions[old].result == "promoted"
    assert not world.outages
    assert new in {b["revision"] for b in world.status["blocked"]}
