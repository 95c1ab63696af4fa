"""Plain objects in and out of the API server, over the Kubernetes client's connection and credentials."""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from ddtree_operator.api.names import FIELD_MANAGER, GROUP, PLURAL, VERSION

Object = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of a kind live."""

    prefix: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        """URL path of a collection, an object or a subresource."""
        parts = [self.prefix]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(x, safe="") for x in (name, sub) if x]
        return "/".join(parts)


DDTREE = Kind(f"/apis/{GROUP}/{VERSION}", PLURAL)
DEPLOYMENT = Kind("/apis/apps/v1", "deployments")
REVISION = Kind("/apis/apps/v1", "controllerrevisions")
SERVICE = Kind("/api/v1", "services")
CONFIG_MAP = Kind("/api/v1", "configmaps")
SECRET = Kind("/api/v1", "secrets")
POD = Kind("/api/v1", "pods")
JOB = Kind("/apis/batch/v1", "jobs")
NODE = Kind("/api/v1", "nodes", namespaced=False)
EVENT = Kind("/api/v1", "events")
HTTP_ROUTE = Kind("/apis/gateway.networking.k8s.io/v1", "httproutes")
GATEWAY = Kind("/apis/gateway.networking.k8s.io/v1", "gateways")
LEASE = Kind("/apis/coordination.k8s.io/v1", "leases")

_BY_KIND = {
    "Deployment": DEPLOYMENT,
    "ControllerRevision": REVISION,
    "Service": SERVICE,
    "ConfigMap": CONFIG_MAP,
    "Job": JOB,
    "Secret": SECRET,
    "Event": EVENT,
    "Lease": LEASE,
}


class ApiError(Exception):
    """A call that the API server refused or that never reached it. ``status`` is 0 when there was no answer.

    ``verb`` and ``resource`` are those of the call, as RBAC names them, "" where there was none.
    """

    def __init__(self, status: int, message: str, verb: str = "", resource: str = "") -> None:
        super().__init__(message)
        self.status, self.verb, self.resource = status, verb, resource


class Kube:
    """The few verbs the operator uses. Every method raises :class:`ApiError`; none retries."""

    def __init__(self, api: Any, timeout: float = 30.0) -> None:
        self._api = api
        self._timeout = timeout
        self._may_write: Callable[[], bool] = lambda: True
        self.on_answer: Callable[[str, str, int], None] = lambda verb, resource, code: None  # code 0: no answer
        # told of every complete list that labels alone chose: kind, namespace, labels, objects, when it began
        self.on_list: Callable[[Kind, str, str, builtins.list[Object], float], None] = lambda *_: None

    def fenced(self, may_write: Callable[[], bool]) -> Kube:
        """The same connection, which refuses to write while ``may_write`` says no."""
        other = Kube(self._api, self._timeout)
        other._may_write, other.on_answer, other.on_list = may_write, self.on_answer, self.on_list
        return other

    @classmethod
    async def connect(cls) -> Kube:
        """In the cluster by the pod's service account, outside it by the kubeconfig."""
        settings = client.Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=settings)
        else:
            await config.load_kube_config(client_configuration=settings)
        return cls(client.ApiClient(configuration=settings))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _call(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Any = None, content: str = ""
    ) -> bytes:
        if method != "GET" and not self._may_write():
            raise ApiError(0, "this replica does not lead any more")
        call = _named(method, path)
        headers = {"Accept": "application/json"}
        if content:
            headers["Content-Type"] = content
        verb, url, headers, payload, post = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(
                verb, url, header_params=headers, body=payload, post_params=post, _request_timeout=self._timeout
            )
            data: bytes = await answer.read()
        except ApiException as error:
            self.on_answer(*call, int(error.status or 0))
            raise ApiError(int(error.status or 0), _message(error), *call) from None
        except Exception as error:  # the client library lets aiohttp's and ssl's errors through
            self.on_answer(*call, 0)
            raise ApiError(0, f"API server not reached: {error or type(error).__name__}", *call) from None
        self.on_answer(*call, int(answer.status))
        if answer.status >= 400:
            raise ApiError(answer.status, _body_message(data) or str(answer.reason), *call)
        return data

    async def _object(self, *args: Any, **kwargs: Any) -> Object:
        found: Object = json.loads(await self._call(*args, **kwargs))
        return found

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None when there is none."""
        try:
            return await self._object("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        """All objects that the selectors of labels and fields choose."""
        began = time.monotonic()
        found = [item async for page in self.pages(kind, namespace, labels, fields) for item in page]
        if labels and not fields:
            self.on_list(kind, namespace, labels, found, began)
        return found

    async def pages(
        self, kind: Kind, namespace: str = "", labels: str = "", fields: str = ""
    ) -> AsyncIterator[builtins.list[Object]]:
        """The same, in pieces: thousands of objects at once take hundreds of megabytes."""
        token = ""
        while True:
            query = {"limit": "500"} | ({"labelSelector": labels} if labels else {})
            query |= {"fieldSelector": fields} if fields else {}
            page = await self._object("GET", kind.path(namespace), query | ({"continue": token} if token else {}))
            yield page.get("items", [])
            token = page.get("metadata", {}).get("continue", "")
            if not token:
                return

    async def create(self, obj: Object) -> Object | None:
        """Create; None when it was there already."""
        kind = _BY_KIND[obj["kind"]]
        try:
            # As YAML (JSON is YAML) the server brings free-form fields into its own byte order. Sent as JSON, a
            # ControllerRevision's data would differ from itself at the first patch and be refused as immutable.
            return await self._object(
                "POST",
                kind.path(obj["metadata"]["namespace"]),
                {"fieldManager": FIELD_MANAGER},
                json.dumps(obj),
                "application/yaml",
            )
        except ApiError as error:
            if error.status == 409:
                return None
            raise

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        """JSON merge patch."""
        return await self._object(
            "PATCH", kind.path(namespace, name, sub), {"fieldManager": FIELD_MANAGER}, body, MERGE_PATCH
        )

    async def json_patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Object]) -> Object:
        """JSON patch; a test that fails is 422."""
        return await self._object(
            "PATCH", kind.path(namespace, name), {"fieldManager": FIELD_MANAGER}, operations, JSON_PATCH
        )

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete with its dependents; fine when it is gone already."""
        try:
            await self._call("DELETE", kind.path(namespace, name), {"propagationPolicy": "Background"})
        except ApiError as error:
            if error.status != 404:
                raise

    async def log(
        self, namespace: str, pod: str, container: str = "", tail: int = 60, *, previous: bool = False
    ) -> str:
        """The last lines of a container's log, or of the run before its last restart; "" when there is none."""
        query = {"tailLines": str(tail), "limitBytes": "200000"} | ({"container": container} if container else {})
        query |= {"previous": "true"} if previous else {}
        try:
            text = (await self._call("GET", POD.path(namespace, pod, "log"), query)).decode(errors="replace")
        except ApiError as error:
            if error.status in {400, 404}:
                return ""
            raise
        return "" if text.startswith(_NO_LOG) else text


_NO_LOG = "unable to retrieve container logs for "  # the kubelet's whole answer, with 200, when a container is gone


def _named(method: str, path: str) -> tuple[str, str]:
    """Verb and resource of a call as RBAC and the API server's own metrics name them."""
    parts = path.split("/")[(3 if path.startswith("/api/") else 4) :]
    if parts[0] == "namespaces" and len(parts) > 2:
        parts = parts[2:]
    verb = {"GET": "get" if len(parts) > 1 else "list", "POST": "create"}.get(method, method.lower())
    return verb, "/".join(parts[:1] + parts[2:3])


def _message(error: Any) -> str:
    return _body_message(error.body) or str(error.reason or error)


def _body_message(body: Any) -> str:
    try:
        status = json.loads(body)
        return str(status.get("message", ""))
    except (TypeError, ValueError, AttributeError):
        return ""
