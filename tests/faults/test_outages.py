"""What lasts: a namespace that is going, a CRD from before, an API server away in a canary. How long until all is well
is in docs/failure-modes.md; the time here is the simulated one."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_operator.handlers import act
from ddtree_operator.probe.engine import EngineInfo
from faults.server import Answer, Object
from faults.sim import NAME, NS, Sim, run
from faults.test_crashes import promotion

pytestmark = pytest.mark.faults

OF_OLD = {"phase", "message", "observedGeneration", "revision", "conditions", "replicas", "readyReplicas", "history"}


def test_in_a_namespace_that_is_being_deleted_little_is_tried_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    call, tried = sim.server.call_api, []

    async def going(method: str, path: str, **more: Any) -> Answer:
        if method == "POST":
            tried.append(path)
            return Answer(
                403, {"message": f"unable to create new content in namespace {NS} because it is being terminated"}
            )
        return await call(method, path, **more)

    async def story() -> None:
        await promotion(sim)
        monkeypatch.setattr(sim.server, "call_api", going)
        sim.retuned(31)
        await sim.run(300)
        refused = [path for path in tried if not path.endswith("/events")]
        assert 0 < len(refused) <= 300  # by itself a look comes each second here; the queue waits up to 30 s
        assert sim.serves() != "none"  # what serves does so until the namespace controller takes it
        sim.server.remove(("ddtreedeployments", NS, NAME))
        tried.clear()
        writes = sim.server.writes
        await sim.run(300)
        assert not tried
        assert sim.server.writes == writes

    run(story())


def test_under_a_crd_that_does_not_know_most_of_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server drops what its CRD does not know, without a word."""
    plain = Sim(monkeypatch)
    run(promotion(plain))
    old = Sim(monkeypatch)
    put = old.server.put

    def pruned(plural: str, obj: Object) -> Object:
        if plural == "ddtreedeployments" and obj.get("status"):
            obj = {**obj, "status": {k: v for k, v in obj["status"].items() if k in OF_OLD}}
        return put(plural, obj)

    monkeypatch.setattr(old.server, "put", pruned)
    run(promotion(old))
    assert old.end() == plain.end()
    assert not old.outages
    version = old.server.version
    run(old.run(300))
    assert old.server.version == version  # what is written again and again changes nothing


@pytest.mark.parametrize("away", [30.0, 240.0])
def test_an_api_server_that_is_away_in_a_canary_costs_its_absence_and_one_look(
    away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(monkeypatch)
    call, gone = sim.server.call_api, [True]

    async def answer(method: str, path: str, **more: Any) -> Answer:
        if gone[0]:
            raise OSError("nobody answers")
        return await call(method, path, **more)

    async def story() -> None:
        gone[0] = False
        monkeypatch.setattr(sim.server, "call_api", answer)
        await sim.until("Stable")
        sim.edit(canary={"steps": [{"analysis": {}}, {"weight": 50}, {"pause": {"duration": "60s"}}]})
        sim.retuned(15)
        await sim.until("Paused")
        gone[0] = True
        await sim.run(away)
        gone[0] = False
        began = sim.now
        await sim.until("Stable")
        print(f"away for {away:.0f} s in a pause of 60 s: stable {sim.now - began:.0f} s after it was back")
        assert sim.now - began < max(0.0, 60 - away) + 60
        assert sim.serves() == sim.status["revision"]
        assert not sim.outages

    run(story())


@pytest.mark.parametrize(
    ("code", "plural", "method", "reason", "words"),
    [
        (403, "controllerrevisions", "POST", "Forbidden", "the operator may not create controllerrevisions: no right"),
        (422, "services", "PATCH", "Refused", "refuses what the operator would write (patch services): no right"),
        (409, "controllerrevisions", "PATCH", "Conflicts", "cannot patch controllerrevisions, since somebody else"),
    ],
)
def test_a_write_that_is_refused_again_and_again_is_told(
    code: int, plural: str, method: str, reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(monkeypatch)
    call, steps = sim.server.call_api, [{"weight": 50}, {"pause": {"duration": "20s"}}, {"analysis": {}}]

    async def refused(verb: str, path: str, **more: Any) -> Answer:
        if verb == method and f"/{plural}" in path:
            return Answer(code, {"message": "no right"})
        return await call(verb, path, **more)

    def written() -> Object | None:
        return next((c for c in sim.status["conditions"] if c["type"] == "Written"), None)

    async def story() -> None:
        await sim.until("Stable")
        stable = sim.serves()
        sim.edit(canary={"steps": steps})
        sim.retuned(15)
        with monkeypatch.context() as patch:
            patch.setattr(sim.server, "call_api", refused)
            await sim.run(60)
            found = written()
            assert found is not None
            assert (found["status"], found["reason"]) == ("False", reason)
            assert words in found["message"]
            assert sim.status["message"] == found["message"]
            assert "WriteRefused" in {e["reason"] for e in sim.server.events}
            assert sim.serves() == stable
            writes = sim.server.writes
            await sim.run(60)
            assert written() == found
            assert sim.server.writes == writes or code == 422  # what can be done meanwhile is
        await sim.until("Stable")
        await sim.run(60)
        assert written() is None
        assert sim.serves() not in {stable, "both"}
        assert not sim.outages

    run(story())


@pytest.mark.parametrize(
    ("silent", "tie_gap", "words"), [(2, 0.0, "2ulp of float32, which the canary"), (99, 0.25, "of bfloat16, assumed")]
)
def test_an_analysis_waits_a_while_for_engines_that_do_not_say_what_they_compute_in(
    silent: int, tie_gap: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(monkeypatch)
    answer, asked = act.Actor._info, 0

    async def info(*args: Any) -> EngineInfo | None:
        nonlocal asked
        asked += 1
        return await answer(*args) if asked > 2 * silent else None  # canary and baseline

    monkeypatch.setattr(act.Actor, "_info", info)

    async def story() -> None:
        await sim.until("Stable")

    run(story())
    assert sim.analyses.policy.tie_gap == tie_gap
    assert words in sim.analyses.policy.tie_gap_from
    assert asked >= 2 * min(silent + 1, act.INFO_TRIES)


def test_a_few_conflicts_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(monkeypatch)
    sim.server.fault = lambda number: "409" if number % 5 else None
    run(promotion(sim))
    assert "WriteRefused" not in {e["reason"] for e in sim.server.events}
