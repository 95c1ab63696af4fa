"""Health and metrics of the operator itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Health:
    """Answers /healthz, /readyz and /metrics. Liveness is the age of the last complete resync: a process whose
    watches died and whose resync hangs is dead, however alive it looks.
    """

    def __init__(self, resync: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = max(120.0, 6 * resync)
        self._last = clock()
        self.ready = False
        self.registry = CollectorRegistry()
        self.reconciles = Histogram(
            "ddtree_operator_reconcile_seconds", "Duration of one reconcile.", registry=self.registry
        )
        self.failures = Counter(
            "ddtree_operator_reconcile_errors_total", "Reconciles that ended in an error.", registry=self.registry
        )
        self.writes = Gauge("ddtree_operator_api_writes", "Writes to the API server so far.", registry=self.registry)
        self.age = Gauge("ddtree_operator_resync_age_seconds", "Age of the last resync.", registry=self.registry)
        self.age.set_function(lambda: self._clock() - self._last)

    def resynced(self) -> None:
        """A complete list of resources was just read."""
        self._last = self._clock()
        self.ready = True

    @property
    def alive(self) -> bool:
        """False when nothing was heard from the API server for too long."""
        return self._clock() - self._last < self._limit

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Serve; the runner's ``cleanup`` ends it."""

        async def healthz(_: web.Request) -> web.Response:
            text = "ok" if self.alive else f"no resync for {self._clock() - self._last:.0f} s"
            return web.Response(text=text, status=200 if self.alive else 503)

        async def readyz(_: web.Request) -> web.Response:
            return web.Response(text="ok" if self.ready else "starting", status=200 if self.ready else 503)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), content_type="text/plain")

        app = web.Application()
        app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner
