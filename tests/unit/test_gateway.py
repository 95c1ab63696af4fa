"""How much traffic goes back at once when a canary ends: what the stable set's ready engines warrant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddtree_operator.core import gateway
from ddtree_operator.core.actions import ApplyRoute
from ddtree_operator.core.facts import CanaryService, EngineSet, Header, Observed, PodFact, Revision, RouteFact, Share
from ddtree_operator.core.revisions import engine_set_name, parse
from ddtree_operator.core.round import Round

pytestmark = pytest.mark.unit

NOW, DEADLINE = 10_000.0, 300.0
HEADER = Header("x-ddtree-canary", "true")
STABLE = Revision("aaaaaaaaaa", 1, {}, result="promoted", at=1.0)
CANARY = Revision("bbbbbbbbbb", 2, {}, result="aborted", at=NOW - 10)
NAMED, HALF = Share(named=True), Share(50)


def engines(revision: Revision, ready: int, of: int) -> EngineSet:
    pods = tuple(PodFact(f"p{i}", ready=i < ready) for i in range(max(ready, of)))
    return EngineSet(engine_set_name("m", revision.hash), revision.hash, replicas=of, pods=pods)


def ended(ready: int, *, share: Share | None = HALF, canary: Revision = CANARY, of: int = 4, **more: Any) -> Round:
    """A canary that has just ended, and ``ready`` of the stable set's engines."""
    spec = parse(
        {
            "replicas": of,
            "model": {"path": "/m"},
            "drafter": {"path": "/d"},
            "traffic": {"gateway": {"httpRoute": "r"}},
            "rollback": {"progressDeadline": "5m"},
        }
    )
    seen = Observed(
        revisions=(STABLE, canary),
        sets=(engines(STABLE, ready, of), engines(canary, 1, 1)),
        route=RouteFact("r", share, touched=True, named=True, since=1.0),
    )
    r = Round("m", spec, seen, NOW)
    service = CanaryService(r.only(canary), "r")
    r.seen = replace(seen, **{"service_selector": r.only(STABLE), "canary_service": service} | more)
    return r


def given(r: Round) -> list[Share]:
    """What the route is asked to give the canary; [] when it stays as it is."""
    assert not gateway.leave(r)
    return [a.share for a in r.actions if isinstance(a, ApplyRoute)]


@pytest.mark.parametrize(
    ("ready", "share", "wanted"),
    [
        (4, HALF, [NAMED]),
        (5, HALF, [NAMED]),
        (3, HALF, [Share(25)]),
        (3, Share(25), []),
        (3, Share(10), []),  # 90% on three of four was so before: it takes nothing more
        (2, HALF, []),
        (1, HALF, []),  # and a canary that ended never gets more than it had
        (0, HALF, []),
        (3, Share(50, HEADER), [Share(25)]),
        (1, Share(50, HEADER), [HALF]),  # testers leave at once
        (0, Share(0, HEADER), [NAMED]),
        (0, None, [NAMED]),  # somebody edited our part
    ],
)
def test_a_stable_set_takes_back_what_its_ready_engines_warrant(
    ready: int, share: Share | None, wanted: list[Share]
) -> None:
    r = ended(ready, share=share)
    assert given(r) == wanted
    stays = wanted[0].weight if wanted else (share.weight if share else 0)
    assert (f"the stable set has {ready}/4 engines: {stays}% stay with the canary" == r.report.message) == (stays > 0)


def test_it_never_is_given_more_than_it_had_or_than_its_ready_engines_are() -> None:
    for ready in range(9):
        for weight in range(1, 101):
            r = ended(ready, share=Share(weight), of=8)
            after = (given(r) or [Share(weight)])[0].weight
            assert after <= weight
            assert after == weight or 100 - after <= 100 * ready // 8
            assert after in {weight, max(0, 100 - 100 * ready // 8)}


@pytest.mark.parametrize("result", ["rolledBack", "undone", "superseded"])
def test_however_it_ended(result: str) -> None:
    assert given(ended(3, canary=CANARY.changed(result=result))) == [Share(25)]


def test_after_the_progress_deadline_everything_goes_back() -> None:
    assert given(ended(2, canary=CANARY.changed(at=NOW - DEADLINE))) == []
    assert given(ended(2, canary=CANARY.changed(at=NOW - DEADLINE - 1))) == [NAMED]


def test_a_canary_that_goes_on_or_cannot_answer_keeps_nothing() -> None:
    assert given(ended(2, canary=CANARY.changed(result=""))) == [NAMED]
    gone = (engines(STABLE, 2, 4), engines(CANARY, 0, 1))
    assert given(ended(2, sets=gone)) == [NAMED]
    assert given(ended(2, sets=gone[:1])) == [NAMED]
    assert given(ended(2, sets=(engines(CANARY, 1, 1),))) == [NAMED]  # there is no stable set to spare
    assert given(ended(2, canary_service=None)) == [Share()]
    assert given(ended(0, of=0)) == [NAMED]


def test_a_route_that_cannot_be_written_is_tried_whole() -> None:
    broken = RouteFact("r", HALF, touched=True, named=True, problem="rule 2 names Service m twice")
    assert given(ended(2, route=broken)) == [NAMED]
