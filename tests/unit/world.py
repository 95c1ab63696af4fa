"""A simulated cluster with a simulated clock: carries out the core's actions, and can stop after any of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree_operator.alerts import ledger
from ddtree_operator.api.actions import ActionRequest, Verb
from ddtree_operator.api.names import LABEL_POOL, LABEL_REVISION
from ddtree_operator.core.actions import (
    QUIET,
    Action,
    Analyze,
    ApplyEngines,
    ApplyService,
    Attest,
    DeleteEngines,
    Emit,
    KeepImage,
    PruneRevision,
    SaveRevision,
    StartBuild,
    Watch,
)
from ddtree_operator.core.decide import Decision, decide
from ddtree_operator.core.facts import (
    AlertFact,
    AnalysisFact,
    BuildFact,
    EngineSet,
    Observed,
    PlacementFact,
    PodFact,
    Problem,
    Revision,
    WatchFact,
    WayBack,
)
from ddtree_operator.core.revisions import parse


@dataclass
class Pod:
    """A pod in a world that counts GPUs: when it got one, and when it gives it back."""

    name: str
    at: float | None = None
    leaves: float | None = None


@dataclass
class Running:
    """A Deployment as the simulation keeps it."""

    action: ApplyEngines
    replicas: int
    since: float
    pods: list[Pod] = field(default_factory=list)  # only where GPUs are counted


@dataclass
class World:
    """What the API server, the kubelet, the builder and the engines would do."""

    spec: dict[str, Any]
    start_seconds: float = 20.0
    build_seconds: float = 30.0
    analysis_seconds: float = 60.0
    verdict: Callable[[str], tuple[str, str]] = lambda revision: ("pass", "fine")
    judge: Callable[[AnalysisFact], AnalysisFact] = lambda fact: fact  # has the last word on an analysis
    build_error: str = ""
    crash: dict[str, str] = field(default_factory=dict)  # engine set name -> log tail
    failure: dict[str, str] = field(default_factory=dict)  # engine set name -> why it cannot create pods
    service_problem: str = ""
    placement: PlacementFact | None = None
    way_back: str = "there"  # state of the image of what serves
    attested: list[str] = field(default_factory=list)  # images
    kept: set[str] = field(default_factory=set)  # revisions whose image was tagged
    gpus: int | None = None  # GPUs that the engines share; None: they are not counted
    leave_seconds: float = 12.0  # time a leaving engine still holds its GPU
    leaving: list[Pod] = field(default_factory=list)  # engines of Deployments that are gone
    fewest: int | None = None  # fewest ready engines that traffic could reach since it was last set to None
    problems: tuple[Problem, ...] = ()
    outlook: str = ""
    now: float = 1_000_000.0
    generation: int = 1
    revisions: dict[str, Revision] = field(default_factory=dict)
    sets: dict[str, Running] = field(default_factory=dict)
    selector: dict[str, str] | None = None
    switched_at: float = 0.0
    builds: dict[tuple[str, int], float] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    analyses: dict[tuple[str, int, int], float] = field(default_factory=dict)
    request: ActionRequest | None = None
    alerts: list[AlertFact] = field(default_factory=list)
    watches: list[tuple[str, int]] = field(default_factory=list)
    fell: dict[str, str] = field(default_factory=dict)  # revision -> what its watch found
    status: dict[str, Any] = field(default_factory=dict)
    events: list[Emit] = field(default_factory=list)
    writes: int = 0
    served: bool = False
    outages: list[str] = field(default_factory=list)

    # observation ---------------------------------------------------------------------------------------------------

    def _set(self, name: str, run: Running) -> EngineSet:
        if name in self.failure:
            return EngineSet(
                name,
                run.action.revision,
                run.action.baseline,
                run.replicas,
                failure=self.failure[name],
                image=run.action.image,
            )
        if self.gpus is not None:
            return self._counted(name, run)
        pods = []
        up = self.now - run.since >= self.start_seconds
        for i in range(run.replicas):
            tail = self.crash.get(name, "")
            pods.append(
                PodFact(
                    name=f"{name}-{i}",
                    ip="10.0.0.1",
                    ready=up and not tail,
                    restarts=int((self.now - run.since) // 20) if tail else 0,
                    exit_message=tail,
                    exit_code=1 if tail else None,
                )
            )
        return EngineSet(
            name, run.action.revision, run.action.baseline, run.replicas, tuple(pods), image=run.action.image
        )

    def _counted(self, name: str, run: Running) -> EngineSet:
        self._schedule()
        pods = [
            PodFact(
                name=pod.name,
                node="a" if pod.at is not None else "",
                ready=pod.at is not None and self.now - pod.at >= self.start_seconds,
                deleting=pod.leaves is not None,
                waiting="" if pod.at is not None else "Unschedulable",
                message="" if pod.at is not None else "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            )
            for pod in run.pods
        ]
        return EngineSet(
            name, run.action.revision, run.action.baseline, run.replicas, tuple(pods), image=run.action.image
        )

    def _schedule(self) -> None:
        """Free the GPUs of engines that have left, and hand free ones to those that wait."""
        for pods in (self.leaving, *(run.pods for run in self.sets.values())):
            pods[:] = [p for p in pods if p.leaves is None or p.leaves > self.now]
        for run in self.sets.values():
            for pod in run.pods:
                if pod.at is None and self.room() > 0:
                    pod.at = self.now

    def room(self) -> int:
        """Free GPUs."""
        everyone = [*self.leaving, *(p for run in self.sets.values() for p in run.pods)]
        return (self.gpus or 0) - sum(1 for p in everyone if p.at is not None)

    def _scale(self, name: str, run: Running, replicas: int) -> None:
        run.replicas = replicas
        if self.gpus is None:
            return
        stay = [p for p in run.pods if p.leaves is None]
        for pod in sorted(stay, key=lambda p: p.at is not None)[: max(0, len(stay) - replicas)]:
            if pod.at is None:
                run.pods.remove(pod)
            else:
                pod.leaves = self.now + self.leave_seconds
        for _ in range(replicas - len(stay)):
            run.pods.append(Pod(f"{name}-{self.writes}-{len(run.pods)}"))

    def _placement(self) -> PlacementFact | None:
        if self.gpus is None:
            return self.placement
        self._schedule()
        spec = parse(self.spec)
        pointed = (self.selector or {}).get(LABEL_REVISION, "none")
        apart = pointed == "none" or spec.baseline.from_ == "spec"
        newest = max(self.revisions.values(), key=lambda r: r.number, default=None)
        running = sum(len(s.pods) for s in self.sets.values() if newest and s.action.revision == newest.hash)
        needed = max(0, spec.canary.replicas + int(apart) - running)
        missing = max(0, needed - self.room())
        return PlacementFact(
            missing == 0, f"{missing} GPU is missing" if missing else "fits", {"k": "v"}, room=self.room()
        )

    def observed(self) -> Observed:
        """What the edges would read now."""
        newest = max(self.revisions.values(), key=lambda r: r.number, default=None)
        build = None
        if newest is not None:
            key = (newest.hash, newest.attempt)
            if newest.hash in self.images:
                build = BuildFact("done", image=f"r/e@sha256:{newest.hash:0<64}")
            elif key in self.builds:
                done = self.now - self.builds[key] >= self.build_seconds
                if not done:
                    build = BuildFact("running", message="step 3/6")
                elif self.build_error:
                    build = BuildFact("failed", message=self.build_error, log="#9 ERROR\n" + self.build_error)
                else:
                    self.images.add(newest.hash)
                    build = BuildFact("done", image=f"r/e@sha256:{newest.hash:0<64}")
            else:
                build = BuildFact("none")
        analysis = None
        for (hash_, attempt, step), began in self.analyses.items():
            current = self.revisions.get(hash_)
            if current is None or current.attempt != attempt or current.progress is None:
                continue
            if current.progress.step != step:
                continue
            done = self.now - began >= self.analysis_seconds
            outcome, reason = self.verdict(hash_) if done else ("notYet", "3 pairs")
            analysis = self.judge(
                AnalysisFact(hash_, attempt, step, outcome, reason, began, summary={"acceptLength": 2.5})
            )
        return Observed(
            revisions=tuple(self.revisions.values()),
            sets=tuple(self._set(n, s) for n, s in self.sets.items()),
            service_selector=self.selector,
            switched_at=self.switched_at,
            service_problem=self.service_problem,
            build=build,
            placement=self._placement(),
            way_back=self._way_back(),
            attested=newest is None or newest.image in ("", *self.attested),
            analysis=analysis,
            problems=self.problems,
            outlook=self.outlook,
            request=self.request,
            alerts=tuple(a for a in self.alerts if a.revision in self.revisions),
            watch=WatchFact(*self.watches[-1], self.watches[-1][0] in self.fell, self.fell.get(self.watches[-1][0], ""))
            if self.watches
            else None,
        )

    def _way_back(self) -> WayBack | None:
        pointed = (self.selector or {}).get(LABEL_REVISION, "none")
        return WayBack(self.way_back, "the manifest", pointed in self.kept) if pointed in self.revisions else None

    # actions -------------------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        """One write, as the API server would take it."""
        if not isinstance(action, QUIET):
            self.writes += 1
        match action:
            case SaveRevision(revision):
                self.revisions[revision.hash] = revision
            case PruneRevision(revision):
                self.revisions.pop(revision.hash, None)
            case StartBuild(revision, attempt):
                self.builds.setdefault((revision, attempt), self.now)
            case Attest(image):
                self.attested.append(image)
            case KeepImage(kept):
                self.kept.add(kept.hash)
            case ApplyEngines():
                running = self.sets.get(action.name)
                if running is None:
                    running = self.sets[action.name] = Running(action, 0, self.now)
                self._scale(action.name, running, action.replicas)
            case DeleteEngines(name):
                gone = self.sets.pop(name, None)
                for pod in gone.pods if gone else ():
                    if pod.at is not None:
                        pod.leaves = pod.leaves or self.now + self.leave_seconds
                        self.leaving.append(pod)
            case ApplyService(selector, at):
                self.selector, self.switched_at = selector, at
            case Analyze(revision, attempt, step, _, _):
                self.analyses.setdefault((revision, attempt, step), self.now)
            case Watch(revision, attempt, _, _, _):
                self.watches.append((revision, attempt))
            case Emit():
                self.events.append(action)

    def decide(self) -> Decision:
        """The core's decision about the present moment."""
        return decide("m", self.spec, self.observed(), self.now, generation=self.generation, status=self.status)

    def tick(self, seconds: float = 5.0, stop_after: int | None = None) -> None:
        """Decide and act until quiet, then let time pass. ``stop_after`` crashes after that many writes."""
        left = stop_after
        for _ in range(60):
            decision = self.decide()
            for action in decision.actions:
                self.apply(action)
                self._watch()
                if left is not None and not isinstance(action, QUIET):
                    left -= 1
                    if left < 0:
                        self.now += seconds
                        return
            self.status = decision.status
            if not decision.again:
                break
        else:
            raise AssertionError(f"never quiet: {[type(a).__name__ for a in decision.actions]}")
        self.now += seconds
        self._watch()

    def _watch(self) -> None:
        """Once something served, something ready must always be selected, unless every engine crashed by itself."""
        if self.selector is None:
            return
        reached = [
            pod
            for name, run in self.sets.items()
            for pod in self._set(name, run).ready
            if not run.action.baseline
            and self.selector.get(LABEL_REVISION, run.action.revision) == run.action.revision
            and self.selector.get(LABEL_POOL) == "serving"
        ]
        if not self.spec.get("replicas", 1):  # scaled to nothing: serving begins anew
            self.served = False
        self.served = self.served or bool(reached)
        if self.served:
            self.fewest = len(reached) if self.fewest is None else min(self.fewest, len(reached))
        if self.served and not reached and self.spec.get("replicas", 1) > 0 and not self.crash:
            self.outages.append(f"at {self.now}: {self.selector}")

    def until(self, phase: str, limit: int = 400, seconds: float = 5.0) -> World:
        """Tick until that phase is reached and current."""
        for _ in range(limit):
            self.tick(seconds)
            if self.status.get("phase") == phase and self.status.get("observedGeneration") == self.generation:
                return self
        raise AssertionError(f"phase {phase} not reached: {self.status.get('phase')}: {self.status.get('message')}")

    # people --------------------------------------------------------------------------------------------------------

    def edit(self, **changes: Any) -> World:
        """A new spec."""
        self.spec = {**self.spec, **changes}
        self.generation += 1
        return self

    def ask(self, verb: str, **more: str) -> World:
        """ddtreectl."""
        self.request = ActionRequest(
            id=f"{verb}-{random.Random(self.writes).random()}", verb=Verb(verb), by="ann", **more
        )
        return self

    def alert(self, revision: str, began: float = 0.0, fingerprint: str = "9f2c", at: float | None = None) -> World:
        """A firing alert about a revision, as the receiver records it: once per fingerprint, start and revision."""
        began = began or self.now
        id_ = f"{fingerprint}/{began}/{revision}"
        if id_ not in {a.id for a in self.alerts}:
            at = self.now if at is None else at
            self.alerts.append(AlertFact(id_, revision, "AcceptLengthLow", began, at, "1.4 instead of 2.5", {"a": "b"}))
            about = [a for a in self.alerts if a.revision == revision]
            for forgotten in about[: -ledger.KEPT]:
                self.alerts.remove(forgotten)
        return self

    def retuned(self, budget: int) -> World:
        """A spec with another budget: a new revision."""
        return self.edit(engine={"speculative": {"algorithm": "DDTREE", "budget": budget}})


def first(**more: Any) -> World:
    """A resource that was just created with the chain."""
    spec: dict[str, Any] = {
        "model": {"path": "/m"},
        "drafter": {"path": "/d"},
        "engine": {"speculative": {"algorithm": "DFLASH"}},
    }
    return World(spec={**spec, **more})


def stable(**more: Any) -> World:
    """A resource whose first revision serves."""
    return first(**more).until("Stable")


def fit() -> PlacementFact:
    """A placement that found a node."""
    return PlacementFact(True, "1 node fits", {"product": "NVIDIA-H200"}, ({"name": "a", "fits": True},))


__all__ = ["World", "first", "fit", "replace", "stable"]
