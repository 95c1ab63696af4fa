"""The operator process: kopf watches, a queue works, a resync catches whatever a watch missed.

kopf's handlers here only put keys in line: no annotations, no finalizers, nothing kept between events.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kopf

from ddtree_operator.alerts.ledger import ANNOTATION_ALERTS
from ddtree_operator.api.names import ANNOTATION_ACTION, GROUP, LABEL_DEPLOYMENT, PLURAL, VERSION
from ddtree_operator.handlers import lasting
from ddtree_operator.handlers.operator import Operator
from ddtree_operator.handlers.settings import Settings

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


def build(settings: Settings, namespaces: list[str], host: str = "0.0.0.0", port: int = 8080) -> kopf.OperatorRegistry:
    """A kopf registry with the operator's handlers."""
    lasting.install()
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
        operator.health.freshness.delivered(body, deleted=type == "DELETED")
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
            operator.health.children.forget(namespace or "", name or "")
        operator.wake(namespace or "", name or "", urgent=type is not None)  # None: it was there at the start

    alerts: dict[str, Any] = {}

    @kopf.on.event("apps", "v1", "controllerrevisions", labels={LABEL_DEPLOYMENT: kopf.PRESENT}, registry=registry)
    async def alert_recorded(
        namespace: str | None, body: Any, labels: Any, annotations: Any, uid: str | None, type: str | None, **_: Any
    ) -> None:
        """Wake for alerts that the other replica recorded, too; the operator's own records are no news."""
        operator.health.children.delivered("controllerrevisions", body, deleted=type == "DELETED")
        text = annotations.get(ANNOTATION_ALERTS)
        known = alerts.pop(str(uid), None)
        if text is not None and type != "DELETED":
            alerts[str(uid)] = text
            if text != known:
                operator.wake(namespace or "", labels[LABEL_DEPLOYMENT], urgent=True)

    async def child_changed(
        namespace: str | None, resource: kopf.Resource, body: Any, labels: Any, type: str | None, **_: Any
    ) -> None:
        if resource.plural != "jobs":  # no look lists them
            operator.health.children.delivered(resource.plural, body, deleted=type == "DELETED")
        operator.wake_soon(namespace or "", labels[LABEL_DEPLOYMENT])

    for group, version, plural in CHILDREN:
        kopf.on.event(
            group, version, plural, id=f"child-{plural}", labels={LABEL_DEPLOYMENT: kopf.PRESENT}, registry=registry
        )(child_changed)
    return registry
