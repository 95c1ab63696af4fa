"""The operator process: kopf watches, a queue works, a resync catches whatever a watch missed.

kopf's handlers here only put keys in line: no annotations, no finalizers, nothing kept between events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from ddtree_operator.alerts.guards import Tokens
from ddtree_operator.alerts.ledger import ANNOTATION_ALERTS
from ddtree_operator.alerts.receiver import Receiver
from ddtree_operator.api.names import ANNOTATION_ACTION, GROUP, LABEL_DEPLOYMENT, PLURAL, VERSION
from ddtree_operator.handlers.alerting import Recorder
from ddtree_operator.handlers.health import Health
from ddtree_operator.handlers.kube import DDTREE, ApiError, Kube
from ddtree_operator.handlers.queue import Queue
from ddtree_operator.handlers.reconcile import Reconciler
from ddtree_operator.handlers.settings import Settings

log = logging.getLogger("ddtree.operator")

# Children whose changes make their resource worth a look.
CHILDREN = (("apps", "v1", "deployments"), ("", "v1", "pods"), ("batch", "v1", "jobs"))


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def service_account(folder: Path = SERVICE_ACCOUNT) -> kopf.ConnectionInfo | None:
    """Credentials of the pod. By address, as the kubelet gives it: kopf's own way needs DNS."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = folder / "token"
    if not host or not token.is_file():
        return None
    address = f"[{host}]" if ":" in host else host
    return kopf.ConnectionInfo(
        server=f"https://{address}:{port}", ca_path=str(folder / "ca.crt"), token=token.read_text().strip()
    )


def server_tls(folder: Path) -> ssl.SSLContext:
    """TLS from a mounted Secret; clients need a certificate of its CA when there is a ``ca.crt``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    if (folder / "ca.crt").is_file():
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Operator:
    """Everything that lives as long as the process."""

    def __init__(self, settings: Settings, namespaces: list[str], host: str, port: int) -> None:
        self.settings = settings
        self.namespaces = namespaces
        self.health = Health(settings.resync)
        self._host, self._port = host, port
        self._queue: Queue | None = None
        self._stack = contextlib.AsyncExitStack()
        self._kube: Kube | None = None
        self._reconciler: Reconciler | None = None

    async def start(self) -> None:
        """Connect and start working."""
        self._kube = await Kube.connect()
        self._stack.push_async_callback(self._kube.close)
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._reconciler = Reconciler(self._kube, self.settings, session, lambda ns, name: self.wake(ns, name))
        self._stack.push_async_callback(self._reconciler.analyses.close)
        self._queue = Queue(self._work)
        self._queue.start()
        self._stack.push_async_callback(self._queue.stop)
        runner = await self.health.start(self._host, self._port)
        self._stack.push_async_callback(runner.cleanup)
        await self._receive_alerts()
        resync = asyncio.create_task(self._resync(), name="resync")
        self._stack.callback(resync.cancel)

    async def _receive_alerts(self) -> None:
        wanted = self.settings.alerts
        if wanted is None:
            return
        assert self._kube is not None
        recorder = Recorder(self._kube, self.wake)
        receiver = Receiver(Tokens(Path(wanted.token_file)), frozenset(self.namespaces), recorder.store)
        tls = server_tls(Path(wanted.tls_folder)) if wanted.tls_folder else None
        runner = await receiver.start(self._host, wanted.port, tls)
        self._stack.push_async_callback(runner.cleanup)

    async def stop(self) -> None:
        """Stop; whatever was under way is picked up by the next start."""
        await self._stack.aclose()

    def wake(self, namespace: str, name: str) -> None:
        """Put a resource in line."""
        if self._queue is not None:
            self._queue.add((namespace, name))

    async def _work(self, key: tuple[str, str]) -> float | None:
        assert self._reconciler is not None
        with self.health.reconciles.time(), self.health.failures.count_exceptions():
            try:
                return await self._reconciler.reconcile(key)
            finally:
                assert self._kube is not None
                self.health.writes.set(self._kube.writes)

    async def _resync(self) -> None:
        assert self._kube is not None
        while True:
            try:
                for namespace in self.namespaces:
                    for resource in await self._kube.list(DDTREE, namespace):
                        meta = resource["metadata"]
                        self.wake(meta["namespace"], meta["name"])
                self.health.resynced()
            except ApiError as error:
                log.warning("resync failed: %s", error)
            await asyncio.sleep(self.settings.resync)


def build(settings: Settings, namespaces: list[str], host: str = "0.0.0.0", port: int = 8080) -> kopf.OperatorRegistry:
    """A kopf registry with the operator's handlers."""
    registry = kopf.OperatorRegistry()
    operator = Operator(settings, namespaces, host, port)

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return service_account() or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True  # may not list CRDs or namespaces; kopf retries a refusal for a minute
        settings.watching.server_timeout = 120
        settings.watching.client_timeout = 150
        settings.watching.connect_timeout = 5
        settings.networking.request_timeout = 30
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await operator.stop()

    seen: dict[str, tuple[Any, ...]] = {}

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def changed(namespace: str | None, name: str | None, body: Any, type: str | None, **_: Any) -> None:
        """Wake for what people change. The operator's own status writes come back as events, and are none."""
        meta = body["metadata"]
        now = (
            meta.get("generation"),
            meta.get("annotations", {}).get(ANNOTATION_ACTION),
            meta.get("deletionTimestamp"),
        )
        if type != "DELETED" and seen.get(meta["uid"]) == now:
            return
        seen[meta["uid"]] = now
        if type == "DELETED":
            seen.pop(meta["uid"], None)
        operator.wake(namespace or "", name or "")

    alerts: dict[str, Any] = {}

    @kopf.on.event("apps", "v1", "controllerrevisions", labels={LABEL_DEPLOYMENT: kopf.PRESENT}, registry=registry)
    async def alert_recorded(
        namespace: str | None, labels: Any, annotations: Any, uid: str | None, type: str | None, **_: Any
    ) -> None:
        """Wake for alerts that the other replica recorded, too; the operator's own records are no news."""
        text = annotations.get(ANNOTATION_ALERTS)
        known = alerts.pop(str(uid), None)
        if text is not None and type != "DELETED":
            alerts[str(uid)] = text
            if text != known:
                operator.wake(namespace or "", labels[LABEL_DEPLOYMENT])

    async def child_changed(namespace: str | None, labels: Any, **_: Any) -> None:
        operator.wake(namespace or "", labels[LABEL_DEPLOYMENT])

    for group, version, plural in CHILDREN:
        kopf.on.event(
            group, version, plural, id=f"child-{plural}", labels={LABEL_DEPLOYMENT: kopf.PRESENT}, registry=registry
        )(child_changed)
    return registry
