"""HTTPRoutes and the canary's Service: read, and changed where they are ours."""

from __future__ import annotations

import time
from typing import Any

from ddtree_operator.api.names import ANNOTATION_LEFT_AT, ANNOTATION_ROUTE, LABEL_DEPLOYMENT
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import ApplyCanaryService, ApplyRoute, DeleteCanaryService
from ddtree_operator.core.facts import CanaryService, RouteFact
from ddtree_operator.core.units import epoch, iso
from ddtree_operator.handlers.kube import DEPLOYMENT, GATEWAY, HTTP_ROUTE, POD, SERVICE, ApiError, Kube, Object
from ddtree_operator.handlers.read import belongs, engines_behind
from ddtree_operator.rollout import manifests, route

REFUSED_AGAIN = 60.0  # seconds after which a refused change is tried again, though the route is as it was

_NOT_INSTALLED = "the Gateway API is not installed in this cluster (there is no kind HTTPRoute); install its CRDs"
_NO_RIGHT = "the operator may not read HTTPRoutes here ({}); install its chart with rbac.gateway=true"


def canary_service(services: list[Object], name: str, uid: str) -> CanaryService | None:
    """The canary's Service; None when there is none, or it is somebody else's."""
    found = next((s for s in services if s["metadata"]["name"] == manifests.canary_name(name)), None)
    if found is None or not belongs(found, uid) or found["metadata"].get("deletionTimestamp"):
        return None
    notes = found["metadata"].get("annotations") or {}
    selector = dict(found["spec"].get("selector") or {})
    return CanaryService(selector, notes.get(ANNOTATION_ROUTE, ""), epoch(notes.get(ANNOTATION_LEFT_AT)))


class Routes:
    """Reads a resource's route, and writes our part of it."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        # (namespace, name) -> version of the route that was refused, when, and why
        self._refused: dict[tuple[str, str], tuple[str, float, str]] = {}
        # (namespace, name) -> the state of route and Service that is in force, and since when
        self._seen: dict[tuple[str, str], tuple[Any, float]] = {}

    async def look(self, spec: DDTreeSpec | None, resource: Object, beside: CanaryService | None) -> RouteFact | None:
        """The route that the canary's Service was made for, or the spec's; None when no route is wanted."""
        name = beside.route if beside is not None else ""
        if not name and spec is not None and spec.traffic.gateway is not None:
            name = spec.traffic.gateway.http_route
        if not name:
            return None
        space = resource["metadata"]["namespace"]
        try:
            live = await self._kube.get(HTTP_ROUTE, space, name)
            if live is None:
                return RouteFact(name, problem=await self._absent(space, name))
        except ApiError as error:
            if error.status != 403:
                raise
            return RouteFact(name, problem=_NO_RIGHT.format(error))
        ours = _ours(spec, resource)
        problem = ""
        try:
            route.check(live, ours)
        except route.RouteError as error:
            problem = f"HTTPRoute {name} cannot carry weights: {error}"
        version, at, why = self._refused.get((space, resource["metadata"]["name"]), ("", 0.0, ""))
        if version == live["metadata"]["resourceVersion"] and time.time() - at < REFUSED_AGAIN:
            problem = problem or why
        waits = route.readiness(live, await self._gateways(live))
        return RouteFact(
            name,
            route.share_of(live, ours),
            touched=route.touched(live, ours),
            named=route.named(live, ours),
            problem=problem,
            waits=waits,
            since=self._in_force(resource, live, beside, waits),
        )

    def forget(self, namespace: str, name: str) -> None:
        """The resource is gone."""
        self._refused.pop((namespace, name), None)
        self._seen.pop((namespace, name), None)

    def _in_force(self, resource: Object, live: Object, beside: CanaryService | None, waits: str) -> float:
        """Since when route and canary's Service were seen as they are, in force. A new process counts anew."""
        key = (resource["metadata"]["namespace"], resource["metadata"]["name"])
        if waits:
            self._seen.pop(key, None)
            return 0.0
        state = (live["metadata"]["uid"], live["metadata"].get("generation"), beside)
        before, since = self._seen.get(key, (None, 0.0))
        if before != state:
            since = time.time()
            self._seen[key] = state, since
        return since

    async def _absent(self, space: str, name: str) -> str:
        try:
            await self._kube.list(HTTP_ROUTE, space)
        except ApiError as error:
            if error.status != 404:
                raise
            return _NOT_INSTALLED
        return f"HTTPRoute {name} does not exist in namespace {space}; create it, or correct spec.traffic.gateway"

    async def _gateways(self, live: Object) -> dict[tuple[str, str], Object | None]:
        """Gateways that the route hangs on, as far as they may be read: often they are in another namespace."""
        found: dict[tuple[str, str], Object | None] = {}
        for key in route.gateways_of(live):
            try:
                found[key] = await self._kube.get(GATEWAY, *key)
            except ApiError as error:
                if error.status != 403:
                    raise
        return found

    async def act(
        self,
        spec: DDTreeSpec,
        resource: Object,
        beside: CanaryService | None,
        action: ApplyCanaryService | DeleteCanaryService | ApplyRoute,
    ) -> None:
        """Carry out one action."""
        meta = resource["metadata"]
        match action:
            case ApplyRoute():
                await self._route(spec, resource, action)
            case ApplyCanaryService():
                await self._service(resource, beside, action)
            case DeleteCanaryService():
                live = await self._kube.get(HTTP_ROUTE, meta["namespace"], beside.route) if beside else None
                if live is not None and route.touched(live, _ours(spec, resource)):
                    raise ApiError(409, f"HTTPRoute {live['metadata']['name']} names the canary again; looking again")
                await self._kube.delete(SERVICE, meta["namespace"], manifests.canary_name(meta["name"]))

    async def _check_engines(self, resource: Object) -> None:
        """A look may be old by the time it is acted on: a route never names a canary without ready engines."""
        meta = resource["metadata"]
        service = await self._kube.get(SERVICE, meta["namespace"], manifests.canary_name(meta["name"]))
        mine = f"{LABEL_DEPLOYMENT}={meta['name']}"
        deployments = await self._kube.list(DEPLOYMENT, meta["namespace"], mine)
        pods = await self._kube.list(POD, meta["namespace"], mine)
        selector = (service or {}).get("spec", {}).get("selector") or {}
        if service is None or not belongs(service, meta["uid"]) or not engines_behind(selector, deployments, pods):
            raise ApiError(
                409, f"no engine behind Service {manifests.canary_name(meta['name'])} is ready; looking again"
            )

    async def _service(self, resource: Object, beside: CanaryService | None, action: ApplyCanaryService) -> None:
        meta = resource["metadata"]
        name = manifests.canary_name(meta["name"])
        left = iso(action.left_at) if action.left_at else None
        notes: dict[str, Any] = {ANNOTATION_ROUTE: action.route, ANNOTATION_LEFT_AT: left}
        if beside is None:
            given = {k: v for k, v in notes.items() if v is not None}
            if await self._kube.create(manifests.canary_service(resource, action.selector, given)) is None:
                raise ApiError(409, f"Service {name} exists; looking again")
            return
        live = await self._kube.get(SERVICE, meta["namespace"], name)
        if live is None or not belongs(live, meta["uid"]):
            return
        gone = {k: None for k in beside.selector if k not in action.selector}
        body = {"metadata": {"annotations": notes}, "spec": {"selector": {**gone, **action.selector}}}
        await self._kube.patch(SERVICE, meta["namespace"], name, body)

    async def _route(self, spec: DDTreeSpec, resource: Object, action: ApplyRoute) -> None:
        """From a fresh read, on exactly that version; a route that moved meanwhile is looked at again."""
        meta = resource["metadata"]
        space, key = meta["namespace"], (meta["namespace"], meta["name"])
        live = await self._kube.get(HTTP_ROUTE, space, action.name)
        if live is None:
            return
        version = live["metadata"]["resourceVersion"]
        try:
            operations = route.patch(live, _ours(spec, resource), action.share)
        except route.RouteError as error:
            self._refused[key] = (version, time.time(), f"HTTPRoute {action.name} cannot carry this share: {error}")
            return
        if not operations:
            return
        if action.share.gives:
            await self._check_engines(resource)
        try:
            await self._kube.json_patch(HTTP_ROUTE, space, action.name, operations)
        except ApiError as error:
            if error.status not in {403, 422}:
                raise
            now = await self._kube.get(HTTP_ROUTE, space, action.name)
            if now is None or now["metadata"]["resourceVersion"] != version:
                raise ApiError(409, f"HTTPRoute {action.name} was changed meanwhile; looking again") from None
            why = f"the API server refused to change HTTPRoute {action.name}: {error}"
            self._refused[key] = (version, time.time(), why)
            raise
        else:
            self._refused.pop(key, None)


def _ours(spec: DDTreeSpec | None, resource: Object) -> route.Ours:
    meta = resource["metadata"]
    gateway = spec.traffic.gateway if spec is not None else None
    rules = tuple(gateway.rules) if gateway is not None else ()
    return route.Ours(meta["name"], manifests.canary_name(meta["name"]), meta["namespace"], rules)
