"""Traffic by an HTTPRoute, with the operator ended or refused at every single write, and with hands on the route."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from ddtree_operator.api.names import ANNOTATION_ACTION
from faults.server import Object
from faults.sim import NAME, NS, Sim, run

pytestmark = pytest.mark.faults

EVERY = int(os.environ.get("DDTREE_FAULTS_EVERY", "1"))
KEY = ("httproutes", NS, "r")
ROUTE: Object = {
    "parentRefs": [{"name": "gw"}],
    "hostnames": ["llm.example"],
    "rules": [
        {
            "matches": [{"path": {"type": "PathPrefix", "value": "/web"}}],
            "backendRefs": [{"name": "web", "port": 80, "weight": 1}],
        },
        {
            "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
            "filters": [
                {"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": "a", "value": "b"}]}}
            ],
            "backendRefs": [{"name": NAME, "port": 30000, "weight": 1}],
            "timeouts": {"request": "60s"},
        },
    ],
}
STEPS = [
    {"headerRoute": {}},
    {"analysis": {}},
    {"weight": 10},
    {"pause": {"duration": "20s"}},
    {"canaryReplicas": 2},
    {"weight": 50},
    {"pause": {"duration": "20s"}},
    {"analysis": {}},
]

Story = Callable[[Sim], Any]


def with_route(patch: pytest.MonkeyPatch) -> Sim:
    sim = Sim(patch)
    sim.server.put("httproutes", {"metadata": {"name": "r", "namespace": NS}, "spec": copy.deepcopy(ROUTE)})
    programmed = {"conditions": [{"type": "Programmed", "status": "True", "observedGeneration": 1}]}
    sim.server.put("gateways", {"metadata": {"name": "gw", "namespace": NS}, "spec": {}, "status": programmed})
    sim.edit(traffic={"drain": "10s", "gateway": {"httpRoute": "r"}})
    return sim


def live(sim: Sim) -> Object:
    found: Object = sim.server.objects[KEY]
    return found


def shares(sim: Sim) -> dict[str, int]:
    """Weights of our backends in the rule that the user wrote last."""
    refs = live(sim)["spec"]["rules"][-1]["backendRefs"]
    return {ref["name"]: ref["weight"] for ref in refs}


async def promote(sim: Sim) -> None:
    """A first rollout, then a canary through every kind of step."""
    await sim.until("Stable")
    sim.edit(canary={"steps": STEPS})
    sim.retuned(15)
    await sim.until("Stable")
    await sim.run(90)


async def abort(sim: Sim) -> None:
    """A canary that a person ends at 50%."""
    await sim.until("Stable")
    sim.edit(canary={"steps": [*STEPS[:6], {"pause": {}}]})
    sim.retuned(15)
    await until_share(sim, 50)
    ask_to_abort(sim)
    await sim.until("RolledBack")
    await sim.run(90)


def ask_to_abort(sim: Sim) -> None:
    obj = copy.deepcopy(sim.resource)
    ask = {"id": "one", "verb": "abort", "by": "ann"}
    obj["metadata"]["annotations"][ANNOTATION_ACTION] = json.dumps(ask)
    sim.server.put("ddtreedeployments", obj)


async def short(sim: Sim) -> None:
    """An abort while one of four stable engines is gone: three take what they can, and all of it when it is back."""
    sim.edit(replicas=4)
    await sim.until("Stable")
    serving = sim.serves()
    sim.edit(canary={"steps": [*STEPS[:6], {"pause": {}}]})
    sim.retuned(15)
    await until_share(sim, 50)
    sim.ill = lambda pod: serving in pod and pod.endswith("-3")
    sim.kubelet()
    await sim.look()
    ask_to_abort(sim)
    told = len(sim.server.events)
    for _ in range(100):
        if shares(sim) != {NAME: 50, f"{NAME}-canary": 50}:
            break
        again = await sim.look()
        sim.advance(max(0.05, min(again, 5.0)))
    if "WriteRefused" in {e["reason"] for e in sim.server.events[told:]}:  # a share that is refused is given back whole
        sim.ill = lambda pod: False
        await sim.until("RolledBack")
        await sim.run(90)
        return
    await sim.run(60)
    assert shares(sim) == {NAME: 75, f"{NAME}-canary": 25}, sim.status["message"]
    assert "the stable set has 3/4 engines: 25% stay with the canary; aborted by ann" in sim.status["message"]
    assert len(live(sim)["spec"]["rules"]) == len(ROUTE["rules"])  # testers left at once
    sim.ill = lambda pod: False
    sim.kubelet()
    await sim.until("RolledBack")
    await sim.run(90)


async def until_share(sim: Sim, weight: int, limit: float = 900.0) -> None:
    end = sim.now + limit
    while sim.status.get("phase") != "Paused" or shares(sim).get(f"{NAME}-canary") != weight:
        assert sim.now < end, (sim.status.get("message"), shares(sim))
        again = await sim.look()
        sim.advance(max(0.05, min(again, 5.0)))


STORIES: dict[str, Story] = {"promote": promote, "abort": abort, "short": short}


def told(story: Story, patch: pytest.MonkeyPatch, fault: Callable[[int], str | None] | None = None) -> Sim:
    sim = with_route(patch)
    if fault is not None:
        sim.server.fault = fault
    run(story(sim))
    return sim


def judge(sim: Sim, where: str = "") -> None:
    """The route as its owner wrote it, the canary's Service gone, nobody ever sent to a set without ready engines."""
    assert live(sim)["spec"] == ROUTE, where
    assert not live(sim)["metadata"].get("annotations"), where
    assert {s["metadata"]["name"] for s in sim.of("services")} == {NAME}, where
    assert not sim.outages, where
    assert len(sim.of("deployments")) == 1, where


@pytest.fixture(params=sorted(STORIES))
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Story, Sim]:
    story = STORIES[request.param]
    sim = told(story, monkeypatch)
    judge(sim)
    return story, sim


def test_the_steps_show_in_the_route_and_foreign_parts_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Object] = []
    sim = with_route(monkeypatch)
    watch = sim.server.watcher

    def note() -> None:
        watch()
        if not seen or seen[-1] != live(sim)["spec"]:
            seen.append(copy.deepcopy(live(sim)["spec"]))

    sim.server.watcher = note
    run(promote(sim))
    judge(sim)
    mains = [spec["rules"][-1] for spec in seen]
    splits = [tuple(ref["weight"] for ref in rule["backendRefs"]) for rule in mains]
    assert [s for i, s in enumerate(splits) if i == 0 or s != splits[i - 1]] == [
        (1,),
        (1, 0),
        (90, 10),
        (50, 50),
        (1, 0),
        (1,),
    ]
    for spec, rule in zip(seen, mains, strict=True):
        assert {k: v for k, v in spec.items() if k != "rules"} == {k: v for k, v in ROUTE.items() if k != "rules"}
        assert spec["rules"][-2] == ROUTE["rules"][0]
        assert {k: v for k, v in rule.items() if k != "backendRefs"} == {
            k: v for k, v in ROUTE["rules"][1].items() if k != "backendRefs"
        }
    [testers] = next(spec["rules"][:-2] for spec in seen if len(spec["rules"]) == 3)
    assert testers["matches"][0]["headers"] == [{"type": "Exact", "name": "x-ddtree-canary", "value": "true"}]
    assert testers["filters"] == ROUTE["rules"][1]["filters"]
    assert testers["backendRefs"] == [{"name": f"{NAME}-canary", "port": 30000, "weight": 1}]


def test_ended_after_any_write_it_goes_on(plain: tuple[Story, Sim], monkeypatch: pytest.MonkeyPatch) -> None:
    story, expected = plain
    for number in range(1, expected.server.writes + 1, EVERY):
        with monkeypatch.context() as patch:
            sim = told(story, patch, lambda n, at=number: "crash" if n == at else None)  # type: ignore[misc]
            judge(sim, f"ended after write {number} of {expected.server.writes}")
            assert sim.end() == expected.end(), number


@pytest.mark.parametrize("fault", ["409", "422", "500", "lost", "late"])
def test_refused_at_any_write_it_goes_on(plain: tuple[Story, Sim], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story, expected = plain
    for number in range(1, expected.server.writes + 1, EVERY):
        with monkeypatch.context() as patch:
            sim = told(story, patch, lambda n, at=number: fault if n == at else None)  # type: ignore[misc]
            judge(sim, f"write {number} answered {fault}")
            assert sim.end() == expected.end(), number


def test_a_storm_of_conflicts_is_outlasted(monkeypatch: pytest.MonkeyPatch) -> None:
    judge(told(promote, monkeypatch, lambda n: "409" if n % 5 else None))


def at_half(patch: pytest.MonkeyPatch) -> Sim:
    """A canary that stands at 50% and waits for a person."""
    sim = with_route(patch)

    async def go() -> None:
        await sim.until("Stable")
        sim.edit(canary={"steps": [*STEPS[:6], {"pause": {}}]})
        sim.retuned(15)
        await until_share(sim, 50)

    run(go())
    return sim


def test_an_edit_by_hand_is_healed_and_the_users_own_part_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = at_half(monkeypatch)
    edited = copy.deepcopy(ROUTE)
    edited["rules"][0]["backendRefs"][0]["port"] = 81
    edited["rules"][1]["backendRefs"][0]["weight"] = 7
    sim.server.put("httproutes", {**live(sim), "spec": copy.deepcopy(edited)})
    run(sim.run(120))
    assert shares(sim) == {NAME: 50, f"{NAME}-canary": 50}
    assert len(live(sim)["spec"]["rules"]) == 3
    sim.retuned(31)
    sim.edit(canary={"steps": [{"analysis": {}}]})
    run(sim.until("Stable"))
    run(sim.run(60))
    assert live(sim)["spec"] == edited
    assert not sim.outages


def test_a_deleted_route_is_reported_and_carries_on_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = at_half(monkeypatch)
    sim.server.remove(KEY)
    run(sim.run(120))
    assert "HTTPRoute r does not exist in namespace llm" in sim.status["message"]
    sim.server.put("httproutes", {"metadata": {"name": "r", "namespace": NS}, "spec": copy.deepcopy(ROUTE)})
    run(sim.run(120))
    assert shares(sim) == {NAME: 50, f"{NAME}-canary": 50}


def test_a_canarys_service_that_somebody_deletes_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = at_half(monkeypatch)
    sim.server.remove(("services", NS, f"{NAME}-canary"))
    run(sim.run(70))
    assert ("services", NS, f"{NAME}-canary") in sim.server.objects
    assert shares(sim) == {NAME: 50, f"{NAME}-canary": 50}


def test_a_new_spec_takes_the_route_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = at_half(monkeypatch)
    sim.edit(canary={"steps": [{"analysis": {}}, {"weight": 20}, {"pause": {}}]})
    sim.retuned(31)
    run(until_share(sim, 20))
    assert not sim.outages
    service = sim.server.objects["services", NS, f"{NAME}-canary"]
    assert service["spec"]["selector"]["ddtree.dev/revision"] == sim.status["revision"]


def test_a_canary_without_engines_gets_nothing_while_it_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its prompts are gone as well; a node that is lost stops a rollout in the same place."""
    sim = with_route(monkeypatch)
    run(sim.until("Stable"))
    lines = "".join(json.dumps({"id": f"p{i}", "text": "hello"}) + "\n" for i in range(20))
    prompts: Object = {"metadata": {"name": "prompts", "namespace": NS}, "data": {"prompts.jsonl": lines}}
    sim.server.put("configmaps", copy.deepcopy(prompts))
    analysis = {"prompts": {"configMapRef": "prompts"}}
    sim.edit(canary={"steps": [*STEPS[:6], {"pause": {}}], "analysis": analysis})
    sim.retuned(15)
    run(until_share(sim, 50))
    canary = sim.status["revision"]
    sim.server.remove(("configmaps", NS, "prompts"))
    sim.ill = lambda pod: canary in pod
    sim.kubelet()
    run(sim.run(5))
    assert sim.status["phase"] == "Pending"
    assert shares(sim).get(f"{NAME}-canary", 0) == 0
    sim.ill = lambda pod: False
    sim.server.put("configmaps", prompts)
    run(until_share(sim, 50))


def test_without_gateway_in_the_spec_the_route_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = at_half(monkeypatch)
    sim.edit(traffic={"drain": "10s"}, canary={"steps": [{"analysis": {}}]})
    run(sim.until("Stable"))
    run(sim.run(60))
    judge(sim)


def unaccepted(patch: pytest.MonkeyPatch) -> Sim:
    """A canary that is to have 10% of a route that no controller accepts any more."""
    sim = with_route(patch)
    run(sim.until("Stable"))
    sim.accepts = False
    sim.edit(canary={"steps": [{"weight": 10}, {"analysis": {}}]}, rollback={"progressDeadline": "5m"})
    sim.retuned(15)
    return sim


def test_a_route_that_nobody_accepts_holds_the_canary_until_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = unaccepted(monkeypatch)
    run(sim.run(120))
    assert "waiting for HTTPRoute r" in sim.status["message"]
    sim.accepts = True
    run(sim.until("Stable"))
    run(sim.run(60))
    judge(sim)


def test_a_route_that_nobody_ever_accepts_ends_the_canary_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = unaccepted(monkeypatch)
    serving = sim.serves()
    run(sim.until("RolledBack", limit=900))
    assert "no progress for 5m" in sim.status["message"]
    sim.accepts = True
    run(sim.run(120))
    assert sim.serves() == serving
    judge(sim)


def test_an_autoscaler_may_scale_at_any_moment_of_a_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """``replicas`` is its owner's: never written, no new revision, and the set that serves follows it alone."""
    sim = with_route(monkeypatch)
    run(sim.until("Stable"))
    first, wanted, sizes = sim.serves(), [2], []
    watch = sim.server.watcher

    def note() -> None:
        watch()
        serving = [d for d in sim.of("deployments") if d["metadata"]["labels"]["ddtree.dev/revision"] == sim.serves()]
        sizes.extend(d["spec"]["replicas"] for d in serving if d["spec"]["replicas"] < min(wanted[-2:]))
        assert sim.resource["spec"]["replicas"] == wanted[-1]

    sim.server.watcher = note
    sim.edit(canary={"steps": STEPS})
    sim.retuned(15)
    revision = ""
    for looks in range(400):
        if looks % 7 == 3:
            wanted.append([5, 3, 4, 2, 6][looks // 7 % 5])
            sim.edit(replicas=wanted[-1])
        run(sim.look())
        sim.advance(2.0)
        revision = revision or (sim.status["revision"] if sim.status["revision"] != first else "")
        assert sim.status["revision"] in {first, revision}
        if sim.serves() == revision:
            break
    assert sim.serves() == revision != first
    wanted.append(4)
    sim.edit(replicas=4)
    run(sim.until("Stable"))
    run(sim.run(90))
    assert len(wanted) > 5
    assert not sizes, "the serving set was smaller than anybody asked for"
    assert [d["spec"]["replicas"] for d in sim.of("deployments")] == [4]
    assert sim.status["readyReplicas"] == 4
    assert len(sim.revisions()) == 2
    judge(sim)


def test_at_rest_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = told(promote, monkeypatch)
    writes = sim.server.writes
    run(sim.run(600))
    assert sim.server.writes == writes
