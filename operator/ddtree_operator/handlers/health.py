"""Answers /healthz, /readyz and /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import generate_latest

from ddtree_operator.handlers.freshness import Children, Freshness
from ddtree_operator.handlers.metrics import Metrics


class Health:
    """Liveness is what the operator sees, not that it runs: a complete list of its resources at least every few
    resyncs, and nothing in it, or among their engines, that the watches never delivered. A process that fails in this
    has to be started anew. It is ready from its first complete list on, for as long as it is well: alerts go to the
    other replica meanwhile.
    """

    def __init__(self, resync: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = max(120.0, 6 * resync)
        self._last = clock()
        self._metrics = metrics
        self.freshness = Freshness(clock)
        self.children = Children(clock)
        self.ready = False
        self.broken = ""  # why this process cannot go on; "" while it can
        metrics.resync_age.set_function(lambda: self._clock() - self._last)
        metrics.watch_lag.set_function(lambda: max(self.freshness.lag, self.children.lag[0]))

    def resynced(self) -> None:
        """A complete list of resources was just read."""
        self._last = self._clock()
        self.ready = True

    @property
    def ailment(self) -> str:
        """What is wrong, in one sentence; "" while the operator sees its resources."""
        if self.broken:
            return self.broken
        age, lag = self._clock() - self._last, self.freshness.lag
        if age >= self._limit:
            return f"no list of the resources was read for {age:.0f} s"
        if lag >= self._limit:
            return f"a change that lists have shown for {lag:.0f} s has not come by watch"
        lag, plural = self.children.lag
        if lag >= self._limit:
            return f"a change of {plural} that lists have shown for {lag:.0f} s has not come by watch"
        return ""

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Serve; the runner's ``cleanup`` ends it."""

        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text=self.ailment or "ok", status=503 if self.ailment else 200)

        async def readyz(_: web.Request) -> web.Response:
            text = self.ailment or ("" if self.ready else "starting")
            return web.Response(text=text or "ok", status=503 if text else 200)

        async def metrics(_: web.Request) -> web.Response:
            text = generate_latest(self._metrics.registry)
            return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner
