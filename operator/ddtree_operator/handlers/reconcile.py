"""One resource, looked at and brought one step further. Called for events, after a while, and on resync."""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from dataclasses import replace
from typing import Any

import aiohttp

from ddtree_operator.analysis.types import Verdict
from ddtree_operator.core import unwritten
from ddtree_operator.core.actions import QUIET, Analyze, Emit, Watch
from ddtree_operator.core.decide import decide
from ddtree_operator.core.facts import Problem
from ddtree_operator.core.held_size import event, held_size, told
from ddtree_operator.core.meanwhile import ENGINES_REFUSED
from ddtree_operator.core.unwritten import CONFLICTS, Refusal
from ddtree_operator.handlers import logs, read, records
from ddtree_operator.handlers.act import Actor
from ddtree_operator.handlers.analyses import Analyses, Key, Running
from ddtree_operator.handlers.builds import Builds
from ddtree_operator.handlers.keeping import Keeping
from ddtree_operator.handlers.kube import DDTREE, HTTP_ROUTE, ApiError, Kube, Object
from ddtree_operator.handlers.metrics import Metrics
from ddtree_operator.handlers.neighbours import Neighbours
from ddtree_operator.handlers.observe import Observer, View
from ddtree_operator.handlers.routes import Routes
from ddtree_operator.handlers.settings import Settings
from ddtree_operator.handlers.watches import Watches
from ddtree_operator.rollout.merge import difference

log = logging.getLogger("ddtree.reconcile")

BUSY = 2.0  # seconds between looks while a rollout is under way
LOOKS = 10  # a second, in all, at resources of which nothing is heard: with many, each is looked at less often
SOONEST = 0.6  # of that time: looks at resources at rest are spread over the rest of it
REFUSED_AGAIN = 60.0  # seconds after which a refused write is tried again
_MOVING = {"Building", "Placing", "Starting", "Analyzing", "Promoting", "Pending", "Degraded"}


class Reconciler:
    """Joins observer, core and actor."""

    def __init__(
        self, kube: Kube, settings: Settings, session: aiohttp.ClientSession, wake: Any, metrics: Metrics
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._metrics = metrics
        self._resources: dict[tuple[str, str], dict[str, Any]] = {}  # what an owner reference needs of each
        self._moving: set[tuple[str, str]] = set()  # rollouts under way
        self._conflicts: dict[tuple[str, str], int] = {}  # looks in a row that a conflict ended
        self.analyses = Analyses(session, self._save_record, wake)
        builds = Builds(kube, settings.build)
        neighbours = Neighbours(kube, settings.namespaces, everywhere=settings.all_pods)
        keeping = Keeping(builds, settings.build)
        self.watches = Watches(session, wake, lambda key: metrics.divergences.labels(*key[:3]).inc())
        self._routes = Routes(kube)
        self._observer = Observer(kube, builds, keeping, neighbours, self.analyses, self.watches, self._routes)
        self._actor = Actor(kube, builds, keeping, self.analyses, self.watches, settings, session, self._routes)

    @property
    def resync(self) -> float:
        """Seconds within which a resource at rest is looked at again."""
        return max(self._settings.resync, len(self._resources) / LOOKS)

    def until_next_look(self, key: tuple[str, str]) -> float:
        """Seconds until the next look at a resource at rest: its own share of the resync, always the same.

        Resources that came to rest together would else be looked at together for ever, all at once.
        """
        share = zlib.crc32("/".join(key).encode()) / 2**32
        return self.resync * (SOONEST + (1 - SOONEST) * share)

    async def _save_record(self, key: Key, run: Running, verdict: Verdict) -> str:
        resource = self._resources.get(key[:2])
        return await records.save(self._kube, key, run, verdict, resource) if resource else ""

    async def reconcile(self, key: tuple[str, str]) -> float | None:
        """One look. Returns seconds until the next one is wanted; None for a resource that is gone."""
        with logs.about(namespace=key[0], name=key[1]):
            return await self._look(key)

    async def _look(self, key: tuple[str, str]) -> float | None:
        namespace, name = key
        resource = await self._kube.get(DDTREE, namespace, name)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            self.analyses.forget(namespace, name)
            self.watches.forget(namespace, name)
            self._resources.pop(key, None)
            self._moving.discard(key)
            self._conflicts.pop(key, None)
            self._routes.forget(namespace, name)
            self._metrics.forget(key)
            return None
        uid = resource["metadata"]["uid"]
        self._resources[key] = {
            "apiVersion": resource["apiVersion"],
            "kind": resource["kind"],
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
        }
        view = await self._observer.look(resource)
        self._refused(view)
        old = resource.get("status") or {}
        spec = resource.get("spec") or {}
        held = held_size(resource, view.observed, old)
        decision = decide(
            name,
            spec if held is None else spec | {"replicas": held},
            view.observed,
            time.time(),
            generation=int(resource["metadata"].get("generation", 0)),
            status=unwritten.cleared(old),
        )
        if held is not None:
            fresh = (event(held),) if old.get("heldReplicas") != held else ()
            actions = (*decision.actions, *fresh)
            decision = replace(decision, status=told(decision.status, held), actions=actions)
        nothing_held = view.spec is None  # it is not known what is wanted, and nothing of what was learnt is dropped
        if not nothing_held:
            self.analyses.forget(namespace, name, keep=view.analysis_key)
        there = read.addresses(view.observed.sets)
        self.analyses.there(namespace, name, there)
        self.watches.there(namespace, name, there)
        watching = decision.noted or any(isinstance(a, Watch) for a in decision.actions)
        if not nothing_held:
            self.watches.forget(namespace, name, keep=view.watch_key if watching else None)
        measuring = decision.undisturbed or any(isinstance(a, Analyze) for a in decision.actions)
        if decision.status.get("phase") != "Starting" and not measuring:
            self.analyses.rest(namespace, name)  # a record stays as it was when somebody decided over it
        logs.add(revision=str(decision.status.get("revision") or ""), step=str(decision.status.get("step") or ""))
        self._metrics.looked(key, view.observed, decision.status)
        try:
            for action in decision.actions:
                if not isinstance(action, QUIET):
                    log.info("%s", _brief(action))
                await self._actor.act(view, action)
                self._metrics.acted(view.observed, action)
        except ApiError as error:
            await self._not_written(resource, error)
            if error.status != 409:
                raise
            log.info("%s", error)  # somebody else wrote meanwhile: what was decided may be old
            return 0.2 if self._conflicts[key] < CONFLICTS else BUSY
        if view.request_error:
            await self._actor.emit(resource, Emit("Warning", "RequestRefused", view.request_error))
        try:
            await self._write_status(resource, decision.status)
        except ApiError as error:
            await self._not_written(resource, error)
            raise
        self._conflicts.pop(key, None)
        refused = any(key == k[:2] for k in self._actor.refused)
        if decision.again and not refused:
            return 0.05
        if decision.status.get("phase") in _MOVING:
            self._moving.add(key)
            return min(decision.wake, max(BUSY, len(self._moving) / LOOKS))
        self._moving.discard(key)
        return min(decision.wake, self.until_next_look(key))

    async def _write_status(self, resource: Object, status: Object) -> None:
        meta = resource["metadata"]
        patch = difference(resource.get("status") or {}, status)
        if patch:
            await self._kube.patch(DDTREE, meta["namespace"], meta["name"], {"status": patch}, sub="status")

    async def _not_written(self, resource: Object, error: ApiError) -> None:
        """Tell of a refusal that does not go away by itself, in an Event and, if that can be written, the status."""
        meta = resource["metadata"]
        key = (meta["namespace"], meta["name"])
        if error.status == 409:
            self._conflicts[key] = self._conflicts.get(key, 0) + 1
        refusal = Refusal(error.status, error.verb, error.resource, str(error), self._conflicts.get(key, 0))
        if not refusal.reason:
            return
        await self._actor.emit(resource, Emit("Warning", "WriteRefused", refusal.sentence))
        if error.resource in {HTTP_ROUTE.plural, f"{DDTREE.plural}/status"}:
            return  # condition Routed says so from the next look on; the status cannot say that it cannot be written
        told = unwritten.told(resource.get("status") or {}, refusal, time.time(), int(meta.get("generation", 0)))
        with contextlib.suppress(ApiError):
            await self._write_status(resource, told)

    def _refused(self, view: View) -> None:
        """What the API server refused to create is a problem of the spec until it is tried again."""
        meta = view.resource["metadata"]
        for key, (at, why) in list(self._actor.refused.items()):
            if key[:2] != (meta["namespace"], meta["name"]):
                continue
            if time.time() - at > REFUSED_AGAIN:
                del self._actor.refused[key]
            else:
                problem = Problem(ENGINES_REFUSED, why)
                seen = view.observed
                view.observed = type(seen)(
                    **{f: getattr(seen, f) for f in seen.__dataclass_fields__ if f != "problems"},
                    problems=(*seen.problems, problem),
                )


def _brief(action: Any) -> str:
    kind = type(action).__name__
    for field in ("name", "selector", "revision"):
        value = getattr(action, field, None)
        if value is not None:
            shown = getattr(value, "hash", value)
            result = getattr(value, "result", "")
            return f"{kind} {shown}" + (f" {result}" if result else "")
    return kind
