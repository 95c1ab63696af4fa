"""Many resources on one cluster: what changes elsewhere costs a resource nothing, and nobody waits behind the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_operator.handlers import operator, shared
from ddtree_operator.handlers import queue as queues
from ddtree_operator.handlers.neighbours import Neighbours
from ddtree_operator.handlers.queue import RESERVED, WORKERS, Queue
from ddtree_operator.handlers.reconcile import BUSY, LOOKS, SOONEST
from ddtree_operator.handlers.settings import Settings
from ddtree_operator.handlers.shared import FRESH, Shared
from faults.sim import KEY, Sim, run
from unit.test_placement_match import node, pod

pytestmark = pytest.mark.unit


class Cluster:
    """The simulated operator on nodes with GPUs, and somebody else's pods on them."""

    def __init__(self, patch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.sim = Sim(patch, placement={"gpu": {"product": ["NVIDIA-H200"]}}, **spec)
        patch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: self.sim.now))
        seen = self.sim.reconciler._observer
        seen._neighbours = Neighbours(seen._kube, (), everywhere=True)
        for name in "ab":
            self.sim.server.put("nodes", node(name))

    def take(self, where: str, gpus: int) -> None:
        """Somebody else's pod on a node holds so many GPUs now."""
        meta = {"name": f"other-{where}", "namespace": "theirs"}
        self.sim.server.put("pods", {**pod(where, gpus), "metadata": meta})

    def status_writes(self) -> int:
        return sum(entry.startswith("PATCH ddtreedeployments/") for entry in self.sim.server.log)

    def free(self) -> dict[str, int]:
        return {row["name"]: row["free"] for row in self.sim.status["nodes"]}


def test_gpus_that_others_take_and_free_cause_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        cluster = Cluster(monkeypatch, paused=True)
        await cluster.sim.until("Paused")
        await cluster.sim.run(30)
        before, writes = cluster.status_writes(), cluster.sim.server.writes
        for taken in (1, 8, 3, 0):
            cluster.take("b", taken)
            await cluster.sim.run(3 * FRESH)
        assert (cluster.status_writes(), cluster.sim.server.writes) == (before, writes)
        # another revision is a new question
        cluster.take("b", 5)
        cluster.sim.advance(FRESH)
        cluster.sim.retuned(15)
        await cluster.sim.run(30)
        assert cluster.free()["b"] == 3

    run(story())


def test_a_revision_without_room_sees_what_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        cluster = Cluster(monkeypatch)
        cluster.take("a", 8)
        cluster.take("b", 8)
        sim = await cluster.sim.until("Placing")
        cluster.take("b", 7)  # one is free, two are needed: the table says so
        await sim.run(FRESH + 2 * BUSY)
        assert cluster.free() == {"a": 0, "b": 1, "n": 0}
        cluster.take("b", 0)
        at = sim.now
        await sim.until("Starting", "Analyzing")
        assert sim.now - at <= FRESH + 2 * BUSY
        [placed] = [c for c in sim.status["conditions"] if c["type"] == "Placed"]
        assert placed["status"] == "True"
        assert "1 of 3 nodes fits (b)" in placed["message"]

    run(story())


def test_a_node_that_goes_while_nothing_runs_yet_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        cluster = Cluster(monkeypatch, paused=True)
        await cluster.sim.until("Paused")
        for deployment in cluster.sim.of("deployments"):
            cluster.sim.server.remove(("deployments", *KEY[:1], deployment["metadata"]["name"]))
        cluster.sim.server.put("nodes", node("b", unschedulable=True))
        cluster.sim.advance(FRESH)
        await cluster.sim.look()
        assert {row["name"]: row["fits"] for row in cluster.sim.status["nodes"]} == {"a": True, "b": False, "n": False}

    run(story())


# shared reads -------------------------------------------------------------------------------------------------------


def test_looks_at_once_read_once_and_an_error_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reads = 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        if reads == 1:
            raise ValueError("no answer")
        return reads

    async def story() -> None:
        of = Shared(read)
        with pytest.raises(ValueError, match="no answer"):
            await of.get()
        assert await asyncio.gather(*(of.get() for _ in range(5))) == [2] * 5
        clock[0] += FRESH - 0.1
        assert await of.get() == 2
        clock[0] += 0.1
        assert await of.get() == 3

    run(story())


# the line -----------------------------------------------------------------------------------------------------------


class Line:
    """A queue with one worker, whose work is done one by one."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._one = asyncio.Semaphore(0)  # as many as were done and not yet waited for
        self.go = asyncio.Semaphore(0)
        self.queue = Queue(self._work, workers=1)

    async def _work(self, key: tuple[str, str]) -> float | None:
        await self.go.acquire()
        self.done.append(key[1])
        self._one.release()
        return 1000.0

    async def finish(self, count: int) -> list[str]:
        """Let so many more be done; all that were."""
        for _ in range(count):
            self.go.release()
            async with asyncio.timeout(30):
                await self._one.acquire()
        return self.done


def test_what_a_person_changed_goes_first_and_nothing_twice() -> None:
    async def story() -> None:
        line = Line()
        add = line.queue.add
        for name in "abc":
            add(("llm", name))
        add(("llm", "c"), urgent=True)  # in line already: moves up
        add(("llm", "d"), urgent=True)
        add(("llm", "d"))
        assert line.queue.depth == 4
        line.queue.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        add(("llm", "c"), urgent=True)  # under way: once more, before the others
        assert await line.finish(5) == ["c", "d", "c", "a", "b"]
        assert line.queue.depth == 0
        add(("llm", "e"))
        assert await line.finish(1) == ["c", "d", "c", "a", "b", "e"]
        await line.queue.stop()

    run(story())


def test_a_key_that_moved_up_leaves_no_place_behind() -> None:
    async def story() -> None:
        line = Line()
        line.queue.add(("llm", "a"))
        line.queue.add(("llm", "b"))
        line.queue.add(("llm", "a"), urgent=True)
        line.queue.start()
        assert await line.finish(1) == ["a"]
        await asyncio.sleep(0)
        line.queue.add(("llm", "a"))  # once more: behind b, not where it stood before it moved up
        line.queue.add(("llm", "c"))
        assert await line.finish(3) == ["a", "b", "a", "c"]
        await line.queue.stop()

    run(story())


class Places:
    """A queue with as many workers as the operator's, whose looks end when they are told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ill: set[str] = set()
        self._looks: dict[str, asyncio.Event] = {}
        self.queue = Queue(self._work)
        self.queue.start()

    async def _work(self, key: tuple[str, str]) -> float | None:
        self.begun.append(key[1])
        self._looks[key[1]] = end = asyncio.Event()
        await end.wait()
        if key[1] in self.ill:
            raise ValueError("no answer")
        return None

    async def add(self, *names: str, urgent: bool = False) -> list[str]:
        """Add keys; those whose looks began thereupon."""
        before = len(self.begun)
        for name in names:
            self.queue.add(("llm", name), urgent=urgent)
        return await self._since(before)

    async def end(self, *names: str) -> list[str]:
        """End looks; the keys whose looks began thereupon."""
        before = len(self.begun)
        for name in names:
            self._looks.pop(name).set()
        return await self._since(before)

    async def _since(self, before: int) -> list[str]:
        for _ in range(5):  # turns of the loop: nothing here waits for anything else
            await asyncio.sleep(0)
        return self.begun[before:]


def test_places_are_kept_for_what_a_person_changed() -> None:
    async def story() -> None:
        places, many = Places(), [f"r{i}" for i in range(40)]
        assert await places.add(*many) == many[: WORKERS - RESERVED]
        assert await places.add("r39", urgent=True) == ["r39"]  # waited in line: moves up
        hurried = [f"u{i}" for i in range(RESERVED)]
        assert await places.add(*hurried, urgent=True) == hurried[:-1]  # all places are taken now
        assert await places.end("r0") == hurried[-1:]
        assert await places.end("u0") == many[WORKERS - RESERVED :][:1]
        assert await places.end("u1") == []  # the others have their share
        await places.queue.stop()

    run(story())


def test_what_nobody_hurries_gets_its_turn_beside_endless_changes() -> None:
    async def story() -> None:
        places, hurried = Places(), [f"u{i}" for i in range(40)]
        assert await places.add(*hurried, urgent=True) == hurried[: WORKERS - 1]
        assert await places.add("a", "b", "c") == ["a"]
        assert await places.end("u0") == [hurried[WORKERS - 1]]
        await places.add("u0", urgent=True)
        assert await places.end("a") == ["b"]
        places.ill.add("b")
        assert await places.end("b") == ["c"]  # a look that fails gives its place back
        await places.queue.stop()

    run(story())


def test_changes_of_children_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(operator, "CALM", 0.05)
        line = Line()
        line.queue.start()
        working = operator.Operator(Settings(), [], "", 0)
        working.wake_soon("llm", "a")  # on standby: nothing
        working._term = SimpleNamespace(wake_soon=partial(operator.Term.wake_soon, line))  # type: ignore[assignment]
        for _ in range(5):
            working.wake_soon("llm", "a")
        assert line.queue.depth == 0
        assert await line.finish(1) == ["a"]
        working.wake_soon("llm", "a")
        assert await line.finish(1) == ["a", "a"]
        assert line.queue.depth == 0
        await line.queue.stop()

    run(story())


def test_a_resync_leaves_alone_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        clock = [100.0]
        monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        line = Line()
        line.queue.start()
        line.queue.add_unless_looked(("llm", "a"), 30)
        await line.finish(1)
        await asyncio.sleep(0)
        clock[0] += 29
        line.queue.add_unless_looked(("llm", "a"), 30)
        line.queue.add(("llm", "b"))
        assert await line.finish(1) == ["a", "b"]
        clock[0] += 1
        line.queue.add_unless_looked(("llm", "a"), 30)
        assert await line.finish(1) == ["a", "b", "a"]
        await line.queue.stop()

    run(story())


def test_many_resources_at_rest_are_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        sim = Sim(monkeypatch)
        await sim.until("Stable")
        await sim.run(60)
        assert await sim.reconciler.reconcile(KEY) == sim.reconciler.until_next_look(KEY)
        assert 30.0 * SOONEST <= sim.reconciler.until_next_look(KEY) <= 30.0
        sim.reconciler._resources |= {("llm", f"r{i}"): {} for i in range(999)}
        assert await sim.reconciler.reconcile(KEY) == sim.reconciler.until_next_look(KEY)
        assert SOONEST * 1000 / LOOKS <= sim.reconciler.until_next_look(KEY) <= 1000 / LOOKS

    run(story())


def test_resources_that_came_to_rest_together_are_not_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler = Sim(monkeypatch).reconciler
    reconciler._resources = {("llm", f"r{i:04}"): {} for i in range(200)}
    looks: Counter[int] = Counter()  # second -> looks
    for key in reconciler._resources:
        at = 0.0
        while at < 1000:
            wait = reconciler.until_next_look(key)
            assert 0 < wait <= reconciler.resync  # never later
            at += wait
            looks[int(at)] += 1
    assert max(looks.values()) <= 3 * LOOKS
    assert sum(looks[second] for second in range(100, 1000)) / 900 < 1.5 * LOOKS
