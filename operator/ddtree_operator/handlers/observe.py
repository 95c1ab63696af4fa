"""Everything the core needs to know about one resource, read afresh from the API server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from ddtree_operator.alerts import ledger
from ddtree_operator.analysis.prompts import Prompt, load_prompts, shipped_prompts
from ddtree_operator.api.names import ENGINE_CONTAINER, LABEL_DEPLOYMENT, LABEL_REVISION
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core import revisions
from ddtree_operator.core.facts import (
    AlertFact,
    AnalysisFact,
    BuildFact,
    EngineSet,
    Observed,
    PlacementFact,
    Problem,
    Revision,
    WayBack,
)
from ddtree_operator.core.standstill import in_force
from ddtree_operator.handlers import live_prompts, read
from ddtree_operator.handlers.analyses import Analyses, Key
from ddtree_operator.handlers.builds import Builds, Order, silent
from ddtree_operator.handlers.errands import StillOutError
from ddtree_operator.handlers.keeping import Keeping
from ddtree_operator.handlers.kube import CONFIG_MAP, DEPLOYMENT, NODE, POD, REVISION, SERVICE, ApiError, Kube, Object
from ddtree_operator.handlers.memory import from_object
from ddtree_operator.handlers.neighbours import Neighbours
from ddtree_operator.handlers.outlooks import Outlooks, pace_of
from ddtree_operator.handlers.places import place
from ddtree_operator.handlers.routes import Routes, canary_service
from ddtree_operator.handlers.watches import Key as WatchKey
from ddtree_operator.handlers.watches import Watches
from ddtree_operator.probe.live import Wish

PROMPTS_KEY = "prompts.jsonl"
LOG_LINES = 100  # of a crashed engine
LOG_BYTES = 20_000
KEPT_LOGS = 200


@dataclass(slots=True)
class View:
    """One resource as it is seen now, with what the edges need to act."""

    resource: Object
    observed: Observed
    spec: DDTreeSpec | None = None
    order: Order | None = None
    prompts: list[Prompt] = field(default_factory=list)
    users: Wish | None = None  # users' prompts that the analysis asks for
    objects: dict[str, Object] = field(default_factory=dict)  # Deployments by name
    versions: dict[str, str] = field(default_factory=dict)  # of ControllerRevisions, by hash
    analysis_key: Key | None = None
    watch_key: WatchKey | None = None
    request_error: str = ""


class Observer:
    """Reads; changes nothing."""

    def __init__(
        self,
        kube: Kube,
        builds: Builds,
        keeping: Keeping,
        neighbours: Neighbours,
        analyses: Analyses,
        watches: Watches,
        routes: Routes,
    ) -> None:
        self._kube = kube
        self._routes = routes
        self._watches = watches
        self._last_words: dict[tuple[str, str, int], str] = {}  # (namespace, pod, restarts) -> end of the log
        self._builds = builds
        self._keeping = keeping
        self._neighbours = neighbours
        self._analyses = analyses
        self._outlooks = Outlooks()

    async def look(self, resource: Object) -> View:
        """The present moment of one resource."""
        meta = resource["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        mine = f"{LABEL_DEPLOYMENT}={name}"
        deployments, pods, records, services = await asyncio.gather(
            self._kube.list(DEPLOYMENT, namespace, mine),
            self._kube.list(POD, namespace, mine),
            self._kube.list(REVISION, namespace, mine),
            self._kube.list(SERVICE, namespace, mine),
        )
        uid = meta["uid"]
        lost = await self._lost(pods)
        service = next((s for s in services if s["metadata"]["name"] == name), None)
        if service is None:  # none, or somebody else's
            service = await self._kube.get(SERVICE, namespace, name)
        deployments, records = ([o for o in found if read.belongs(o, uid)] for found in (deployments, records))
        selector, switched_at, service_problem = read.service_facts(service, name, uid)
        request, request_error = read.request_of(resource)
        known = tuple(r for r in map(from_object, records) if r is not None)
        problems = [Problem("ServiceTaken", service_problem)] if service_problem else []
        view = View(resource, Observed(), request_error=request_error)
        view.objects = {d["metadata"]["name"]: d for d in deployments}
        view.versions = {
            r["metadata"].get("labels", {}).get(LABEL_REVISION, ""): r["metadata"]["resourceVersion"] for r in records
        }
        build: BuildFact | None = None
        placement: PlacementFact | None = None
        way_back: WayBack | None = None
        attested = True
        analysis: AnalysisFact | None = None
        outlook = ""
        view.spec, _ = in_force(resource.get("spec") or {}, known, read.engine_sets(deployments, pods, lost))
        if view.spec is not None:
            wanted = next((r for r in known if r.hash == revisions.revision_hash(view.spec)), None)
            if wanted is not None and not wanted.blocked and wanted.result != "promoted":
                sets = read.engine_sets(deployments, pods, lost)
                build, placement, found = await self._rollout(view, wanted, known, selector, sets, namespace, pods)
                problems += found
                way_back = await self._way_back(view, wanted, known, selector, sets)
                given = view.spec.engine.image or not wanted.image
                attested = bool(given) or self._builds.attested(wanted.image)
                stable = (selector or {}).get(LABEL_REVISION, "")
                pace, source = pace_of(known, stable, wanted.hash)
                outlook, problem = await self._outlooks.of(view.spec.canary.analysis, pace, source)
                problems += [problem] if problem else []
                analysis = await self._analysis(view, wanted, namespace, name)
            if wanted is not None and wanted.result == "promoted" and wanted.progress is not None:
                view.watch_key = (namespace, name, wanted.hash, wanted.attempt)
                view.prompts, _ = await self._prompts(view.spec, namespace)
        beside = canary_service(services, name, uid)
        route = await self._routes.look(view.spec, resource, beside)
        view.observed = Observed(
            revisions=known,
            sets=await self._with_last_words(read.engine_sets(deployments, pods, lost), pods, namespace),
            service_selector=selector,
            switched_at=switched_at,
            service_problem=service_problem,
            build=build,
            placement=placement,
            way_back=way_back,
            attested=attested,
            analysis=analysis,
            route=route,
            canary_service=beside,
            problems=tuple(problems),
            outlook=outlook,
            request=request,
            alerts=tuple(fact for record in records for fact in _alerts(record)),
            watch=self._watches.fact(view.watch_key) if view.watch_key is not None else None,
        )
        return view

    async def _lost(self, pods: list[Object]) -> dict[str, str]:
        """Nodes of these pods that do not report any more, and what to say of each."""
        names = {p["spec"]["nodeName"] for p in pods if read.is_silent(p) and p.get("spec", {}).get("nodeName")}
        out: dict[str, str] = {}
        for name in sorted(names):
            with suppress(ApiError):  # no right to read it
                out[name] = read.silence(name, await self._kube.get(NODE, "", name))
        return out

    async def _with_last_words(
        self, sets: tuple[EngineSet, ...], pods: list[Object], namespace: str
    ) -> tuple[EngineSet, ...]:
        """Crashed pods with the end of their log: the kubelet's own excerpt is too short for a traceback."""
        running = {p["metadata"]["name"]: read.is_running(p) for p in pods}
        out = []
        for engines in sets:
            facts = []
            for pod in engines.pods:
                if pod.exit_code and not pod.ready and not pod.lost:
                    key = (namespace, pod.name, pod.restarts)
                    if not self._last_words.get(key):  # asked again where there was none: a container may just change
                        log = await self._kube.log(
                            namespace, pod.name, ENGINE_CONTAINER, LOG_LINES, previous=running[pod.name]
                        )
                        if len(self._last_words) > KEPT_LOGS:
                            self._last_words.clear()
                        self._last_words[key] = log[-LOG_BYTES:]
                    pod = replace(pod, exit_message=self._last_words[key] or pod.exit_message)
                facts.append(pod)
            out.append(replace(engines, pods=tuple(facts)))
        return tuple(out)

    async def _rollout(
        self,
        view: View,
        wanted: Revision,
        known: tuple[Revision, ...],
        selector: dict[str, str] | None,
        sets: tuple[EngineSet, ...],
        namespace: str,
        pods: list[Object],
    ) -> tuple[BuildFact | None, PlacementFact | None, list[Problem]]:
        """Facts that matter only while a revision is on its way."""
        spec = view.spec
        assert spec is not None
        problems: list[Problem] = []
        view.prompts, problem = await self._prompts(spec, namespace)
        problems += [problem] if problem is not None else []
        serving = next((r for r in known if r.hash == (selector or {}).get(LABEL_REVISION)), None)
        promoted = (r for r in known if r.result == "promoted" and r.hash != wanted.hash)
        stable = max(promoted, key=lambda r: r.number, default=None)  # where it shares the Service with the canary
        view.users, problem = await live_prompts.wish(self._kube, spec, view.resource["metadata"], serving or stable)
        problems += [problem] if problem is not None else []
        build: BuildFact | None = None
        if not spec.engine.image and not wanted.image:
            order = await self._builds.order(spec, namespace)
            if isinstance(order, Problem):
                problems.append(order)
            elif order is not None:
                view.order = order
                build = await self._builds.fact(order, view.resource, wanted)
        dedicated = serving is None or spec.baseline.from_ == "spec"
        running = sum(len(s.pods) for s in sets if s.revision == wanted.hash)
        needed = max(0, spec.canary.replicas + int(dedicated) - running)
        keep = wanted.pins or (serving.pins if serving else {})
        image = spec.engine.image or wanted.image or (build.image if build else "")
        needs = None
        try:
            needs = await self._builds.needs(spec, namespace, image) if image else None
        except StillOutError:
            if not running:  # what runs already is not stopped for a question
                return build, PlacementFact(False, f"what the image needs is not known: {silent(image)}"), problems
        nodes = await self._neighbours.inventory(namespace, view.resource["metadata"]["name"], pods)
        return build, place(nodes, spec, keep=keep, needed=needed, needs=needs), problems

    async def _way_back(
        self,
        view: View,
        wanted: Revision,
        known: tuple[Revision, ...],
        selector: dict[str, str] | None,
        sets: tuple[EngineSet, ...],
    ) -> WayBack | None:
        """Asked just before the canary starts: it has an image, and no engines yet."""
        serving = next((r for r in known if r.hash == (selector or {}).get(LABEL_REVISION)), None)
        started = any(s.revision == wanted.hash for s in sets)
        if view.spec is None or serving is None or started or not wanted.image:
            return None
        return await self._keeping.way_back(view.spec, view.resource, serving, wanted)

    async def _prompts(self, spec: DDTreeSpec, namespace: str) -> tuple[list[Prompt], Problem | None]:
        ref = spec.canary.analysis.prompts
        if ref is None or ref.config_map_ref is None:
            return list(_shipped()), None
        name = ref.config_map_ref
        found = await self._kube.get(CONFIG_MAP, namespace, name)
        if found is None:
            text = f"ConfigMap {name} does not exist in namespace {namespace}; create it with a key {PROMPTS_KEY}"
            return [], Problem("PromptsMissing", text)
        content = (found.get("data") or {}).get(PROMPTS_KEY)
        if content is None:
            return [], Problem("PromptsMissing", f"ConfigMap {name} has no key {PROMPTS_KEY}; add it")
        try:
            return load_prompts(content, f"ConfigMap {name}, {PROMPTS_KEY}"), None
        except ValueError as error:
            return [], Problem("PromptsInvalid", str(error))

    async def _analysis(self, view: View, wanted: Revision, namespace: str, name: str) -> AnalysisFact | None:
        if wanted.progress is None:
            return None
        key = (namespace, name, wanted.hash, wanted.attempt, wanted.progress.step)
        view.analysis_key = key
        return self._analyses.fact(key)


@cache
def _shipped() -> tuple[Prompt, ...]:
    return tuple(shipped_prompts())


def _alerts(record: Object) -> tuple[AlertFact, ...]:
    meta = record["metadata"]
    text = meta.get("annotations", {}).get(ledger.ANNOTATION_ALERTS)
    return ledger.read(text, meta.get("labels", {}).get(LABEL_REVISION, "")) if text else ()
