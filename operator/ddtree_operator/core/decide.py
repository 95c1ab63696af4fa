"""The decision: from spec and observation to actions and status. Called as often as one likes; no I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.core import gateway, report, rolling
from ddtree_operator.core.actions import QUIET, Action, ApplyService, Attest, DeleteEngines, PruneRevision
from ddtree_operator.core.alarms import heed
from ddtree_operator.core.commands import obey
from ddtree_operator.core.facts import Observed, Revision
from ddtree_operator.core.meanwhile import ENGINES_REFUSED
from ddtree_operator.core.round import Round
from ddtree_operator.core.standstill import in_force, remember, stand_still
from ddtree_operator.core.units import clip, seconds
from ddtree_operator.core.waiting import lost_node, waiting_for
from ddtree_operator.core.watch import watch


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, what the status should be, and whether to look again at once."""

    actions: tuple[Action, ...]
    status: dict[str, Any]
    again: bool = False
    wake: float = math.inf  # seconds after which time alone changes something
    noted: bool = False  # a command or an alert was taken note of, and no more: what runs goes on
    undisturbed: bool = False  # and it changed nothing about the rollout: its analysis goes on, too


def decide(
    name: str, spec: dict[str, Any], seen: Observed, now: float, *, generation: int, status: dict[str, Any]
) -> Decision:
    """One look at one resource.

    ``spec`` and ``status`` are the resource's own, raw; ``now`` is epoch seconds. A spec with a mistake is reported and
    begins nothing: what serves goes on, a rollout stands still, and both can go back (:mod:`core.standstill`).
    """
    parsed, mistake = in_force(spec, seen.revisions, seen.sets)
    if parsed is None:
        finished = report.invalid(mistake, {}, now, generation, status)
        return Decision(tuple(report.events(status, finished)), finished)
    r = Round(name=name, spec=parsed, seen=seen, now=now, mistake=mistake)
    wanted = remember(r, r.wanted())
    serving = _adopted(r, wanted, r.serving())
    wanted = obey(r, wanted, serving)
    wanted = heed(r, wanted)
    _supersede(r, wanted)
    if r.again:  # the facts about build, placement and analysis belong to the revision as it was before: look again
        return Decision(tuple(r.actions), status, again=True, noted=True, undisturbed=_undisturbed(r, wanted))
    goal = _goal(r, wanted, serving)
    if goal is None:
        r.point_service(r.only(None))
        gateway.leave(r)
    elif mistake and goal.result == "":
        stand_still(r, goal, serving)
    elif serving is not None and goal.hash == serving.hash:
        _steady(r, goal)
        if goal.hash == wanted.hash:  # else the spec asks for something else, which was blocked
            watch(r, r.revisions[goal.hash])
    elif goal.result == "promoted":
        _restore(r, goal, serving)
    else:
        rolling.roll(r, goal, serving)
        if not seen.attested:  # last: a rollout does not wait for it
            r.actions.append(Attest(goal.image))
    _clean(r, goal, serving)
    _prune(r, wanted, goal, serving)
    if wanted.blocked or r.revisions[wanted.hash].blocked:
        blocked = r.revisions[wanted.hash]
        moving = r.report.phase in {"Degraded", "Promoting"}
        if not moving:
            r.report.phase = "RolledBack"
        r.report.message = clip(f"{r.report.message}; {blocked.reason}") if moving else blocked.reason
    finished = report.status(r, r.revisions[wanted.hash], serving, generation, status)
    if mistake:
        finished = report.invalid(mistake, finished, now, generation, status)
    actions = r.actions + report.events(status, finished)
    again = r.again or any(not isinstance(a, QUIET) for a in actions)
    return Decision(tuple(actions), finished, again=again, wake=r.wake)


def _undisturbed(r: Round, wanted: Revision) -> bool:
    """Whether the wanted revision stands where it stood when it was looked at."""
    before, now = r.seen.revision(wanted.hash), r.revisions[wanted.hash]
    return before is not None and all(getattr(before, x) == getattr(now, x) for x in ("result", "attempt", "progress"))


def _adopted(r: Round, wanted: Revision, serving: Revision | None) -> Revision | None:
    """What serves alone, though its record does not say that it was promoted, was: the record is lost, or a crash came
    between the switch and writing it down. Without this its engines would be taken away as nobody's.
    """
    if serving is None or serving.hash == wanted.hash or serving.result not in {"", "superseded"}:
        return serving
    if _pointed(r) != serving.hash:
        return serving
    r.emit("Warning", "RecordLost", f"revision {serving.number} ({serving.hash}) serves, and its record is made anew")
    why = "it serves; the record of its rollout was lost"
    return r.save(serving, result="promoted", reason=why, by="operator", at=r.now, image=r.image_of(serving))


def _supersede(r: Round, wanted: Revision) -> None:
    """A new spec replaces whatever rollout was under way."""
    for rev in list(r.revisions.values()):
        if rev.hash != wanted.hash and rev.result == "" and rev.number < wanted.number:
            r.save(rev, result="superseded", reason=f"replaced by revision {wanted.number}", at=r.now)
        elif rev.hash != wanted.hash and rev.result == "" and rev.progress is not None:
            r.save(rev, result="superseded", reason=f"the spec went back to revision {wanted.number}", at=r.now)


def _goal(r: Round, wanted: Revision, serving: Revision | None) -> Revision | None:
    """The revision that should serve in the end."""
    if not wanted.blocked:
        return wanted
    chosen = r.revisions.get(wanted.fallback)
    if chosen is not None and chosen.result == "promoted":
        return chosen
    if serving is not None and serving.result == "promoted":
        return serving
    return next(iter(r.promoted()), None)


def _steady(r: Round, goal: Revision) -> None:
    """What should serve does: keep it at its size, keep the Service on it."""
    if goal.result != "promoted":  # the Service was switched, but a crash kept the record from being written
        goal = r.save(goal, result="promoted", at=r.now, **rolling.promotion(goal))
    engines = r.have_engines(goal, r.spec.replicas)
    r.point_back(goal)
    gateway.leave(r)
    ready = len(engines.ready)
    r.report.built = ("True", "Built", goal.image)
    if ready == 0 and r.spec.replicas > 0:
        r.report.phase = "Degraded"
        r.report.message = waiting_for("stable", engines, r.spec.replicas)
        if refused := next((p.message for p in r.seen.problems if p.reason == ENGINES_REFUSED), ""):
            r.report.message = clip(f"{r.report.message}; {refused}")
    elif r.seen.service_problem:
        r.report.phase, r.report.message = "Degraded", clip(r.seen.service_problem)
    elif r.seen.route is not None and r.seen.route.gives:
        r.report.phase = "Promoting"
        r.report.message = r.report.message or f"HTTPRoute {r.seen.route.name} is given back as it was written"
    else:
        r.report.phase = "Stable"
        r.report.message = f"revision {goal.number} serves with {ready}/{r.spec.replicas} engines ready"
        lost = lost_node(engines)
        if lost and ready < r.spec.replicas:
            r.report.message = clip(f"{r.report.message}; {lost}")


def _restore(r: Round, goal: Revision, serving: Revision | None) -> None:
    """Back to a revision that was judged before: start it, wait until all of it is ready, then switch."""
    gateway.leave(r)
    if serving is not None:
        r.have_engines(serving, r.spec.replicas)
    engines = r.have_engines(goal, r.spec.replicas)
    r.report.phase = "Promoting"
    if len(engines.ready) < r.spec.replicas:
        waits = waiting_for("engines", engines, r.spec.replicas)
        r.report.message = f"going back to revision {goal.number}: {waits}"
        return
    r.report.message = f"revision {goal.number} takes the traffic again"
    if r.seen.service_selector != r.only(goal) and not r.seen.service_problem:
        # recorded first: a crash between must not make it look newly promoted
        r.save(goal, at=r.now, returned=True)
        r.emit("Normal", "Restored", f"revision {goal.number} ({goal.hash}) serves again")
    r.point_service(r.only(goal))


def _clean(r: Round, goal: Revision | None, serving: Revision | None) -> None:
    """Remove engine sets that nobody needs, once no traffic can reach them, and never the only healthy one."""
    goal_now = r.revisions[goal.hash] if goal else None
    rolling_now = goal_now is not None and goal_now.result == "" and goal_now.progress is not None
    needed = {rev.hash for rev in (goal_now, serving) if rev is not None and not rev.blocked}
    if goal_now is not None and goal_now.result == "promoted" and _pointed(r) == goal_now.hash:
        needed = {goal_now.hash}
    switching = any(isinstance(a, ApplyService) for a in r.actions)
    drained = r.now >= r.seen.switched_at + seconds(r.spec.traffic.drain)
    healthy_elsewhere = any(s.ready for s in r.seen.sets if not s.baseline and s.revision in needed)
    for engines in r.seen.sets:
        if engines.baseline:
            over = r.report.compared or r.report.baseline == "stable"
            if over or not (rolling_now and goal_now and engines.revision == goal_now.hash):
                r.actions.append(DeleteEngines(engines.name))
            continue
        if engines.revision in needed:
            continue
        reachable = _pointed(r) in {engines.revision, ""} or _routed(r) == engines.revision
        draining = not drained and _carried_traffic(r, engines.revision)
        if reachable or switching or draining:
            r.again = r.again or switching
            if draining:
                r.wake_in(r.seen.switched_at + seconds(r.spec.traffic.drain) - r.now)
            continue
        if engines.ready and not healthy_elsewhere and r.spec.replicas > 0 and needed:
            continue
        r.actions.append(DeleteEngines(engines.name))


def _pointed(r: Round) -> str:
    """Revision that the Service selects; "" when it selects several, "none" when there is no Service."""
    if r.seen.service_selector is None:
        return "none"
    return r.seen.service_selector.get(LABEL_REVISION, "")


def _routed(r: Round) -> str:
    """Revision that an HTTPRoute may still send requests to, by the canary's Service; "" without one."""
    return r.seen.canary_service.revision if r.seen.canary_service is not None else ""


def _carried_traffic(r: Round, hash_: str) -> bool:
    """False for a canary that never had weight: it holds no requests and may leave at once."""
    revision = r.revisions.get(hash_)
    if revision is None or revision.result == "promoted":
        return True
    if revision.progress is None:
        return False
    passed = r.spec.canary.steps[: revision.progress.step + 1]
    return any((s.weight or 0) > 0 for s in passed) or r.seen.switched_at > revision.progress.started_at


def _prune(r: Round, wanted: Revision, goal: Revision | None, serving: Revision | None) -> None:
    """Forget the oldest revisions beyond ``rollback.keep``; never the one that an alert would go back to, however many
    canaries have failed since it served.
    """
    fixed = {rev.hash for rev in (wanted, goal, serving) if rev is not None} | {wanted.fallback}
    fixed |= {rev.hash for rev in [p for p in r.promoted() if goal is None or p.hash != goal.hash][:1]}
    if r.seen.request is not None:  # who forgets what was done does it again
        fixed |= {rev.hash for rev in r.revisions.values() if rev.handled == r.seen.request.id}
    others = sorted((x for x in r.revisions.values() if x.hash not in fixed), key=lambda x: -x.number)
    for rev in others[r.spec.rollback.keep :]:
        r.actions.append(PruneRevision(rev))
