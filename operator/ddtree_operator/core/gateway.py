"""Traffic by an HTTPRoute: the canary has a Service of its own, and the user's route gives it a share.

Order is everything here. The canary's Service is made before the route names it, and the route names it with weight 0
for ``gateway.settle`` before it gives it anything: a proxy that hears of the split before it hears of the backend
answers 503 (Contour sends both at once, unordered). On the way back the weight is 0 for ``traffic.drain`` before the
name goes; the engines stay at least as long. Whatever the route looks like, each look compares it with the share that
is wanted now, so that edits by hand and lost answers mend themselves.
"""

from __future__ import annotations

from ddtree_operator.api.spec import Step
from ddtree_operator.core.actions import ApplyCanaryService, ApplyRoute, DeleteCanaryService
from ddtree_operator.core.facts import EngineSet, Header, Revision, RouteFact, Share
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip, seconds

NOTHING = Share()
NAMED = Share(named=True)


def used(r: Round) -> bool:
    """Whether weights are a route's."""
    return r.spec.traffic.gateway is not None


def wanted(steps: list[Step], index: int) -> Share:
    """The share in force at a step: the last weight and the last header set up to and including it."""
    done = steps[: index + 1]
    weight = next((s.weight for s in reversed(done) if s.weight is not None), 0)
    header = next((s.header_route for s in reversed(done) if s.header_route is not None), None)
    return Share(weight, Header(header.name, header.value) if header else None)


def replicas(steps: list[Step], index: int) -> int | None:
    """Canary size that a step asked for; None when none did."""
    return next((s.canary_replicas for s in reversed(steps[: index + 1]) if s.canary_replicas is not None), None)


def give(r: Round, revision: Revision, share: Share, engines: EngineSet) -> bool:
    """Have the canary's share so; True once the route is in force with it. Nothing goes to a set that is not ready."""
    if not _usable(r):
        return False
    if not share.gives:
        return leave(r, keep_service=True) if r.seen.canary_service is not None else _route(r, share)
    if not engines.ready:
        hold_back(r, revision, engines)
        return False
    return _service(r, revision) and _route(r, share)


def hold_back(r: Round, revision: Revision, engines: EngineSet) -> None:
    """While a canary has no ready engine, its traffic goes to the stable set."""
    service = r.seen.canary_service
    if service is not None and service.revision == revision.hash and not engines.ready:
        leave(r, keep_service=True)


def tidy(r: Round, revision: Revision) -> None:
    """Take back what a route still gives to another canary, or what another route gives to this one."""
    service = r.seen.canary_service
    gateway = r.spec.traffic.gateway
    if service is None:
        return
    if service.revision != revision.hash or gateway is None or service.route != gateway.http_route:
        leave(r)


def leave(r: Round, *, keep_service: bool = False) -> bool:
    """Give the route back as its owner wrote it; True once it is in force and nothing of ours is left.

    With ``keep_service`` the canary only gets nothing: it stays named with weight 0, and has its Service.
    """
    service, fact = r.seen.canary_service, r.seen.route
    if fact is not None and fact.gives:
        if not _within_reach(r, fact):
            r.actions.append(ApplyRoute(fact.name, NAMED if service is not None else NOTHING))
        return False
    if service is None:
        if fact is not None and fact.touched:
            r.actions.append(ApplyRoute(fact.name, NOTHING))
        return fact is None or not fact.touched
    if fact is not None and fact.waits and not fact.problem:
        _waiting(r, fact)
        return False
    if not service.left_at:
        r.actions.append(ApplyCanaryService(service.selector, service.route, r.now))
        return False
    if keep_service:
        return True
    left = service.left_at + seconds(r.spec.traffic.drain) - r.now
    if left > 0:
        r.wake_in(left)
    elif fact is not None and fact.touched:
        r.actions.append(ApplyRoute(fact.name, NOTHING))
    else:
        r.actions.append(DeleteCanaryService())
    return False


def _within_reach(r: Round, fact: RouteFact) -> bool:
    """A stable set that is not whole takes no more traffic than its ready engines warrant, for a while; True while it
    cannot take more than it has.
    """
    now = fact.share.weight if fact.share is not None else 0
    serving, service = r.serving(), r.seen.canary_service
    stable = r.engines_of(serving) if serving else None
    canary = next((s for s in r.seen.sets if service and s.revision == service.revision and not s.baseline), None)
    ended = r.revisions[canary.revision] if canary and canary.revision in r.revisions else None
    if (
        fact.problem
        or not now
        or stable is None
        or canary is None
        or not canary.ready
        or ended is None
        or r.spec.replicas == 0
    ):
        return False
    if r.leaving(ended) < 0:
        return False
    able = min(100, 100 * len(stable.ready) // r.spec.replicas)
    most = min(now, 100 - able)
    if most == 0:
        return False
    assert fact.share is not None
    if most < now or fact.share.header is not None:
        r.actions.append(ApplyRoute(fact.name, Share(most)))
    r.report.message = f"the stable set has {len(stable.ready)}/{r.spec.replicas} engines: {most}% stay with the canary"
    return True


def _usable(r: Round) -> bool:
    fact = r.seen.route
    if fact is None or fact.problem:
        r.report.phase = "Pending"
        r.report.message = clip(fact.problem) if fact else "the HTTPRoute was not read yet"
        return False
    return True


def _service(r: Round, revision: Revision) -> bool:
    """Have the canary's Service select this revision; True once it is so."""
    service, fact = r.seen.canary_service, r.seen.route
    assert fact is not None
    if service is not None and service.selector == r.only(revision) and service.route == fact.name:
        if not service.left_at:
            return True
    elif service is not None and (service.revision != revision.hash or service.route != fact.name):
        leave(r)  # somebody else's still: it drains first
        return False
    r.actions.append(ApplyCanaryService(r.only(revision), fact.name))
    return False


def _route(r: Round, share: Share) -> bool:
    fact = r.seen.route
    assert fact is not None
    if share.gives and not fact.named:
        r.actions.append(ApplyRoute(fact.name, NAMED))
        return False
    if share.gives and fact.share == NAMED and not _settled(r, fact):
        return False
    if fact.share != share:
        r.actions.append(ApplyRoute(fact.name, share))
        return False
    if fact.waits:
        _waiting(r, fact)
        return False
    return True


def _settled(r: Round, fact: RouteFact) -> bool:
    """Whether every proxy has had time to learn of the canary's backend."""
    if fact.waits:
        _waiting(r, fact)
        return False
    assert r.spec.traffic.gateway is not None
    left = fact.since + seconds(r.spec.traffic.gateway.settle) - r.now
    if left > 0:
        r.report.message = f"HTTPRoute {fact.name} names the canary; its proxies have a moment to learn of it"
        r.wake_in(left)
    return left <= 0


def _waiting(r: Round, fact: RouteFact) -> None:
    r.report.message = clip(f"waiting for HTTPRoute {fact.name}: {fact.waits}")
    r.wake_in(1.0)


def told(r: Round) -> tuple[str, str, str] | None:
    """Condition Routed; None where no route is used."""
    fact = r.seen.route
    if fact is None or not used(r):
        return None
    if fact.problem:
        return "False", "RouteUnusable", fact.problem
    if fact.waits:
        return "False", "NotInForce", f"HTTPRoute {fact.name}: {fact.waits}"
    if fact.share is None:
        return "False", "Edited", f"HTTPRoute {fact.name} was edited, and is written anew where a canary is under way"
    testers = f", and requests with {fact.share.header.name}" if fact.share.header else ""
    return "True", "InForce", f"HTTPRoute {fact.name} gives the canary {fact.share.weight}%{testers}"
