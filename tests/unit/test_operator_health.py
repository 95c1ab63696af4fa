"""What the operator says about itself: liveness, metrics, log lines; and which of two replicas works."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from typing import Any

import pytest
from prometheus_client import generate_latest

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from ddtree_operator.core.actions import DeleteEngines, SaveRevision, StartBuild
from ddtree_operator.core.facts import EngineSet, Observed, PodFact, Revision
from ddtree_operator.handlers import logs
from ddtree_operator.handlers.election import DEADLINE, DURATION, Election
from ddtree_operator.handlers.freshness import Children, Freshness
from ddtree_operator.handlers.health import Health
from ddtree_operator.handlers.kube import POD, SERVICE, ApiError, Kind, Kube
from ddtree_operator.handlers.metrics import Metrics
from ddtree_operator.handlers.operator import Operator
from ddtree_operator.handlers.queue import Queue
from ddtree_operator.handlers.settings import Settings

pytestmark = pytest.mark.unit

Object = dict[str, Any]
KEY = ("llm", "m")


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# liveness -----------------------------------------------------------------------------------------------------------


def resource(uid: str, version: str) -> Object:
    return {"metadata": {"uid": uid, "resourceVersion": version}}


def test_a_watch_is_fresh_while_nothing_happens_and_behind_when_a_list_shows_more() -> None:
    clock = Clock()
    fresh = Freshness(clock)
    fresh.delivered(resource("a", "5"))
    for _ in range(100):
        clock.now += 60
        fresh.listed([resource("a", "5")])
    assert fresh.lag == 0
    fresh.listed([resource("a", "9")])
    clock.now += 30
    fresh.listed([resource("a", "11")])  # it goes on changing: the watch is behind all the same
    assert fresh.lag == 30
    fresh.delivered(resource("a", "12"))  # the watch is past the list
    fresh.listed([resource("a", "11")])
    assert fresh.lag == 0


def test_a_resource_that_the_watch_never_mentioned_counts_and_a_deleted_one_does_not() -> None:
    clock = Clock()
    fresh = Freshness(clock)
    fresh.listed([resource("a", "1"), resource("b", "2")])
    clock.now += 10
    assert fresh.lag == 10
    fresh.delivered(resource("a", "1"))
    fresh.delivered(resource("b", "2"))
    fresh.delivered(resource("b", "3"), deleted=True)
    fresh.listed([resource("a", "1")])
    assert fresh.lag == 0


def test_what_the_watch_delivers_while_an_older_list_is_read_is_not_behind() -> None:
    clock = Clock()
    fresh = Freshness(clock)
    began = clock.now
    clock.now += 1
    fresh.delivered(resource("a", "5"))  # made after the list began, which lacks it
    clock.now += 1
    fresh.listed([], began)
    fresh.listed([resource("a", "5")], clock.now)
    clock.now += 10
    assert fresh.lag == 0
    fresh.listed([], clock.now)  # it is gone, and the watch did not say so
    assert fresh.empty


def test_liveness_turns_red_when_lists_fail_and_when_the_watch_is_dead() -> None:
    clock = Clock()
    health = Health(30, Metrics(), clock)
    assert (health.ready, health.ailment) == (False, "")
    health.resynced()
    assert health.ready
    clock.now += 181
    assert health.ailment == "no list of the resources was read for 181 s"
    health.freshness.listed([resource("a", "1")])
    for _ in range(6):
        clock.now += 30
        health.freshness.listed([resource("a", "1")])
        health.resynced()
    assert health.ailment == "a change that lists have shown for 180 s has not come by watch"
    health.freshness.delivered(resource("a", "1"))
    health.freshness.listed([resource("a", "1")])
    assert health.ailment == ""


def child(uid: str, version: str, name: str = "m") -> Object:
    labels = {LABEL_DEPLOYMENT: name}
    return {"metadata": {"uid": uid, "resourceVersion": version, "namespace": "llm", "labels": labels}}


def test_each_look_tells_whether_the_watches_of_children_live() -> None:
    clock = Clock()
    children = Children(clock)
    children.listed("pods", "llm", "m", [child("a", "5"), child("b", "6")])  # listed before it is delivered
    clock.now += 2
    children.delivered("pods", child("a", "5"))
    assert children.lag == (2, "pods")
    children.delivered("pods", child("b", "6"))
    assert children.lag == (0, "")  # at once, though the next look may be long away
    children.listed("deployments", "llm", "m", [child("d", "7")])
    children.listed("deployments", "llm", "n", [])  # another resource's list says nothing about this one's
    clock.now += 10
    children.listed("pods", "llm", "m", [child("a", "5"), child("b", "6")])
    assert children.lag == (10, "deployments")
    health = Health(30, Metrics(), clock)
    health.children = children
    clock.now += 170
    health.resynced()
    assert health.ailment == "a change of deployments that lists have shown for 180 s has not come by watch"
    children.unlist()  # on standby nobody looks: what the last look saw proves nothing any more
    assert children.lag == (0, "")


def test_nothing_is_kept_of_children_that_are_gone() -> None:
    clock = Clock()
    children = Children(clock)
    children.listed("pods", "llm", "m", [child("a", "5")])
    children.delivered("pods", child("a", "5"))
    children.delivered("pods", child("a", "6"), deleted=True)
    children.listed("pods", "llm", "m", [child("b", "7")])
    children.forget("llm", "m")  # deleted before its pod was delivered
    children.delivered("deployments", child("d", "5", "n"))
    clock.now += 1
    children.listed("deployments", "llm", "n", [])  # and one whose end the watch never told
    assert not children._known


@pytest.mark.asyncio
async def test_a_task_that_fails_turns_liveness_red() -> None:
    operator = Operator(Settings(), ["llm"], "127.0.0.1", 0)

    async def fails() -> None:
        raise RuntimeError("no such thing")

    operator._task(fails(), "terms")
    for _ in range(3):
        await asyncio.sleep(0)
    assert operator.health.ailment == "terms ended: no such thing"
    await operator.stop()


# metrics ------------------------------------------------------------------------------------------------------------


def shown(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def seen(*pods: PodFact, revision: Revision | None = None) -> Observed:
    revision = revision or Revision("0123456789", 1, {}, result="promoted", summary={"acceptLength": 2.5})
    return Observed((revision,), (EngineSet("m-0123456789", revision.hash, pods=pods),))


def test_restarts_are_counted_as_they_happen_and_not_with_pods_that_come_and_go() -> None:
    metrics = Metrics()
    name = 'ddtree_engine_restarts_total{ddtreedeployment="m",namespace="llm",revision="0123456789"}'
    metrics.looked(KEY, seen(PodFact("a", restarts=4)), {"phase": "Stable"})
    assert shown(metrics)[name] == 0  # from before this process
    metrics.looked(KEY, seen(PodFact("a", restarts=6), PodFact("b")), {"phase": "Stable"})
    assert shown(metrics)[name] == 2
    metrics.looked(KEY, seen(PodFact("b", restarts=1), PodFact("c", restarts=2)), {"phase": "Stable"})
    assert shown(metrics)[name] == 5
    metrics.looked(KEY, seen(), {"phase": "Stable"})
    assert shown(metrics)[name] == 5


def test_gauges_follow_a_resource_and_go_with_it() -> None:
    metrics = Metrics()
    metrics.looked(KEY, seen(), {"phase": "Analyzing", "weight": 20, "readyReplicas": 2})
    metrics.looked(KEY, seen(), {"phase": "Stable", "readyReplicas": 3})
    rows = {k: v for k, v in shown(metrics).items() if 'ddtreedeployment="m"' in k}
    assert rows == {
        'ddtree_deployment_phase{ddtreedeployment="m",namespace="llm",phase="Stable"}': 1,
        'ddtree_deployment_ready_engines{ddtreedeployment="m",namespace="llm"}': 3,
        'ddtree_deployment_canary_weight_ratio{ddtreedeployment="m",namespace="llm"}': 0,
        'ddtree_revision_accept_length{ddtreedeployment="m",namespace="llm",revision="0123456789"}': 2.5,
        'ddtree_engine_restarts_total{ddtreedeployment="m",namespace="llm",revision="0123456789"}': 0,
        'ddtree_parity_divergences_total{ddtreedeployment="m",namespace="llm",revision="0123456789"}': 0,
    }
    other = Revision("aaaaaaaaaa", 2, {}, summary={"acceptLength": 2.0})
    metrics.looked(KEY, seen(revision=other), {"phase": "Stable"})
    assert "0123456789" not in str(shown(metrics))
    metrics.forget_all()
    assert not [k for k in shown(metrics) if "ddtreedeployment" in k]


def test_actions_and_ends_of_rollouts_are_counted_once() -> None:
    metrics = Metrics()
    open_ = Revision("0123456789", 1, {})
    rolled = open_.changed(result="rolledBack", cause="alert")
    metrics.acted(seen(revision=open_), SaveRevision(rolled))
    metrics.acted(seen(revision=rolled), SaveRevision(rolled.changed(handled="x")))
    metrics.acted(seen(revision=open_), SaveRevision(open_.changed(result="promoted")))
    metrics.acted(seen(), StartBuild("0123456789", 0))
    metrics.acted(seen(), DeleteEngines("x"))
    rows = shown(metrics)
    assert rows['ddtree_operator_rollbacks_total{cause="alert"}'] == 1
    assert rows["ddtree_operator_promotions_total"] == 1
    assert rows["ddtree_operator_builds_total"] == 1
    assert rows['ddtree_operator_decisions_total{action="SaveRevision"}'] == 3
    assert rows['ddtree_operator_decisions_total{action="DeleteEngines"}'] == 1


class Answer:
    status, reason = 200, ""

    async def read(self) -> bytes:
        return b'{"items": [], "metadata": {}}'


class Client:
    """The API client, as far as Kube uses it."""

    sent = 0

    async def param_serialize(self, method: str, path: str, **_: Any) -> tuple[Any, ...]:
        return method, path, {}, None, None

    async def call_api(self, *_: Any, **__: Any) -> Answer:
        self.sent += 1
        return Answer()


@pytest.mark.asyncio
async def test_requests_are_named_as_the_api_server_names_them_and_a_fence_stops_writes() -> None:
    client = Client()
    kube, rows, may = Kube(client), [], [True]
    kube.on_answer = lambda verb, resource, code: rows.append((verb, resource, code))
    fenced = kube.fenced(lambda: may[0])
    await fenced.list(POD, "llm")
    await fenced.get(SERVICE, "llm", "m")
    await fenced.patch(Kind("/apis/ddtree.dev/v1alpha1", "ddtreedeployments"), "llm", "m", {}, sub="status")
    await fenced.list(Kind("/api/v1", "nodes", namespaced=False))
    await fenced.log("llm", "p")
    assert rows == [
        ("list", "pods", 200),
        ("get", "services", 200),
        ("patch", "ddtreedeployments/status", 200),
        ("list", "nodes", 200),
        ("get", "pods/log", 200),
    ]
    may[0] = False
    sent = client.sent
    with pytest.raises(ApiError, match="does not lead any more"):
        await fenced.delete(SERVICE, "llm", "m")
    assert client.sent == sent
    await fenced.list(POD, "llm")
    await kube.delete(SERVICE, "llm", "m")
    assert client.sent == sent + 2


# log lines ----------------------------------------------------------------------------------------------------------


def test_log_lines_are_json_with_what_they_are_about() -> None:
    record = logging.LogRecord("ddtree.x", logging.INFO, "", 0, "made %s", ('a "b"\n',), None)
    with logs.about(namespace="llm", name="m"):
        logs.add(revision="0123456789", step="")
        row = json.loads(logs.JsonFormatter().format(record))
        assert "namespace llm, name m" in logs.TextFormatter().format(record)
    assert row.pop("time").endswith("+00:00")
    assert row == {
        "level": "info",
        "logger": "ddtree.x",
        "message": 'made a "b"\n',
        "namespace": "llm",
        "name": "m",
        "revision": "0123456789",
    }
    assert "namespace" not in json.loads(logs.JsonFormatter().format(record))


# the queue ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_queue_that_ends_lets_work_finish_and_begins_none() -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), []
    waits: list[float] = []

    async def work(key: tuple[str, str]) -> float | None:
        begun.set()
        await go.wait()
        done.append(key)
        return 0.0

    queue = Queue(work, workers=1, waited=waits.append)
    queue.start()
    queue.add(("llm", "a"))
    queue.add(("llm", "b"))
    await begun.wait()
    ending = asyncio.create_task(queue.stop(30))
    await asyncio.sleep(0)
    go.set()
    await ending
    assert done == [("llm", "a")]
    assert len(waits) >= 1


@pytest.mark.asyncio
async def test_a_queue_that_ends_does_not_wait_for_ever() -> None:
    async def work(key: tuple[str, str]) -> float | None:
        await asyncio.Event().wait()
        return None

    queue = Queue(work, workers=1)
    queue.start()
    queue.add(("llm", "a"))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await queue.stop(0.01)


# election -----------------------------------------------------------------------------------------------------------


class Leases:
    """One Lease, with versions; may be unreachable."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.down = False

    def _reach(self) -> None:
        if self.down:
            raise ApiError(0, "no answer")

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self._reach()
        return copy.deepcopy(self.lease)

    async def create(self, obj: Object) -> Object | None:
        self._reach()
        if self.lease is not None:
            return None
        self.version += 1
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        self._reach()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "modified")
        self.version += 1
        self.lease["spec"] |= body["spec"]
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease


class Replicas:
    """Two replicas that try in turns."""

    def __init__(self) -> None:
        self.clock, self.api = Clock(), Leases()
        self.a, self.b = (Election(self.api, "ops", "ddtree", x, self.clock) for x in "ab")  # type: ignore[arg-type]

    async def attempt(self, *who: Election) -> None:
        for election in who:
            try:
                election._held = await election._attempt(election._clock())
            except ApiError:
                continue

    async def later(self, seconds: float, *who: Election) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1
            await self.attempt(*who)
            assert not (self.a.leading and self.b.leading)


@pytest.mark.asyncio
async def test_one_of_two_replicas_leads_and_the_other_takes_over_when_it_is_gone() -> None:
    two = Replicas()
    await two.later(60, two.a, two.b)
    assert (two.a.leading, two.b.leading) == (True, False)
    acquired = two.api.lease["spec"]["acquireTime"]  # type: ignore[index]
    await two.later(DURATION - 1, two.b)
    assert not two.b.leading
    assert not two.a.leading  # it has stopped by itself, long before
    await two.later(3, two.b)
    assert two.b.leading
    assert two.api.lease["spec"]["leaseTransitions"] == 1  # type: ignore[index]
    assert two.api.lease["spec"]["acquireTime"] != acquired  # type: ignore[index]


@pytest.mark.asyncio
async def test_clocks_that_differ_by_a_day_change_nothing_about_who_leads() -> None:
    two = Replicas()
    two.a._clock, two.b._clock = two.clock, lambda: two.clock.now + 86400
    await two.later(60, two.a, two.b)
    assert (two.a.leading, two.b.leading) == (True, False)
    await two.later(DURATION - 1, two.b)
    assert not two.b.leading  # it waits as long as by its own clock the Lease stands still
    await two.later(3, two.b)
    assert two.b.leading
    await two.later(60, two.a, two.b)
    assert (two.a.leading, two.b.leading) == (False, True)


@pytest.mark.asyncio
async def test_without_the_api_server_nobody_leads_and_with_it_one_does_again() -> None:
    two = Replicas()
    await two.later(5, two.a, two.b)
    two.api.down = True
    await two.later(DEADLINE + 1, two.a, two.b)
    assert not two.a.leading
    assert not two.b.leading
    two.api.down = False
    await two.later(2, two.b, two.a)
    assert two.a.leading  # its Lease had not run out: it may go on


@pytest.mark.asyncio
async def test_a_leader_that_leaves_hands_over_at_once() -> None:
    two = Replicas()
    await two.later(5, two.a, two.b)
    await two.a.leave()
    assert not two.a.leading
    await two.attempt(two.b)
    assert two.b.leading
    await two.a.leave()  # says nothing about a Lease that is not its own
    assert two.b.leading
    assert two.api.lease["spec"]["holderIdentity"] == "b"  # type: ignore[index]


@pytest.mark.asyncio
async def test_of_two_that_reach_for_a_free_lease_one_gets_it() -> None:
    two = Replicas()
    await two.later(2, two.a)
    await two.a.leave()
    stale = copy.deepcopy(two.api.lease)
    await two.attempt(two.b)

    async def old(*_: Any) -> Object | None:
        return copy.deepcopy(stale)

    two.api.get = old  # type: ignore[method-assign]
    await two.attempt(two.a)
    assert (two.a.leading, two.b.leading) == (False, True)
