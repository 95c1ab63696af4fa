"""The operator's own watches, through kopf and HTTP, lied to and cut off; and what /healthz and /readyz say of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest

from ddtree_operator.handlers import operator as process
from ddtree_operator.handlers import reconcile
from ddtree_operator.handlers.health import Health
from ddtree_operator.handlers.kube import Kube
from ddtree_operator.handlers.main import build
from ddtree_operator.handlers.settings import Settings
from faults.server import Object
from faults.sim import NS, Sim
from faults.watching import FAULTS, Door

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

SPEED = 100.0  # simulated seconds in one
PATIENCE = 60.0  # seconds; the machine may be busy


class World:
    """An operator as a process runs it, on a simulated cluster whose time passes by itself."""

    def __init__(self, sim: Sim, door: Door) -> None:
        self.sim, self.door = sim, door
        self.deaf = False  # whether the operator's own lists of resources get no answer
        self.url = ""
        self.process: asyncio.Task[None] | None = None

    async def pass_time(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            self.sim.advance(0.05 * SPEED)

    async def ask(self, path: str) -> tuple[int, str]:
        """Status and text of the operator's own port; 0 while nothing answers."""
        with suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
                return answer.status, await answer.text()
        return 0, ""

    async def answers(self, path: str, code: int, words: str) -> bool:
        """Whether it answers so."""
        status, text = await self.ask(path)
        return status == code and words in text

    async def until(self, look: Callable[[], Any], what: str) -> float:
        """Seconds until ``look`` (or what it returns, when awaited) is true."""
        began = time.monotonic()
        while True:
            found = look()
            if await found if asyncio.iscoroutine(found) else found:
                return time.monotonic() - began
            assert self.process is None or not self.process.done(), f"the operator has ended before {what}"
            assert time.monotonic() < began + PATIENCE, f"{what}: {self.sim.status.get('message')}"
            await asyncio.sleep(0.01)

    async def stable(self) -> None:
        def settled() -> bool:
            status, meta = self.sim.status, self.sim.resource["metadata"]
            current = status.get("observedGeneration") == meta["generation"] and status.get("phase") == "Stable"
            return current and self.sim.serves() == status["revision"] and len(self.sim.sets()) == 1

        await self.until(settled, "stable")

    async def noticed(self, change: Callable[[], None]) -> float:
        """Seconds from a change of the spec to the first write that it leads to."""
        before = self.sim.server.writes
        change()
        return await self.until(lambda: self.sim.server.writes > before, "the change is noticed")


@asynccontextmanager
async def running(patch: pytest.MonkeyPatch, folder: Path, resync: float, limit: float = 120.0) -> AsyncIterator[World]:
    """Everything of ``ddtree-operator`` but its command line; red after ``limit`` seconds."""
    sim = Sim(patch, traffic={"drain": "1s"})
    door = Door(sim.server)
    world = World(sim, door)
    front, address = await door.start()
    config = folder / "kubeconfig"
    entry = {"name": "x", "cluster": {"server": address}, "user": {}, "context": {"cluster": "x", "user": "x"}}
    config.write_text(json.dumps({"current-context": "x", "clusters": [entry], "users": [entry], "contexts": [entry]}))
    patch.setenv("KUBECONFIG", str(config))
    patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    call = sim.server.call_api

    async def answer(method: str, path: str, **more: Any) -> Any:
        if world.deaf and path.endswith("/ddtreedeployments"):
            raise OSError("injected: nobody answers")
        return await call(method, path, **more)

    async def close() -> None:
        return None

    sim.server.call_api, sim.server.close = answer, close  # type: ignore[method-assign, attr-defined]

    async def connect() -> Kube:
        return Kube(sim.server)

    def reconciler(kube: Kube, settings: Settings, session: Any, wake: Any, metrics: Any) -> Any:
        sim.start(kube, wake, settings)
        return sim.reconciler

    def health(*args: Any) -> Health:
        made = Health(*args)
        made._limit = limit
        return made

    patch.setattr(reconcile, "BUSY", 0.5)
    patch.setattr(process.Kube, "connect", connect)
    patch.setattr(process, "Reconciler", reconciler)
    patch.setattr(process, "Health", health)
    port = await free_port()
    world.url = f"http://127.0.0.1:{port}"
    registry = build(Settings(resync=resync), [NS], "127.0.0.1", port)
    stop, settings = asyncio.Event(), kopf.OperatorSettings()
    settings.queueing.idle_timeout = settings.queueing.exit_timeout = 0.1  # it ends sooner
    settings.watching.inactivity_timeout = 2.0  # instead of 70
    how = {"registry": registry, "settings": settings, "standalone": True, "namespaces": [NS], "stop_flag": stop}
    clock = asyncio.create_task(world.pass_time())
    await asyncio.sleep(0)  # what runs before kopf is none of its business: it would wait for the end of it
    work = asyncio.create_task(kopf.operator(**how))
    world.process = work
    try:
        yield world
    finally:
        clock.cancel()
        door.closed = True
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(work, clock, return_exceptions=True)
        await front.cleanup()


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


def end(sim: Sim) -> Object:
    return {k: v for k, v in sim.end().items() if k != "attempts"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Object:
    """How it ends when nothing goes wrong."""

    async def story() -> Object:
        with pytest.MonkeyPatch.context() as patch:
            async with running(patch, tmp_path_factory.mktemp("plain"), resync=30) as world:
                await world.stable()
                await world.noticed(lambda: world.sim.retuned(15))
                await world.stable()
                return end(world.sim)

    return asyncio.run(story())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.asyncio
async def test_whatever_the_watch_does_the_end_is_the_same(
    fault: str, plain: Object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the whole of a rollout. A stream that stalls is opened anew; for what stays silent there is the resync."""
    async with running(monkeypatch, tmp_path, resync=2 if fault in {"silent", "refused", "broken"} else 30) as world:
        await world.stable()
        if fault == "stalled":
            world.door.stall()
        world.door.fault = fault
        await asyncio.sleep(1)  # streams that wait for the next event get it anew
        seconds = await world.noticed(lambda: world.sim.retuned(15))
        await world.stable()
        print(f"watch {fault}: noticed after {seconds:.2f} s; {world.door.faults} faults")
        assert end(world.sim) == plain
        assert not world.sim.outages
        assert seconds < 15  # the other faults must not wait for the resync, which comes after 30 s
        assert fault in {"none", "silent"} or world.door.faults > 3
        world.door.fault = "none"
        if fault != "silent":  # and it watches again: long before the next resync
            seconds = await world.noticed(lambda: world.sim.retuned(31))
            print(f"afterwards: {seconds:.2f} s")


@pytest.mark.asyncio
async def test_readiness_begins_with_the_first_complete_list_and_ends_with_a_dead_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(monkeypatch, tmp_path, resync=0.2, limit=2.0) as world:
        world.deaf = True

        await world.until(lambda: world.answers("/readyz", 503, "starting"), "it starts")
        world.deaf = False
        await world.until(lambda: world.answers("/readyz", 200, "ok"), "it is ready")
        await world.stable()
        world.door.fault = "silent"
        await asyncio.sleep(0.5)
        world.sim.retuned(15)
        red = await world.until(lambda: world.answers("/healthz", 503, "has not come by watch"), "red")
        print(f"red {red:.1f} s after a change that only the lists show, with a limit of 2 s")
        assert await world.answers("/readyz", 503, "has not come by watch")
        world.door.fault = "none"  # the stream lives again, and brings what it held back
        await world.until(lambda: world.answers("/readyz", 200, "ok"), "it is well again")
        world.deaf = True
        await world.until(lambda: world.answers("/readyz", 503, "no list of the resources was read"), "lists fail")
        assert await world.answers("/healthz", 503, "no list of the resources was read")


@pytest.mark.asyncio
async def test_a_dead_watch_of_children_costs_a_resync_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts go on, since each is looked at every few seconds; at rest the next resync sees what happened."""
    async with running(monkeypatch, tmp_path, resync=3, limit=2.0) as world:
        await world.stable()
        for budget, plural in ((15, "deployments"), (31, "controllerrevisions"), (63, "pods")):
            await world.until(lambda: world.answers("/healthz", 200, "ok"), "it is well")
            world.door.mute = {plural}
            world.sim.retuned(budget)
            await world.stable()
            words = f"a change of {plural} that lists have shown"
            red = await world.until(lambda words=words: world.answers("/healthz", 503, words), "red")  # type: ignore[misc]
            print(f"{plural}: red {red:.1f} s after the rollout, with a limit of 2 s")
            assert (
                float((await world.ask("/metrics"))[1].split("\nddtree_operator_watch_lag_seconds ")[1].split()[0]) >= 2
            )
            if plural == "pods":
                world.sim.ill = lambda pod: True
                noticed = await world.until(lambda: world.sim.status["phase"] == "Degraded", "ill engines are seen")
                print(f"engines that fell ill were seen after {noticed:.1f} s, with a resync of 3 s")
            world.door.mute = set()  # the stream lives again, and brings what it held back
        await world.until(lambda: world.answers("/healthz", 200, "ok"), "it is well again")
