"""What is seen to at each look at a rollout, however far it has come."""

from __future__ import annotations

from dataclasses import replace

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.core import gateway
from ddtree_operator.core.facts import Revision
from ddtree_operator.core.round import Round

ENGINES_REFUSED = "EnginesRefused"  # a problem: the API server does not take a Deployment of engines


def uphold(r: Round, revision: Revision, stable: Revision | None) -> None:
    """While a rollout cannot go on: what serves has the size that is asked for, and no request goes to a canary that
    has no ready engine.
    """
    canary = r.engines_of(revision)
    gave = canary is not None and r.spec.placement.strategy == "swap"  # some of it, to the canary
    if stable is not None and not gave:
        r.have_engines(stable, r.spec.replicas)
    if canary is not None:
        gateway.hold_back(r, revision, canary)


def unstuck(r: Round, revision: Revision) -> Revision:
    """Time in which people have to see to something first counts for no deadline: it begins anew when they have."""
    progress = revision.progress
    assert progress is not None
    stuck = any(p.reason != ENGINES_REFUSED for p in r.seen.problems)  # these are tried again, within the deadline
    if progress.stuck == stuck or (progress.stuck and r.seen.problems):
        return revision
    if stuck:
        return r.save(revision, progress=replace(progress, stuck=True))
    steps = r.spec.canary.steps
    judged = progress.step < len(steps) and steps[progress.step].analysis is not None
    step_since = r.now if judged else progress.step_since
    return r.save(revision, progress=replace(progress, stuck=False, since=r.now, step_since=step_since))


def relieve(r: Round, revision: Revision, stable: Revision | None) -> None:
    """What a canary that has ended still has of the Service goes back, however long this one takes to come so far."""
    strangers = {s.revision for s in r.seen.sets if not s.baseline} - {revision.hash, stable.hash if stable else ""}
    selector = r.seen.service_selector
    if stable is None or not strangers or selector is None:
        return
    if selector.get(LABEL_REVISION) not in {None, *strangers}:
        return
    r.point_back(stable)
