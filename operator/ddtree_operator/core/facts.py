"""What is observed of one DDTreeDeployment. Read by the edges, given to the core as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ddtree_operator.api.actions import ActionRequest
from ddtree_operator.api.names import LABEL_REVISION


@dataclass(frozen=True, slots=True)
class PodFact:
    """One engine pod."""

    name: str
    ip: str = ""
    node: str = ""
    ready: bool = False
    deleting: bool = False
    restarts: int = 0
    waiting: str = ""  # container's waiting reason, or Unschedulable
    message: str = ""  # what the kubelet or the scheduler says about it
    exit_message: str = ""  # tail of the last exit's log, "" when it never exited
    exit_code: int | None = None
    lost: str = ""  # what is wrong with its node, which does not report any more; "" while it does


@dataclass(frozen=True, slots=True)
class EngineSet:
    """One Deployment of engines."""

    name: str
    revision: str
    baseline: bool = False
    replicas: int = 0
    pods: tuple[PodFact, ...] = ()
    failure: str = ""  # why the Deployment could not create pods (quota, admission)
    image: str = ""  # of its engines

    @property
    def ready(self) -> tuple[PodFact, ...]:
        """Pods that may receive requests."""
        return tuple(p for p in self.pods if p.ready and not p.deleting)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rollout has come; kept on its ControllerRevision so that nothing depends on ``status``."""

    started_at: float
    since: float  # last time anything moved; the progress deadline counts from here
    step: int = 0
    step_since: float = 0.0
    attempt: int = 0
    asked: bool = False  # a person was asked whether to go on without a way back
    held: bool = False  # paused by a person or by an inconclusive analysis
    note: str = ""  # why it is held, or what it waits for
    short: bool = False  # engines are missing; since when they are, `since` counts
    stuck: bool = False  # something that the spec refers to is missing; until it is there no time counts


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision and what became of it. The durable memory of the operator, one ControllerRevision each."""

    hash: str
    number: int
    spec: dict[str, Any]
    image: str = ""
    result: str = ""  # "" while open | promoted | rolledBack | aborted | superseded | undone
    reason: str = ""
    cause: str = ""  # of a rollback, in one word: analysis | build | engine | deadline | alert | watch | person
    at: float = 0.0
    by: str = ""
    attempt: int = 0
    progress: Progress | None = None
    pins: dict[str, Any] = field(default_factory=dict)  # placement's choice, as it wrote it
    summary: dict[str, Any] = field(default_factory=dict)  # the verdict that decided: acceptLength, throughput, …
    fallback: str = ""  # undo: the revision to serve instead
    handled: str = ""  # id of the last request acted on while this was the wanted revision
    handled_note: str = ""  # what came of it
    handled_at: float = 0.0
    alarms: tuple[dict[str, Any], ...] = ()  # alerts that were judged, oldest first, with what came of each
    watched: str = ""  # what the watch after promotion came to: rolledBack | told; "" while nothing is wrong
    returned: bool = False  # serves because a later revision was left again
    settings: dict[str, Any] = field(default_factory=dict)  # the rest of the spec, as it last held with this revision
    turn: int = 0  # counts up when the spec asks for another revision: the greatest is what it asked for last
    log: tuple[dict[str, Any], ...] = ()  # who did what to its rollout, newest last, bounded: at, by, verb, text

    @property
    def blocked(self) -> bool:
        """True when it must not run again without retry or a new spec."""
        return self.result in {"rolledBack", "aborted", "undone"}

    @property
    def ended(self) -> bool:
        """True when its rollout is over, and it is not what should serve: taken back, or replaced."""
        return self.blocked or self.result == "superseded"

    def changed(self, **fields: Any) -> Revision:
        """A copy with some fields replaced."""
        return replace(self, **fields)


@dataclass(frozen=True, slots=True)
class BuildFact:
    """State of the image of the wanted revision."""

    state: str  # none | running | done | failed
    image: str = ""  # repo@sha256:… when done
    message: str = ""  # progress, or the sentence that says why it failed
    obstacle: str = ""  # CamelCase reason why a running build does not get on; "" while it does
    log: str = ""  # last lines of the builder's log when it failed
    job: str = ""  # name of the Job that builds, "" while there is none


@dataclass(frozen=True, slots=True)
class PlacementFact:
    """Where the wanted revision can run."""

    fits: bool
    message: str = ""
    pins: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[dict[str, Any], ...] = ()
    room: int | None = None  # further engines that find a free GPU on nodes of the chosen kind; None: not counted


@dataclass(frozen=True, slots=True)
class WayBack:
    """The image of what serves, which a rollback after promotion would need."""

    state: str  # there | lost | away (its registry does not answer)
    message: str = ""  # what is missing of it, or why the registry does not answer
    kept: bool = False  # tagging it was tried


@dataclass(frozen=True, slots=True)
class AnalysisFact:
    """Latest verdict of the analysis that belongs to one step of one attempt at a revision."""

    revision: str
    attempt: int
    step: int
    outcome: str  # pass | fail | notYet
    reason: str = ""
    started_at: float = 0.0
    exhausted: str = ""  # why no further pair can decide; "" while one may
    summary: dict[str, Any] = field(default_factory=dict)  # of this verdict
    kept: dict[str, Any] = field(default_factory=dict)  # of the newest verdict that is recorded, with its digest


@dataclass(frozen=True, slots=True)
class WatchFact:
    """State of the watch after promotion."""

    revision: str
    attempt: int
    failed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AlertFact:
    """A firing alert as the receiver recorded it on the revision that it names."""

    id: str  # made of fingerprint, startsAt and revision: a repeated notification has the same
    revision: str  # hash
    name: str
    starts_at: float  # epoch seconds, by Prometheus' clock
    at: float  # when it was recorded
    summary: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header:
    """Requests that carry this header go to the canary."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Share:
    """What of an HTTPRoute's traffic the canary gets. ``Share()`` is the route as its owner wrote it."""

    weight: int = 0  # percent
    header: Header | None = None
    named: bool = False  # the canary stands in the route, with weight 0 if need be; always so when it gets anything

    def __post_init__(self) -> None:
        if self.gives:
            object.__setattr__(self, "named", True)

    @property
    def gives(self) -> bool:
        """Whether any request goes to the canary."""
        return self.weight > 0 or self.header is not None


@dataclass(frozen=True, slots=True)
class RouteFact:
    """The HTTPRoute that carries the weights."""

    name: str
    share: Share | None = Share()  # None: somebody edited our part of it
    touched: bool = False  # something of ours is in it
    named: bool = False  # a rule has the canary as a backend
    problem: str = ""  # why it cannot carry weights
    waits: str = ""  # why it is not in force as it is written; "" once accepted and programmed
    since: float = 0.0  # when it was first seen in force as it and the canary's Service are; 0.0 while it waits

    @property
    def gives(self) -> bool:
        """Whether requests may go to the canary."""
        return self.touched and (self.share is None or self.share.gives)


@dataclass(frozen=True, slots=True)
class CanaryService:
    """The Service that a route names for the canary. It exists before the route names it, and after."""

    selector: dict[str, str]
    route: str = ""  # name of the HTTPRoute that it was made for
    left_at: float = 0.0  # since when no route names it; 0.0 while one may

    @property
    def revision(self) -> str:
        """Hash of the revision that it selects."""
        return self.selector.get(LABEL_REVISION, "")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something the spec refers to and that is missing or unusable."""

    reason: str  # CamelCase, for the condition
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything the core looks at."""

    revisions: tuple[Revision, ...] = ()
    sets: tuple[EngineSet, ...] = ()
    service_selector: dict[str, str] | None = None  # None: no Service yet
    switched_at: float = 0.0  # when the selector last changed
    service_problem: str = ""
    build: BuildFact | None = None
    placement: PlacementFact | None = None
    way_back: WayBack | None = None  # None: there is nothing to go back to, or nobody can tell
    attested: bool = True  # False: the image on its way was built, and says nothing about itself yet
    analysis: AnalysisFact | None = None
    route: RouteFact | None = None  # None: there is none to look at
    canary_service: CanaryService | None = None
    problems: tuple[Problem, ...] = ()
    outlook: str = ""  # what the analysis to come can tell: pairs and time, in words
    request: ActionRequest | None = None
    alerts: tuple[AlertFact, ...] = ()
    watch: WatchFact | None = None

    def set(self, name: str) -> EngineSet | None:
        """The engine set of that name."""
        return next((s for s in self.sets if s.name == name), None)

    def revision(self, hash_: str) -> Revision | None:
        """The revision of that hash."""
        return next((r for r in self.revisions if r.hash == hash_), None)
