"""An engine whose node does not answer: what is said of it, and that it says nothing of the engine's revision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from analysis_streams import pair
from ddtree_operator.analysis import Policy
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Sample
from ddtree_operator.analysis.watch import Watch, policy_for
from ddtree_operator.api.spec import AnalysisSpec, DDTreeSpec
from ddtree_operator.core import report
from ddtree_operator.core.actions import ApplyEngines, Emit
from ddtree_operator.core.facts import EngineSet, PodFact
from ddtree_operator.core.waiting import obstacle
from ddtree_operator.handlers import analyses, read, watches
from ddtree_operator.handlers.analyses import Analyses
from ddtree_operator.handlers.kube import ApiError
from ddtree_operator.handlers.observe import Observer
from ddtree_operator.handlers.watches import Watches
from ddtree_operator.probe.generate import generate
from ddtree_operator.probe.http import answers
from ddtree_operator.rollout import manifests

pytestmark = pytest.mark.unit

LOST = "node b does not answer, and counts as lost since 2026-01-01T00:00:00Z"
UNKNOWN = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}


# what is seen of it -------------------------------------------------------------------------------------------------


def pod(*, pod_ready: str = "False", engine_ready: bool = True, node: str = "b") -> dict[str, Any]:
    status = {
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": pod_ready}],
        "containerStatuses": [{"name": "engine", "ready": engine_ready, "restartCount": 3}],
    }
    return {"metadata": {"name": "p"}, "spec": {"nodeName": node}, "status": status}


@pytest.mark.parametrize(
    ("seen", "silent"),
    [(pod(), True), (pod(pod_ready="True"), False), (pod(engine_ready=False), False), ({"metadata": {}}, False)],
)
def test_a_pod_that_only_the_cluster_calls_not_ready_is_silent(seen: dict[str, Any], silent: bool) -> None:
    assert read.is_silent(seen) == silent


def test_what_is_said_of_a_node() -> None:
    assert read.silence("b", {"status": {"conditions": [UNKNOWN]}}) == LOST
    assert read.silence("b", None) == "node b is gone"
    for ready in ("True", "False"):
        assert read.silence("b", {"status": {"conditions": [{**UNKNOWN, "status": ready}]}}) == ""
    assert read.silence("b", {}) == ""
    assert read.pod_fact(pod(), {"b": LOST}).lost == LOST
    assert read.pod_fact(pod(node="a"), {"b": LOST}).lost == ""


@pytest.mark.asyncio
async def test_a_node_is_read_only_where_a_pod_is_silent_and_only_if_it_may_be() -> None:
    asked: list[str] = []

    class Nodes:
        async def get(self, _: Any, __: str, name: str) -> dict[str, Any] | None:
            asked.append(name)
            if name == "secret":
                raise ApiError(403, "no")
            return {"status": {"conditions": [UNKNOWN]}}

    observer = Observer.__new__(Observer)
    observer._kube = Nodes()  # type: ignore[assignment]
    pods = [
        pod(),
        pod(),
        pod(node="secret"),
        pod(node="well", pod_ready="True"),
        pod(node="starts", engine_ready=False),
    ]
    assert await observer._lost(pods) == {"b": LOST}
    assert sorted(asked) == ["b", "secret"]


def test_addresses_are_those_of_engines_that_are_there() -> None:
    there = PodFact("p", ip="1.1.1.1")
    others = (replace(there, ip=""), replace(there, ip="2", deleting=True), replace(there, ip="3", lost=LOST))
    assert read.addresses((EngineSet("s", "r", pods=(there, *others)),)) == {"http://1.1.1.1:30000"}


# what is said of it -------------------------------------------------------------------------------------------------


def engines(*pods: PodFact) -> EngineSet:
    return EngineSet("s", "r", replicas=2, pods=pods)


READY, GONE = PodFact("p", ready=True), PodFact("q", lost=LOST, restarts=9, exit_message="ddtree: refused: no")


def test_a_lost_node_is_the_obstacle_and_what_keeps_its_successor_is_said_too() -> None:
    assert obstacle(engines(READY, GONE)) == ("NodeLost", LOST)
    waits = PodFact("r", waiting="Unschedulable", message="0/2 nodes are available")
    leaving = replace(GONE, deleting=True)
    assert obstacle(engines(READY, leaving, waits)) == (
        "NodeLost",
        f"{LOST}; Unschedulable: 0/2 nodes are available",
    )
    assert obstacle(engines(READY)) is None


def test_ready_names_the_node_while_engines_are_missing_and_this_is_an_event() -> None:
    short = report._ready(engines(READY, GONE), 2)
    assert short == ("False", "NodeLost", f"1/2 engines ready; {LOST}")
    assert report._ready(engines(READY, READY, replace(GONE, deleting=True)), 2) == (
        "True",
        "EnginesReady",
        "2/2 engines ready",
    )
    assert report._ready(engines(READY), 2)[1] == "EnginesNotReady"
    bad = {"conditions": [report.condition("Ready", *short)]}
    assert report.events({}, bad) == [Emit("Warning", "NodeLost", f"1/2 engines ready; {LOST}")]
    assert report.events(bad, bad) == []
    assert report.events({}, {"conditions": [report.condition("Ready", "False", "EnginesNotReady", "1/2")]}) == []


# how long engines stay there ----------------------------------------------------------------------------------------


def stays(*own: dict[str, Any]) -> dict[str, int | None]:
    spec = DDTreeSpec.model_validate(
        {
            "model": {"path": "/m"},
            "drafter": {"path": "/d"},
            "engine": {"image": f"r/i@sha256:{64 * '0'}", "speculative": {"algorithm": "DFLASH"}},
            "placement": {"gpu": {"perReplica": 0}, "tolerations": list(own)},
        }
    )
    action = ApplyEngines("m-r", "r", False, 1, "i", {}, {}, 0.0)
    resource = {"apiVersion": "v1", "kind": "K", "metadata": {"name": "m", "namespace": "n", "uid": "u"}}
    made = manifests.engines(action, spec, resource, manifests.EngineDefaults(), None)
    found = made["spec"]["template"]["spec"]["tolerations"]
    return {str(t.get("key", "")).rpartition("/")[2]: t.get("tolerationSeconds") for t in found}


def test_engines_leave_a_node_that_does_not_answer_unless_the_user_says_otherwise() -> None:
    assert stays() == {"unreachable": 60, "not-ready": 60}
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    assert stays({**own, "tolerationSeconds": 600}) == {"unreachable": 600, "not-ready": 60}
    assert stays({**own, "effect": "NoSchedule", "key": "x"}) == {"x": None, "unreachable": 60, "not-ready": 60}
    assert stays({"operator": "Exists"}) == {"": None}


# what was asked of it -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def ill() -> AsyncIterator[str]:
    """An engine that answers every request with an error."""

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "no"}, status=503)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


NOBODY = "http://127.0.0.1:1"


@pytest.mark.asyncio
async def test_an_error_that_the_engine_answers_is_told_from_no_answer() -> None:
    prompt = Prompt("p", "t", "x")
    async with aiohttp.ClientSession() as session, ill() as url:
        assert (await generate(session, url, prompt, 1, 10)).unreached == ""
        assert (await generate(session, NOBODY, prompt, 1, 10)).unreached == NOBODY
        assert await answers(session, url)
        assert not await answers(session, NOBODY)


class Silent:
    """A PairRunner whose canary gives no answer."""

    asked = 0

    def __init__(self, _: Any, baseline: list[str], canary: list[str], *__: Any, **___: Any) -> None:
        self.canary, self.live = canary[0], None

    async def run(self, n: int) -> list[Any]:
        Silent.asked += n
        await asyncio.sleep(0)
        good = pair()
        lost = Sample(good.canary.prompt_id, error="no answer", unreached=self.canary)
        return [replace(good, canary=lost)] * n


@pytest.mark.asyncio
async def test_a_canary_that_went_with_its_node_is_not_judged_and_one_that_is_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    up: set[str] = set()
    looked, woken = asyncio.Event(), asyncio.Event()

    async def answer(_: Any, url: str) -> bool:
        looked.set()
        return url in up

    monkeypatch.setattr(analyses, "PairRunner", Silent)
    monkeypatch.setattr(analyses, "answers", answer)
    monkeypatch.setattr(analyses, "DOUBT", 0.0)

    async def save(*_: Any) -> str:
        return "sha256:0"

    made = Analyses(None, save, lambda *_: woken.set())  # type: ignore[arg-type]
    key = ("n", "m", "r", 0, 0)
    made.adopt(key, Policy.from_spec(AnalysisSpec()), 100, [], None)

    def go(canary: str) -> None:
        made.there("n", "m", frozenset(["b", canary]))
        made.ensure(
            key, prompts=[], baseline_urls=["b"], canary_urls=[canary], seed=0, concurrency=1, max_tokens=1, checks=[]
        )  # fmt: skip

    go("c")
    async with asyncio.timeout(30):
        await looked.wait()
    fact = made.fact(key)
    assert fact is not None
    assert fact.outcome == "notYet"
    go("d")  # the pod went, and another came
    up.add("d")
    async with asyncio.timeout(60):
        task = made._running[key].task
        assert task is not None
        await task
    assert made.fact(key).outcome == "fail"  # type: ignore[union-attr]
    errors = made._running[key].pairs
    assert {p.canary.unreached for p in errors} == {"d"}
    await made.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("comes_back", [True, False])
async def test_the_watch_counts_what_went_unanswered_once_the_engine_answers_again(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    expected = {f"p{i}": Sample(f"p{i}", 50, 20, 30, 1.0) for i in range(10)}
    down, asked, woken = {"b"}, asyncio.Event(), asyncio.Event()
    count = 0

    async def ask(_: Any, url: str, prompt: Prompt, __: int) -> Sample:
        nonlocal count
        count += 1
        if count % 60 == 0:
            asked.set()
        return Sample(prompt.id, error="no", unreached=url) if url in down else expected[prompt.id]

    monkeypatch.setattr(watches, "generate", ask)
    made = Watches(None, lambda *_: woken.set(), lambda _: None, every=0.0)  # type: ignore[arg-type]
    key = ("n", "m", "r", 0)
    made.begin(key, Watch(policy_for(AnalysisSpec(), True), expected, 0.0), [Prompt(k, "", k) for k in expected], 8, 0)
    made.reach(key, ["a", "b"])
    async with asyncio.timeout(30):
        await asked.wait()
    assert not woken.is_set()  # half of all requests, and nobody knows why
    if comes_back:
        down.clear()
        async with asyncio.timeout(30):
            await woken.wait()
        assert "requests failed" in made.fact(key).reason  # type: ignore[union-attr]
    else:
        made.there("n", "m", frozenset(["a"]))
        made.reach(key, ["a"])
        asked.clear()
        async with asyncio.timeout(30):
            await asked.wait()
        assert not made.fact(key).failed  # type: ignore[union-attr]
        assert made._running[key].doubtful == []
    await made.close()
