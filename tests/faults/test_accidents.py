"""Silence of the watch, wiped status and annotations, objects deleted or edited by hand; and at rest, no write."""

from __future__ import annotations

import copy
import json
import random

import pytest

from ddtree_operator.api.names import ANNOTATION_ACTION
from faults.sim import NAME, NS, Sim, Watches, run
from faults.test_crashes import STORIES, promotion, tell

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("story", sorted(STORIES))
def test_with_a_watch_that_says_nothing_the_resync_does_it_all(story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Sim(monkeypatch)
    run(STORIES[story](heard))
    deaf = Sim(monkeypatch)
    look = deaf.look

    async def only_every_30_seconds() -> float:
        await look()
        return 30.0

    monkeypatch.setattr(deaf, "look", only_every_30_seconds)
    monkeypatch.setattr(deaf, "advance", lambda seconds: Sim.advance(deaf, 30.0 if seconds > 1 else seconds))
    run(STORIES[story](deaf))
    assert deaf.end() == heard.end()
    assert not deaf.outages


@pytest.mark.parametrize("story", sorted(STORIES))
def test_doubled_and_reordered_wakes_change_nothing(story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sim(monkeypatch)
    run(STORIES[story](plain))
    busy = Sim(monkeypatch)
    rng, look = random.Random(7), busy.look

    async def many() -> float:
        again = 0.0
        for _ in range(rng.randint(1, 4)):
            again = await look()
        return min(again, rng.choice([0.05, 1.0, 5.0]))

    monkeypatch.setattr(busy, "look", many)
    run(STORIES[story](busy))
    assert busy.end() == plain.end()
    assert not busy.outages


@pytest.mark.parametrize("story", sorted(STORIES))
@pytest.mark.parametrize("what", ["status", "annotations"])
def test_status_and_annotations_of_the_resource_wiped_all_the_time(
    story: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Sim(monkeypatch)
    run(STORIES[story](plain))
    wiped = Sim(monkeypatch)
    rng, look = random.Random(3), wiped.look

    async def wiping() -> float:
        again = await look()
        if rng.random() < 0.3:
            obj = copy.deepcopy(wiped.resource)
            obj.get("metadata" if what == "annotations" else "", obj).pop(what, None)
            wiped.server.put("ddtreedeployments", obj)
            again = min(again, 1.0)
            await look()  # what is shown comes back with the next look
        return again

    monkeypatch.setattr(wiped, "look", wiping)
    run(STORIES[story](wiped))
    run(wiped.run(30))
    assert wiped.end() == plain.end()
    assert not wiped.outages


def test_the_watch_after_promotion_keeps_what_it_has_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch, rollback={"alerts": {"enabled": False}})
    run(promotion(sim))
    run(sim.run(30))
    before = sim.watches.begun.copy()
    for i in range(5):  # alerts that come and go, and are not heeded
        run(tell(sim, sim.serves(), f"{i:x}"))
        run(sim.run(10))
    sim.ill = lambda pod: True  # no engine is ready for a while
    run(sim.run(60))
    sim.ill = lambda pod: False
    run(sim.run(30))
    assert [a["outcome"] for a in sim.revisions()[sim.serves()]["alarms"]] == ["ignored"] * 5
    assert sim.watches.begun == before
    run(sim.run(900))  # its next part has a test of its own
    assert len(sim.watches.begun) > len(before)


def test_a_mistake_in_the_spec_costs_nothing_of_what_was_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    run(promotion(sim))
    run(sim.run(30))
    begun, right = sim.watches.begun.copy(), sim.resource["spec"]["replicas"]
    sim.edit(replicas="many")
    run(sim.until("Invalid"))
    run(sim.run(30))
    sim.edit(replicas=right)
    run(sim.until("Stable"))
    run(sim.run(30))
    assert sim.watches.begun == begun


def test_a_promotion_that_nobody_watches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    monkeypatch.setattr(Watches, "begin", lambda self, key, watch, *_: self._epochs.update({key: watch.epoch}) or 0)
    run(promotion(sim))
    run(sim.run(30))
    [told] = [e["message"] for e in sim.server.events if e["reason"] == "NotWatched" and sim.serves() in e["message"]]
    assert "not on record" in told


def command(sim: Sim, verb: str) -> None:
    """A person's, as ddtreectl writes it."""
    obj = copy.deepcopy(sim.resource)
    obj["metadata"]["annotations"][ANNOTATION_ACTION] = json.dumps({"id": verb, "verb": verb, "by": "ann"})
    sim.server.put("ddtreedeployments", obj)


def test_what_changes_nothing_about_a_rollout_does_not_stop_its_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch, rollback={"alerts": {"dryRun": True}})
    run(sim.until("Stable"))
    sim.retuned(15)
    run(sim.until("Analyzing"))
    canary = sim.status["revision"]
    before = sim.analyses.rested
    for i in range(3):  # alerts that come and go
        run(tell(sim, canary, f"{i:x}"))
        run(sim.run(5))
    command(sim, "retry")  # and a command that is refused
    run(sim.run(5))
    assert sim.status["phase"] == "Analyzing"
    assert [a["outcome"] for a in sim.revisions()[canary]["alarms"]] == ["dryRun"] * 3
    assert sim.analyses.rested == before
    command(sim, "pause")
    run(sim.look())
    assert sim.analyses.rested > before


def test_a_mistake_in_the_spec_stops_neither_an_abort_nor_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    run(promotion(sim))
    serving = sim.serves()
    sim.edit(canary={"steps": [{"weight": 50}, {"pause": {}}, {"analysis": {}}]})
    sim.retuned(31)
    run(sim.until("Paused"))
    canary = sim.status["revision"]
    sim.edit(engine={"speculative": {"algorithm": "DDTREE", "budget": "wide"}}, canary={"steps": []})
    run(sim.until("Invalid"))
    run(sim.run(30))
    assert (sim.serves(), sim.sets()) == ("both", {serving, canary})
    command(sim, "abort")
    run(sim.run(60))
    assert (sim.serves(), sim.sets()) == (serving, {serving})
    sim.edit(canary={})
    sim.retuned(15)  # what serves
    run(sim.until("Stable"))
    sim.edit(rollback={"watch": "ever"})
    run(sim.until("Invalid"))
    run(tell(sim, serving))
    run(sim.run(90))
    earlier = sim.serves()
    assert earlier not in {serving, canary}
    assert sim.sets() == {earlier}  # its engines were gone, and are made from the settings that held last
    assert sim.status["phase"] == "Invalid"
    assert not sim.outages
    writes = sim.server.writes
    run(sim.run(300))
    assert sim.server.writes == writes


@pytest.mark.parametrize("end", ["abort", "a new spec"])
def test_an_ended_canary_answers_alone_until_the_deadline(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch, rollback={"progressDeadline": "60s"})
    run(sim.until("Stable"))
    before = sim.serves()
    sim.edit(canary={"steps": [{"weight": 50}, {"pause": {}}, {"analysis": {}}]})
    sim.retuned(15)
    run(sim.until("Paused"))
    sim.ill = lambda pod: before in pod
    sim.kubelet()
    if end == "abort":
        command(sim, "abort")
    else:
        sim.retuned(16)
    run(sim.run(55))
    assert sim.serves() == "both"
    assert not sim.outages
    looks, look = 0, sim.look

    async def counted() -> float:
        nonlocal looks
        looks += 1
        return await look()

    monkeypatch.setattr(sim, "look", counted)
    run(sim.run(100))
    assert sim.serves() == before
    assert looks < 100  # and it is not refused again and again
    run(sim.until("Degraded"))
    assert "stable: 0/2 engines ready" in sim.status["message"]
    sim.ill = lambda pod: False
    sim.kubelet()
    run(sim.until("RolledBack"))


def test_at_rest_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for story in STORIES.values():
        sim = Sim(monkeypatch)
        run(story(sim))
        writes, version, events = sim.server.writes, sim.server.version, len(sim.server.events)
        run(sim.run(600))
        assert (sim.server.writes, sim.server.version) == (writes, version)
        assert len(sim.server.events) == events
        sim.start()  # and neither does a new process, or the other replica
        run(sim.run(600))
        assert (sim.server.writes, len(sim.server.events)) == (writes, events)


@pytest.mark.parametrize("plural", ["deployments", "services", "controllerrevisions"])
def test_children_deleted_by_hand_come_back(plural: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    run(promotion(sim))
    serving, before = sim.serves(), len(sim.of("services"))
    for obj in sim.of(plural):
        sim.server.remove((plural, NS, obj["metadata"]["name"]))
    sim.kubelet()
    run(sim.until("Stable"))
    run(sim.run(120))
    assert sim.serves() == serving
    assert sim.sets() == {serving}
    assert len(sim.of("services")) == before
    assert sim.status["readyReplicas"] == 2


def test_what_somebody_edits_by_hand_is_put_right(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    run(promotion(sim))
    serving = sim.serves()
    [deployment] = copy.deepcopy(sim.of("deployments"))
    deployment["spec"]["replicas"] = 0
    sim.server.put("deployments", deployment)
    service = copy.deepcopy(sim.server.objects["services", NS, NAME])
    service["spec"]["selector"] = {"app": "elsewhere"}
    sim.server.put("services", service)
    run(sim.until("Stable"))
    run(sim.run(30))
    assert sim.serves() == serving
    assert sim.status["readyReplicas"] == 2


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"result": 5}', '{"progress": {"x": 1}}', '{"future": {}}'])
def test_the_memory_of_a_revision_wiped_or_damaged(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves goes on serving; the spec that is asked for ends up where it was."""
    sim = Sim(monkeypatch)
    run(promotion(sim))
    serving = sim.serves()
    for record in copy.deepcopy(sim.of("controllerrevisions")):
        notes = record["metadata"]["annotations"]
        notes.pop("ddtree.dev/state")
        record["metadata"]["annotations"] = notes if text is None else notes | {"ddtree.dev/state": text}
        sim.server.put("controllerrevisions", record)
    run(sim.until("Stable"))
    run(sim.run(60))
    assert sim.serves() == serving
    assert sim.sets() == {serving}
    assert not sim.outages
    assert sim.revisions()[serving]["result"] == "promoted"


def test_a_newer_operators_memory_is_read_as_far_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    run(STORIES["rollback"](sim))
    before = sim.end()
    for record in copy.deepcopy(sim.of("controllerrevisions")):
        notes = record["metadata"]["annotations"]
        state = json.loads(notes["ddtree.dev/state"]) | {"invented": {"later": 1}}
        state["progress"] = state["progress"] | {"novel": 2}
        notes["ddtree.dev/state"] = json.dumps(state)
        sim.server.put("controllerrevisions", record)
    writes = sim.server.writes
    run(sim.run(120))
    assert sim.end() == before
    assert sim.server.writes == writes
