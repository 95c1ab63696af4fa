"""What the core asks of the edges. Every action is idempotent: doing it again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddtree_operator.core.facts import Revision, Share


@dataclass(frozen=True, slots=True)
class SaveRevision:
    """Create or update the ControllerRevision that remembers this revision."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class PruneRevision:
    """Forget a revision beyond ``rollback.keep``, with its analysis records."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class StartBuild:
    """Build the image of a revision unless the registry has it or a Job is at it."""

    revision: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Attest:
    """Attach to a built image, in its registry, how it was made and what is in it."""

    image: str


@dataclass(frozen=True, slots=True)
class KeepImage:
    """Tag the image of a revision that served, so that no cleanup of the registry takes it."""

    revision: Revision


@dataclass(frozen=True, slots=True)
class ApplyEngines:
    """Have a Deployment of engines with that many replicas. Its template is written once and then left alone."""

    name: str
    revision: str
    baseline: bool
    replicas: int
    image: str
    spec: dict[str, Any]  # the revision's part of the spec, with ``engine.speculative`` as it is to run
    pins: dict[str, Any] = field(default_factory=dict)
    grace: float = 30.0


@dataclass(frozen=True, slots=True)
class DeleteEngines:
    """Remove a Deployment of engines that no traffic reaches."""

    name: str


@dataclass(frozen=True, slots=True)
class ApplyService:
    """Point the Service at these labels."""

    selector: dict[str, str]
    at: float
    anyway: bool = False  # even from engines that answer to none: the time of those that answer is over


@dataclass(frozen=True, slots=True)
class ApplyCanaryService:
    """Have the canary's Service with this selector, for that HTTPRoute; ``left_at`` says since when none names it."""

    selector: dict[str, str]
    route: str
    left_at: float = 0.0


@dataclass(frozen=True, slots=True)
class DeleteCanaryService:
    """Remove the canary's Service, which no route names."""


@dataclass(frozen=True, slots=True)
class ApplyRoute:
    """Give the canary its share of an HTTPRoute's traffic; ``Share()`` leaves the route as its owner wrote it."""

    name: str
    share: Share


@dataclass(frozen=True, slots=True)
class Analyze:
    """Keep the analysis of this step running; ``baseline`` and ``canary`` are engine set names."""

    revision: str
    attempt: int
    step: int
    baseline: str
    canary: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Keep asking the engines of a revision that was promoted ``since`` seconds ago, for ``length`` seconds in all."""

    revision: str
    attempt: int
    engines: str  # name of the engine set
    since: float
    length: float


@dataclass(frozen=True, slots=True)
class Emit:
    """A Kubernetes Event on the resource."""

    type: str  # Normal | Warning
    reason: str
    message: str


Action = (
    SaveRevision
    | PruneRevision
    | StartBuild
    | Attest
    | KeepImage
    | ApplyEngines
    | DeleteEngines
    | ApplyService
    | ApplyCanaryService
    | DeleteCanaryService
    | ApplyRoute
    | Analyze
    | Watch
    | Emit
)

QUIET = (Emit, Analyze, Watch)  # these write nothing that the next look would see
