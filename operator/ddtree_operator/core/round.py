"""One look at one resource: working copies, and the helpers that every part of the decision uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_POOL, LABEL_REVISION
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import Action, ApplyEngines, ApplyService, Emit, SaveRevision
from ddtree_operator.core.facts import EngineSet, Observed, Revision
from ddtree_operator.core.revisions import engine_set_name, revision_hash, revision_part
from ddtree_operator.core.units import clip, iso, seconds

LOG = 8  # entries of a revision's log that are kept
LOG_TEXT = 240  # characters of one


@dataclass(slots=True)
class Report:
    """What the status will say."""

    phase: str = "Pending"
    message: str = ""
    step: str = ""
    weight: int = 0
    built: tuple[str, str, str] = ("Unknown", "NotNeeded", "")
    placed: tuple[str, str, str] = ("Unknown", "NotNeeded", "")
    obstacle: str = ""  # CamelCase reason why engines do not start; "" while nothing is in the way
    verdict: tuple[str, str, str] = ("Unknown", "NoAnalysis", "")
    canary: str = ""  # revision hash of the canary in progress
    baseline: str = ""  # stable | spec | "", as in spec.baseline.from
    compared: bool = False  # every comparison is done: a dedicated baseline is not needed any more


@dataclass(slots=True)
class Round:
    """State of one decision. ``revisions`` are working copies; whatever changes is also an action."""

    name: str
    spec: DDTreeSpec
    seen: Observed
    now: float
    mistake: str = ""  # in the spec as it is now: ``spec`` is the last one that held
    revisions: dict[str, Revision] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    again: bool = False  # something changed that deserves another look at once
    wake: float = math.inf  # seconds until time alone changes something

    def __post_init__(self) -> None:
        self.revisions = {r.hash: r for r in self.seen.revisions}

    # revisions -----------------------------------------------------------------------------------------------------

    def save(self, revision: Revision, **fields: Any) -> Revision:
        """Change a revision, in the working copy and in the cluster."""
        changed = revision.changed(**fields)
        self.revisions[changed.hash] = changed
        self.actions = [
            a for a in self.actions if not (isinstance(a, SaveRevision) and a.revision.hash == changed.hash)
        ]
        self.actions.append(SaveRevision(changed))
        self.again = True
        return changed

    def log(self, revision: Revision, verb: str, by: str, text: str) -> Revision:
        """Note on a revision what was done to its rollout, by whom and when."""
        entry = {"at": iso(self.now), "by": by, "verb": verb, "text": clip(text, LOG_TEXT)}
        return self.save(revision, log=(*revision.log, entry)[-LOG:])

    def wanted(self) -> Revision:
        """The revision of the spec as it stands; made when it is new, reopened when it had been superseded."""
        hash_ = revision_hash(self.spec)
        known = self.revisions.get(hash_)
        if known is None:
            number = max((r.number for r in self.revisions.values()), default=0) + 1
            return self.save(Revision(hash=hash_, number=number, spec=revision_part(self.spec)))
        if known.result == "superseded":
            known = self.save(known, result="", reason="", attempt=known.attempt + 1, progress=None)
            return self.log(known, "reopen", "spec", "the spec asks for it again")
        return known

    def promoted(self) -> list[Revision]:
        """Revisions that served once and are not blocked, latest promotion first."""
        return sorted((r for r in self.revisions.values() if r.result == "promoted"), key=lambda r: (-r.at, -r.number))

    def leaving(self, canary: Revision) -> float:
        """Seconds for which a canary that has ended may go on serving while the stable set is not whole; below 0 when
        that time is over, or it has not ended.
        """
        if not canary.ended:
            return -1.0
        return canary.at + seconds(self.spec.rollback.progress_deadline) - self.now

    def serving(self) -> Revision | None:
        """The revision that the Service points at; without that, or while that is a canary with a weight of 100 whose
        steps are not done, the last one promoted.
        """
        pointed = (self.seen.service_selector or {}).get(LABEL_REVISION, "")
        found = self.revisions.get(pointed)
        last = next(iter(self.promoted()), None)
        if found is None or self.engines_of(found) is None:
            return last
        progress = found.progress
        judged = found.result == "promoted" or progress is None or progress.step >= len(self.spec.canary.steps)
        left = bool(found.fallback)  # it had been promoted, whatever the steps are now
        return found if judged or left or last is None else last

    # engines -------------------------------------------------------------------------------------------------------

    def engines_of(self, revision: Revision, *, baseline: bool = False) -> EngineSet | None:
        """The engine set of a revision, when it exists."""
        return self.seen.set(engine_set_name(self.name, revision.hash, baseline=baseline))

    def image_of(self, revision: Revision, *, baseline: bool = False) -> str:
        """A revision's image; where its record is lost, that of its engines."""
        engines = self.engines_of(revision, baseline=baseline)
        return revision.image or (engines.image if engines else "")

    def have_engines(
        self, revision: Revision, replicas: int, *, baseline: bool = False, spec: dict[str, Any] | None = None
    ) -> EngineSet:
        """Ask for an engine set, and return what there is of it."""
        name = engine_set_name(self.name, revision.hash, baseline=baseline)
        existing = self.seen.set(name)
        if existing is None or existing.replicas != replicas:
            self.actions.append(
                ApplyEngines(
                    name=name,
                    revision=revision.hash,
                    baseline=baseline,
                    replicas=replicas,
                    image=self.image_of(revision, baseline=baseline),
                    spec=spec or revision.spec,
                    pins=revision.pins,
                    grace=seconds(self.spec.traffic.drain),
                )
            )
        return existing or EngineSet(name=name, revision=revision.hash, baseline=baseline, replicas=replicas)

    # traffic -------------------------------------------------------------------------------------------------------

    def only(self, revision: Revision | None) -> dict[str, str]:
        """Selector of one revision's serving pods; of nothing when there is none yet."""
        return {
            LABEL_DEPLOYMENT: self.name,
            LABEL_POOL: "serving",
            LABEL_REVISION: revision.hash if revision else "none",
        }

    def shared(self) -> dict[str, str]:
        """Selector of every serving pod: stable and canary share by number of replicas."""
        return {LABEL_DEPLOYMENT: self.name, LABEL_POOL: "serving"}

    def point_service(self, selector: dict[str, str], *, anyway: bool = False) -> bool:
        """Ask for this selector; True when it is already so. A Service of somebody else's is left alone."""
        if self.seen.service_selector == selector:
            return True
        if self.seen.service_problem:
            return False
        self.actions = [a for a in self.actions if not isinstance(a, ApplyService)]
        self.actions.append(ApplyService(selector=selector, at=self.now, anyway=anyway))
        return False

    def point_back(self, stable: Revision) -> None:
        """Give the Service to the stable set alone. A canary that has ended keeps what it has of it, with engines that
        answer, while that set has no ready engine: for a while, since an end at weight 0 was asked for.
        """
        serving = self.engines_of(stable)
        left = self._sharing() if serving is None or not serving.ready else None
        if left is not None and left >= 0:
            self.wake_in(left)
        else:
            self.point_service(self.only(stable), anyway=left is not None)

    def _sharing(self) -> float | None:
        """Seconds for which a canary that has ended may go on answering alone; below 0 when that time is over, None
        when there is none that could.
        """
        selector = self.seen.service_selector
        if selector is None or self.spec.replicas == 0:
            return None
        found = None
        for revision in self.revisions.values():
            engines = self.engines_of(revision)
            answers = engines is not None and engines.ready
            if revision.ended and answers and selector in (self.shared(), self.only(revision)):
                left = self.leaving(revision)
                found = left if found is None else max(found, left)
        return found

    # time ----------------------------------------------------------------------------------------------------------

    def wake_in(self, left: float) -> None:
        """Look again after so many seconds; the earliest wish counts."""
        self.wake = min(self.wake, max(left, 0.0) + 0.1)

    # words ---------------------------------------------------------------------------------------------------------

    def emit(self, type_: str, reason: str, message: str) -> None:
        """An Event."""
        self.actions.append(Emit(type_, reason, message))
