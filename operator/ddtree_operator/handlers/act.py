"""The core's actions, carried out. Each is safe to repeat and safe to be interrupted after."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable
from typing import Any

from ddtree_operator.analysis import watch as analysis
from ddtree_operator.analysis.policy import Policy, tie_gap
from ddtree_operator.analysis.watch import epoch_of, expected_of, policy_for
from ddtree_operator.api.names import API_VERSION, ENGINE_PORT, KIND, LABEL_DEPLOYMENT
from ddtree_operator.api.spec import Algorithm, DDTreeSpec
from ddtree_operator.core.actions import (
    Action,
    Analyze,
    ApplyCanaryService,
    ApplyEngines,
    ApplyRoute,
    ApplyService,
    Attest,
    DeleteCanaryService,
    DeleteEngines,
    Emit,
    KeepImage,
    PruneRevision,
    SaveRevision,
    StartBuild,
    Watch,
)
from ddtree_operator.core.revisions import baseline_speculative, parse
from ddtree_operator.core.units import iso
from ddtree_operator.handlers import live_prompts, memory, records
from ddtree_operator.handlers.analyses import Analyses, Kept
from ddtree_operator.handlers.analyses import Key as AnalysisKey
from ddtree_operator.handlers.builds import Builds
from ddtree_operator.handlers.keeping import Keeping
from ddtree_operator.handlers.kube import CONFIG_MAP, DEPLOYMENT, POD, REVISION, SERVICE, ApiError, Kube, Object
from ddtree_operator.handlers.observe import View
from ddtree_operator.handlers.places import affinity_of
from ddtree_operator.handlers.read import belongs, engines_behind
from ddtree_operator.handlers.routes import Routes
from ddtree_operator.handlers.settings import Settings
from ddtree_operator.handlers.watches import Key as WatchKey
from ddtree_operator.handlers.watches import Watches
from ddtree_operator.probe.engine import EngineInfo, engine_reader
from ddtree_operator.probe.http import EngineError
from ddtree_operator.rollout import manifests

log = logging.getLogger("ddtree.act")

PATIENCE = 3.0  # seconds that a look waits for what a registry is told

INFO_TRIES = 5  # looks, 2 s apart, in which engines are asked for their settings before an analysis

EVENT_QUIET = 300.0  # seconds in which the same Event is not repeated


class Actor:
    """Writes what the core decided."""

    def __init__(
        self,
        kube: Kube,
        builds: Builds,
        keeping: Keeping,
        analyses: Analyses,
        watches: Watches,
        settings: Settings,
        session: Any,
        routes: Routes,
    ) -> None:
        self._kube = kube
        self._routes = routes
        self._builds = builds
        self._keeping = keeping
        self._analyses = analyses
        self._watches = watches
        self._settings = settings
        self._session = session
        self._said: dict[tuple[str, str, str], float] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._silent: dict[tuple[str, str], tuple[AnalysisKey, int]] = {}  # analyses that wait, and for how many looks
        self.refused: dict[tuple[str, str, str], tuple[float, str]] = {}  # (ns, name, revision) -> (when, why)

    async def act(self, view: View, action: Action) -> None:
        """Carry out one action."""
        meta = view.resource["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        match action:
            case SaveRevision(revision):
                record = memory.object_name(name, revision.hash)
                version = view.versions.get(revision.hash)
                if version is not None:
                    await self._kube.patch(REVISION, namespace, record, memory.state_patch(revision, version))
                elif await self._kube.create(memory.to_object(revision, view.resource)) is None:
                    raise ApiError(409, f"ControllerRevision {record} was just made; looking again")
            case PruneRevision(revision):
                if view.spec is not None:
                    await self._aside(view.resource, "", self._keeping.release(view.spec, view.resource, revision))
                await self._kube.delete(REVISION, namespace, memory.object_name(name, revision.hash))
                steps = range(len(view.spec.canary.steps) if view.spec else 0)
                for attempt in range(revision.attempt + 1):
                    for step in steps:
                        record = records.object_name(name, revision.hash, attempt, step)
                        await self._kube.delete(CONFIG_MAP, namespace, record)
            case StartBuild():
                wanted = view.observed.revision(action.revision)
                if view.order is not None and wanted is not None:
                    await self._builds.start(view.order, view.resource, wanted)
            case Attest(image):
                assert view.spec is not None
                work = self._builds.attest(view.spec, namespace, image)
                await self._aside(view.resource, "NotAttested", work)
            case KeepImage(revision):
                assert view.spec is not None
                work = self._keeping.keep(view.spec, view.resource, revision)
                await self._aside(view.resource, "RollbackImageNotKept", work)
            case ApplyEngines():
                await self._engines(view, action)
            case DeleteEngines(set_name):
                await self._kube.delete(DEPLOYMENT, namespace, set_name)
            case ApplyService():
                await self._service(view, action)
            case ApplyCanaryService() | DeleteCanaryService() | ApplyRoute():
                assert view.spec is not None
                await self._routes.act(view.spec, view.resource, view.observed.canary_service, action)
            case Analyze():
                await self._analyze(view, action)
            case Watch():
                await self._watch(view, action)
            case Emit():
                await self.emit(view.resource, action)

    async def _engines(self, view: View, action: ApplyEngines) -> None:
        meta = view.resource["metadata"]
        namespace = meta["namespace"]
        live = view.objects.get(action.name)
        if live is not None:
            if int(live["spec"].get("replicas", 1)) != action.replicas:
                await self._kube.patch(DEPLOYMENT, namespace, action.name, {"spec": {"replicas": action.replicas}})
            return
        key = (namespace, meta["name"], action.revision)
        if key in self.refused:  # tried again after a while
            return
        assert view.spec is not None
        spec = _as_spec(view.spec, action)
        affinity = affinity_of(spec, action.pins)
        why = ""
        try:
            obj = manifests.engines(action, spec, view.resource, self._settings.engine, affinity)
            if await self._kube.create(obj) is None:
                why = await self._taken(namespace, action.name, meta["uid"])
        except ApiError as error:
            if error.status not in {400, 403, 422}:
                raise
            why = f"the API server refused Deployment {action.name} ({error})"
            why += "; correct spec.engine.podTemplate or the cluster's policy"
        except (AttributeError, KeyError, TypeError):
            why = "spec.engine.podTemplate has not the form of a pod template; correct it"
        if why:
            self.refused[key] = (time.time(), why)

    async def _taken(self, namespace: str, name: str, uid: str) -> str:
        """What to say when a Deployment of that name was there before; "" when it is ours after all."""
        found = await self._kube.get(DEPLOYMENT, namespace, name)
        if found is None or belongs(found, uid) or found["metadata"].get("deletionTimestamp"):
            return ""
        return f"Deployment {name} exists and does not belong to this resource; delete it"

    async def _service(self, view: View, action: ApplyService) -> None:
        meta = view.resource["metadata"]
        at = iso(action.at)
        if view.observed.service_selector is None:
            if await self._kube.create(manifests.service(view.resource, action.selector, at)) is None:
                raise ApiError(409, f"Service {meta['name']} was just made by someone else; looking again")
            return
        live = await self._kube.get(SERVICE, meta["namespace"], meta["name"])
        if live is None or not belongs(live, meta["uid"]):
            return  # somebody else's: the next look says so
        if not action.anyway:
            await self._check_switch(view, live["spec"].get("selector") or {}, action.selector)
        gone = {k: None for k in (live["spec"].get("selector") or {}) if k not in action.selector}
        body = {
            "metadata": {"annotations": {manifests.ANNOTATION_SWITCHED_AT: at}},
            "spec": {"selector": {**gone, **action.selector}},
        }
        await self._kube.patch(SERVICE, meta["namespace"], meta["name"], body)

    async def _check_switch(self, view: View, now: dict[str, str], then: dict[str, str]) -> None:
        """A look may be old by the time it is acted on: never leave ready engines for a selector that reaches none."""
        meta = view.resource["metadata"]
        mine = f"{LABEL_DEPLOYMENT}={meta['name']}"
        pods = await self._kube.list(POD, meta["namespace"], mine)
        deployments = await self._kube.list(DEPLOYMENT, meta["namespace"], mine)
        if engines_behind(now, deployments, pods) and not engines_behind(then, deployments, pods):
            raise ApiError(409, f"Service {meta['name']} would be switched to engines that are not ready; wait")

    async def _analyze(self, view: View, action: Analyze) -> None:
        key, spec = view.analysis_key, view.spec
        if key is None or spec is None:
            return
        baseline, canary = view.observed.set(action.baseline), view.observed.set(action.canary)
        urls = [[f"http://{p.ip}:{ENGINE_PORT}" for p in s.ready] if s else [] for s in (baseline, canary)]
        if not urls[0] or not urls[1]:
            return
        wanted = spec.canary.analysis
        if not self._analyses.known(key):
            ours, other = await self._info(spec, urls[1][0]), await self._info(spec, urls[0][0])
            if (ours is None or other is None) and self._again(key):
                return
            policy = Policy.from_spec(
                wanted,
                dtype=ours.dtype if ours else "",
                deterministic=bool(ours and other and ours.deterministic and other.deterministic),
                canary_window=ours.draft_tokens if ours else 0,
                baseline_window=other.draft_tokens if other else 0,
                canary_speculates=spec.engine.speculative.algorithm is not Algorithm.NONE,
                baseline_speculates=_baseline_speculates(view, baseline.revision if baseline else "", action),
            )
            self._silent.pop(key[:2], None)
            earlier = await records.load(self._kube, key, view.resource["metadata"]["uid"])
            self._analyses.adopt(key, policy, wanted.max_pairs, wanted.prometheus, earlier)
        self._analyses.ensure(
            key,
            prompts=view.prompts,
            baseline_urls=urls[0],
            canary_urls=urls[1],
            seed=wanted.seed,
            concurrency=wanted.concurrency,
            max_tokens=wanted.max_tokens,
            checks=wanted.prometheus,
            users=live_prompts.sources(view.users, view.observed),
        )

    async def _watch(self, view: View, action: Watch) -> None:
        """Begin the watch, or its next epoch, with the canary's recorded answers; then say where the engines are."""
        key, spec, engines = view.watch_key, view.spec, view.observed.set(action.engines)
        if key is None or spec is None or engines is None:
            return
        urls = [f"http://{p.ip}:{ENGINE_PORT}" for p in engines.ready]
        epoch = epoch_of(action.since, action.length)
        if urls and self._watches.epoch(key) != epoch:
            kept = await self._newest_record(view, key)
            speculates = spec.engine.speculative.algorithm is not Algorithm.NONE
            expected, failures = expected_of(kept.record.pairs if kept else (), speculates)
            watch = analysis.Watch(policy_for(spec.canary.analysis, speculates), expected, failures, epoch)
            info, parity = await self._info(spec, urls[0]), spec.canary.analysis.parity
            known = kept.record.policy.tie_gap if kept else tie_gap(parity.tie_gap)
            gap = tie_gap(parity.tie_gap, info.dtype, info.deterministic) if info else known
            if self._watches.begin(key, watch, view.prompts, spec.canary.analysis.max_tokens, gap) == 0:
                text = (
                    f"revision {key[2]} is not watched: its canary's answers to the prompts are not on record (its "
                    "analysis was passed over, or its record or its prompts are gone); alerts are heeded all the same"
                )
                await self.emit(view.resource, Emit("Warning", "NotWatched", text))
        self._watches.reach(key, urls)

    async def _newest_record(self, view: View, key: WatchKey) -> Kept | None:
        """The record of the last analysis step that has one."""
        assert view.spec is not None
        for step in reversed(range(len(view.spec.canary.steps))):
            if view.spec.canary.steps[step].analysis is not None:
                kept = await records.load(self._kube, (*key, step), view.resource["metadata"]["uid"])
                if kept is not None:
                    return kept
        return None

    def _again(self, key: AnalysisKey) -> bool:
        """Whether an analysis waits for engines that did not say what they compute in: for so many looks, since its
        tolerance holds to its end. After that the coarsest is assumed, and the pairs will tell what is wrong.
        """
        before, tries = self._silent.get(key[:2], (key, 0))
        tries = tries + 1 if before == key else 1
        self._silent[key[:2]] = (key, tries)
        return tries < INFO_TRIES

    async def _info(self, spec: DDTreeSpec, url: str) -> EngineInfo | None:
        """What an engine says about itself; None when it cannot be asked."""
        try:
            return await engine_reader(spec.engine.kind, self._session, url).info()
        except EngineError as error:
            log.warning("settings of %s not read: %s", url, error)
            return None

    async def _aside(self, resource: Object, reason: str, work: Awaitable[str | bool]) -> None:
        """Work with a registry, which may be slow: waited for a while, then it goes on beside the looks.

        What it answers, if it is a sentence, becomes an Event.
        """

        async def go() -> None:
            try:
                why = await work
            except ApiError as error:
                log.warning("%s", error)
                return
            if isinstance(why, str) and why:
                await self.emit(resource, Emit("Warning", reason, why))

        task = asyncio.create_task(go())
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        await asyncio.wait({task}, timeout=PATIENCE)

    async def emit(self, resource: Object, event: Emit) -> None:
        """Write an Event, unless the same one was written a short while ago. Never fails the reconcile."""
        meta = resource["metadata"]
        key = (meta["uid"], event.reason, event.message)
        now = time.time()
        if now - self._said.get(key, 0.0) < EVENT_QUIET:
            return
        self._said = {k: t for k, t in self._said.items() if now - t < EVENT_QUIET} | {key: now}
        obj = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:12]}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1000],
            "source": {"component": "ddtree-operator"},
            "firstTimestamp": iso(now),
            "lastTimestamp": iso(now),
            "count": 1,
        }
        try:
            await self._kube.create(obj)
        except ApiError as error:
            log.warning("Event %s not written: %s", event.reason, error)


def _as_spec(current: DDTreeSpec, action: ApplyEngines) -> DDTreeSpec:
    """The spec that an engine set runs: the revision's own part over the resource's present rest."""
    rest = current.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for key in ("model", "drafter", "engine", "placement"):
        rest.pop(key, None)
    return parse(rest | action.spec)


def _baseline_speculates(view: View, revision: str, action: Analyze) -> bool | None:
    baseline = view.observed.set(action.baseline)
    if baseline is None or view.spec is None:
        return None
    if baseline.baseline:
        return baseline_speculative(view.spec).algorithm is not Algorithm.NONE
    known = view.observed.revision(revision)
    if known is None:
        return None
    return str(known.spec.get("engine", {}).get("speculative", {}).get("algorithm", "DDTREE")) != "NONE"
