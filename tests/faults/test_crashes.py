"""The operator ended, or refused, at every single write of a promotion, a rollback, and a rollback by alert."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from ddtree_operator.alerts.notification import Alert
from ddtree_operator.alerts.receiver import StoreError
from faults.sim import NAME, NS, Crash, Sim, run

pytestmark = pytest.mark.faults

EVERY = int(os.environ.get("DDTREE_FAULTS_EVERY", "1"))  # of the writes that go wrong; 1: each of them

Story = Callable[[Sim], Any]


async def promotion(sim: Sim) -> None:
    """A first rollout, a second with shared traffic, and a quiet end."""
    await sim.until("Stable")
    first = sim.serves()
    steps = [{"weight": 0}, {"analysis": {}}, {"weight": 50}, {"pause": {"duration": "20s"}}, {"analysis": {}}]
    sim.edit(canary={"steps": steps})
    sim.retuned(15)
    await sim.until("Stable")
    for _ in range(100):  # a status made from an old look may have said Stable too early
        if sim.serves() not in {first, "both"}:
            break
        await sim.run(10)
    await sim.run(60)


async def rollback(sim: Sim) -> None:
    """A canary that fails its second analysis, at half of the traffic."""
    await sim.until("Stable")
    steps = [{"analysis": {}}, {"weight": 50}, {"pause": {"duration": "20s"}}, {"analysis": {}}]
    sim.edit(canary={"steps": steps})
    sim.retuned(15)
    bad = sim.resource["spec"]["engine"]["speculative"]
    assert bad["budget"] == 15
    sim.verdict = lambda revision: ("fail", "slower") if sim.serves() == "both" else ("pass", "fine")
    await sim.until("RolledBack")
    await sim.run(60)


async def alert(sim: Sim) -> None:
    """A promoted revision that an alert takes back, after its predecessor's engines are gone."""
    await promotion(sim)
    await tell(sim, sim.serves())
    await sim.until("RolledBack")
    await sim.run(90)


async def tell(sim: Sim, revision: str, fingerprint: str = "a") -> None:
    """A notification, sent again until it is answered, as Alertmanager does. The receiver's process may end, too."""
    labels = {"namespace": NS, "ddtreedeployment": NAME, "revision": revision}
    one = Alert(True, fingerprint, sim.now, "AcceptLengthLow", "1.4", labels)
    for _ in range(50):
        try:
            await sim.recorder.store((NS, NAME, revision), [one])
        except StoreError:
            sim.advance(1)
        except Crash:
            sim.crashes += 1
            sim.start()
        else:
            return
    raise AssertionError("never recorded")


STORIES: dict[str, Story] = {"promotion": promotion, "rollback": rollback, "alert": alert}


def told(story: Story, patch: pytest.MonkeyPatch, fault: Callable[[int], str | None] | None = None) -> Sim:
    sim = Sim(patch)
    if fault is not None:
        sim.server.fault = fault
    patch.setattr("ddtree_operator.handlers.alerting.PAUSES", (0.0,))
    run(story(sim))
    return sim


@pytest.fixture(params=sorted(STORIES))
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Story, Sim]:
    """A story, and how it goes without faults."""
    story = STORIES[request.param]
    sim = told(story, monkeypatch)
    assert not sim.outages
    return story, sim


def judge(sim: Sim, expected: Sim, where: str) -> None:
    """The same end, and nothing twice."""
    assert sim.end() == expected.end(), where
    assert not sim.outages, where
    running = [d["metadata"]["name"] for d in sim.of("deployments")]
    assert len(running) == len(set(running)) == 1, where


def test_the_stories_end_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {name: told(story, monkeypatch).end() for name, story in STORIES.items()}
    assert ends["promotion"]["phase"] == "Stable"
    assert [r for r, _ in ends["promotion"]["results"].values()] == ["promoted", "promoted"]
    assert ends["rollback"]["phase"] == "RolledBack"
    assert sorted(r for r, _ in ends["rollback"]["results"].values()) == ["promoted", "rolledBack"]
    assert sorted(by for _, by in ends["alert"]["results"].values()) == ["alert AcceptLengthLow", "operator"]
    assert sorted(ends["alert"]["alarms"].values()) == [[], ["rolledBack"]]


def test_ended_after_any_write_it_goes_on(plain: tuple[Story, Sim], monkeypatch: pytest.MonkeyPatch) -> None:
    story, expected = plain
    for number in range(1, expected.server.writes + 1, EVERY):
        with monkeypatch.context() as patch:
            sim = told(story, patch, lambda n, at=number: "crash" if n == at else None)  # type: ignore[misc]
            assert sim.crashes == 1
            judge(sim, expected, f"ended after write {number} of {expected.server.writes}")


@pytest.mark.parametrize("fault", ["409", "429", "500", "lost", "late"])
def test_refused_or_unanswered_at_any_write_it_goes_on(
    plain: tuple[Story, Sim], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, expected = plain
    for number in range(1, expected.server.writes + 1, EVERY):
        with monkeypatch.context() as patch:
            sim = told(story, patch, lambda n, at=number: fault if n == at else None)  # type: ignore[misc]
            judge(sim, expected, f"write {number} answered {fault}")


@pytest.mark.parametrize("seed", range(max(3, 20 // EVERY)))
def test_a_bad_day(plain: tuple[Story, Sim], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third write goes wrong in some way, ends of the process included, and looks lag up to 15 writes."""
    story, expected = plain
    rng = random.Random(seed)
    kinds = ["crash", "409", "429", "500", "lost", "late"]
    with monkeypatch.context() as patch:
        sim = Sim(patch)
        patch.setattr("ddtree_operator.handlers.alerting.PAUSES", (0.0,))
        sim.server.fault = lambda n: rng.choice(kinds) if rng.random() < 0.33 else None
        sim.server.stale = lambda: rng.randrange(15) if rng.random() < 0.2 else 0
        run(story(sim))
        sim.server.fault, sim.server.stale = (lambda n: None), (lambda: 0)
        run(sim.run(120))
    assert sim.end() == expected.end() | {"attempts": sim.end()["attempts"]}
    assert not sim.outages
