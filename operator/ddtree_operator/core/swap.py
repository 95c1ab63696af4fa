"""placement.strategy swap: with no free GPU, serving engines give theirs to the canary, one at a time, never the last.

Nothing is remembered for it: what a canary may take follows from the engines that hold GPUs now and from the room that
is left, so that a rollback gives everything back by itself, and a GPU that becomes free goes to the serving set.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.core.facts import EngineSet, Revision
from ddtree_operator.core.round import Round


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many engines each side has for now.

    ``enough``: canary engines that have to be ready before it goes on; None for all of them.
    """

    stable: int
    canary: int
    enough: int | None = None


def possible(r: Round, stable: Revision | None) -> bool:
    """Whether serving engines may give up GPUs: asked for, somebody serves, and not with the last engine."""
    place = r.seen.placement
    counted = place is not None and place.room is not None
    return r.spec.placement.strategy == "swap" and counted and stable is not None and r.spec.replicas > 1


def sizes(r: Round, revision: Revision, stable: Revision | None, wanted: int, baseline: EngineSet | None) -> Sizes:
    """Sizes while a canary of ``wanted`` engines is on its way; ``baseline`` is the dedicated one, None without."""
    replicas = r.spec.replicas
    place = r.seen.placement
    if not possible(r, stable) or stable is None or place is None or place.room is None:
        return Sizes(replicas, wanted)
    serving, canary = r.engines_of(stable), r.engines_of(revision)
    room = 0 if _unplaced(canary) or _unplaced(baseline) else place.room  # the scheduler knows better
    apart = 1 if baseline is not None else 0
    total = _holding(serving) + _holding(canary) + _holding(baseline) + room
    ready = len(canary.ready) if canary else 0
    given = min(wanted, ready + 1) if _shares_traffic(r, revision) else 1
    most = wanted if _shares_traffic(r, revision) else 1
    keep = max(1, replicas - given - apart)
    least = max(1, replicas - most - apart)
    left = _holding(canary) + room - max(0, apart - _holding(baseline))
    size = Sizes(
        stable=min(replicas, max(keep, total - wanted - apart)),
        canary=min(wanted, max(canary.replicas if canary else 0, left)),
        enough=max(1, min(wanted, total - least - apart)),
    )
    free = (size.stable, size.canary, size.enough) == (replicas, wanted, wanted)
    return Sizes(replicas, wanted) if free else size


def _holding(engines: EngineSet | None) -> int:
    """Engines that a node holds GPUs for, those on their way out too."""
    return sum(1 for pod in engines.pods if pod.node) if engines else 0


def _unplaced(engines: EngineSet | None) -> bool:
    return engines is not None and any(pod.waiting == "Unschedulable" for pod in engines.pods)


def _shares_traffic(r: Round, revision: Revision) -> bool:
    selector = r.seen.service_selector
    return selector is not None and selector.get(LABEL_REVISION, revision.hash) == revision.hash
