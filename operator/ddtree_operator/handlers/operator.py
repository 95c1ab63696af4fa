"""Everything that lives as long as the process: the term of a leader, the resync, health, the alert receiver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import aiohttp

from ddtree_operator.alerts.guards import Tokens
from ddtree_operator.alerts.receiver import Receiver, Result
from ddtree_operator.api.names import LABEL_DEPLOYMENT
from ddtree_operator.handlers.alerting import Recorder
from ddtree_operator.handlers.election import Election
from ddtree_operator.handlers.health import Health
from ddtree_operator.handlers.kube import DDTREE, DEPLOYMENT, POD, REVISION, ApiError, Kind, Kube, Object
from ddtree_operator.handlers.metrics import Metrics
from ddtree_operator.handlers.queue import Queue
from ddtree_operator.handlers.reconcile import Reconciler
from ddtree_operator.handlers.settings import Settings

log = logging.getLogger("ddtree.operator")

_LISTED = ("namespace", "name", "uid", "resourceVersion")  # what is kept of a listed resource
CHILDREN = (DEPLOYMENT, POD, REVISION)  # listed by each look, and watched. Jobs are looked at by name, every 2 s
CALM = 0.3  # seconds in which changes of children are gathered: engines that start or leave change many times
FINISH = 10.0  # seconds that looks under way get before a term ends


def server_tls(folder: Path) -> ssl.SSLContext:
    """TLS from a mounted Secret; clients need a certificate of its CA when there is a ``ca.crt``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    read_certificate(context, folder)
    if (folder / "ca.crt").is_file():
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def read_certificate(context: ssl.SSLContext, folder: Path) -> None:
    """The certificate as it is now; connections that are made from now on use it."""
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")


class Term:
    """What one replica has only while it works: the queue, and what it remembers of running analyses."""

    def __init__(self, kube: Kube, settings: Settings, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._metrics = metrics
        self.queue = Queue(self._work, waited=metrics.queue_wait.observe)
        self.reconciler = Reconciler(kube, settings, session, self.wake, metrics)
        metrics.queue_depth.set_function(lambda: self.queue.depth)
        self.queue.start()

    def wake(self, namespace: str, name: str, *, urgent: bool = False) -> None:
        """Put a resource in line."""
        self.queue.add((namespace, name), urgent=urgent)

    def wake_soon(self, namespace: str, name: str) -> None:
        """Put a resource in line after a moment, in which more may happen to it."""
        self.queue.add_later((namespace, name), CALM)

    def resync(self, namespace: str, name: str) -> None:
        """Put a resource in line that nobody has looked at for long."""
        self.queue.add_unless_looked((namespace, name), self.reconciler.resync)

    async def _work(self, key: tuple[str, str]) -> float | None:
        with self._metrics.reconciles.time(), self._metrics.failures.count_exceptions():
            return await self.reconciler.reconcile(key)

    async def end(self) -> None:
        """Let looks that are under way finish, for a while; the next term goes on from wherever they were."""
        await self.queue.stop(FINISH)
        await self.reconciler.analyses.close()
        await self.reconciler.watches.close()
        self._metrics.queue_depth.set_function(lambda: 0)
        self._metrics.forget_all()


class Operator:
    """The process."""

    def __init__(self, settings: Settings, namespaces: list[str], host: str, port: int) -> None:
        self.settings = settings
        self.namespaces = namespaces
        self.metrics = Metrics()
        self.health = Health(settings.resync, self.metrics)
        self._host, self._port = host, port
        self._stack = contextlib.AsyncExitStack()
        self._kube: Kube | None = None
        self._session: aiohttp.ClientSession | None = None
        self._election: Election | None = None
        self._term: Term | None = None
        self._tls: ssl.SSLContext | None = None

    async def start(self) -> None:
        """Connect, serve, and work as soon as it is this replica's turn."""
        self._kube = await Kube.connect()
        self._kube.on_answer = lambda verb, kind, code: self.metrics.requests.labels(verb, kind, str(code)).inc()
        self._kube.on_list = self._listed
        self._stack.push_async_callback(self._kube.close)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        runner = await self.health.start(self._host, self._port)
        self._stack.push_async_callback(runner.cleanup)
        await self._receive_alerts()
        lease, space = self.settings.lease, os.environ.get("POD_NAMESPACE", "")
        if lease and space:
            identity = os.environ.get("POD_NAME") or os.environ.get("HOSTNAME", "ddtree-operator")
            self._election = Election(self._kube, space, lease, identity)
            self._stack.push_async_callback(self._election.leave)  # after the term has ended: it is given back idle
            self._task(self._election.run(), "election")
        self._stack.push_async_callback(self._end_term)
        self._task(self._terms(), "terms")
        self._task(self._resync(), "resync")

    def _task(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._stack.callback(task.cancel)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """These tasks run as long as the process; one that fails takes it along, by way of its liveness."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s ended: %s", task.get_name(), error, exc_info=error)
            self.health.broken = f"{task.get_name()} ended: {error or type(error).__name__}"

    @property
    def leading(self) -> bool:
        """Whether this replica works."""
        return self._election is None or self._election.leading

    async def _terms(self) -> None:
        """Begin and end terms as the Lease comes and goes."""
        while True:
            if self.leading and self._term is None:
                assert self._kube is not None
                assert self._session is not None
                self._term = Term(self._kube.fenced(lambda: self.leading), self.settings, self._session, self.metrics)
                await self._list()
            elif not self.leading:
                await self._end_term()
            self.metrics.leader.set(int(self._term is not None))
            if self._election is None:
                return
            self._election.changed.clear()
            # A Lease that is not renewed runs out without anybody saying so.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._election.changed.wait()

    async def _end_term(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            await term.end()
            self.health.children.unlist()

    def _listed(self, kind: Kind, namespace: str, labels: str, found: list[Object], began: float) -> None:
        """What a look lists of a resource has to come by watch, too."""
        label, _, name = labels.partition("=")
        if kind in CHILDREN and label == LABEL_DEPLOYMENT and "," not in name:
            self.health.children.listed(kind.plural, namespace, name, found, began)

    async def _receive_alerts(self) -> None:
        """On standby, too: what is recorded is seen by whichever replica works."""
        wanted = self.settings.alerts
        if wanted is None:
            return
        assert self._kube is not None

        def count(code: int, results: Sequence[Result]) -> None:
            self.metrics.notifications.labels(str(code)).inc()
            for result in results:
                self.metrics.alerts.labels(str(result)).inc()

        store = Recorder(self._kube, self.wake).store
        receiver = Receiver(Tokens(Path(wanted.token_file)), frozenset(self.namespaces), store, count=count)
        self._tls = server_tls(Path(wanted.tls_folder)) if wanted.tls_folder else None
        runner = await receiver.start(self._host, wanted.port, self._tls)
        self._stack.push_async_callback(runner.cleanup)

    async def stop(self) -> None:
        """Stop; whatever was under way is picked up by the next start, or by the other replica."""
        await self._stack.aclose()

    def wake(self, namespace: str, name: str, *, urgent: bool = False) -> None:
        """Put a resource in line, if this replica works; ``urgent`` for what a person or an alert asks for."""
        if self._term is not None:
            self._term.wake(namespace, name, urgent=urgent)

    def wake_soon(self, namespace: str, name: str) -> None:
        """The same after a moment, for what happens to the children of a resource."""
        if self._term is not None:
            self._term.wake_soon(namespace, name)

    async def _resync(self) -> None:
        while True:
            await self._list()
            self._renew_certificate()
            await asyncio.sleep(self.settings.resync)

    def _renew_certificate(self) -> None:
        """Certificates are exchanged in the mounted Secret before they expire."""
        if self._tls is None or self.settings.alerts is None:
            return
        try:
            read_certificate(self._tls, Path(self.settings.alerts.tls_folder))
        except OSError as error:  # ssl's errors are OSErrors
            log.warning("the alert receiver's certificate cannot be read, the one before stays: %s", error)

    async def _list(self) -> None:
        """Look at everything, whatever the watches say; standby replicas read along, to know that they could."""
        assert self._kube is not None
        found: list[Object] = []  # metadata only
        began = time.monotonic()
        try:
            for namespace in self.namespaces:
                async for page in self._kube.pages(DDTREE, namespace):
                    found += [{"metadata": {k: o["metadata"].get(k, "") for k in _LISTED}} for o in page]
        except (ApiError, ValueError) as error:
            log.warning("resync failed: %s", error)
            return
        for resource in found:
            if self._term is not None:
                self._term.resync(resource["metadata"]["namespace"], resource["metadata"]["name"])
        self.health.freshness.listed(found, began)
        self.health.resynced()
