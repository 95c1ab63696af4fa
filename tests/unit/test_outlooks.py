"""What an analysis can tell is said in the condition Valid, once; what can never be decided is refused there."""

from __future__ import annotations

import asyncio

import pytest

from ddtree_operator.analysis.pace import Pace
from ddtree_operator.api.spec import AnalysisSpec
from ddtree_operator.core.facts import Problem, Revision
from ddtree_operator.handlers import outlooks
from ddtree_operator.handlers.outlooks import Outlooks, pace_of
from unit.world import stable

pytestmark = pytest.mark.unit

PACE = Pace(34, 2.0, 64, True, {"acceptLength": 0.1, "throughput": 0.05})


def revision(hash_: str, number: int, pace: Pace | None) -> Revision:
    return Revision(hash_, number, {}, summary={"pace": pace.as_dict()} if pace else {})


def test_the_pace_of_what_serves_comes_first() -> None:
    slow = Pace(20, 9.0, 64, True, {})
    one, two, three = revision("a", 1, PACE), revision("b", 2, slow), revision("c", 3, slow)
    assert pace_of([one, two, three], "a", "c") == (PACE, "measured over 34 pairs of revision 1")
    assert pace_of([revision("a", 1, None), two, three], "a", "c")[1].endswith("revision 2")
    assert pace_of([revision("a", 1, None)], "a", "c") == (None, "")
    assert pace_of([three], "", "c")[0] == slow  # an earlier analysis of its own


@pytest.mark.asyncio
async def test_it_is_worked_out_once_for_each_spec_and_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    work_out = outlooks._work_out
    monkeypatch.setattr(outlooks, "_work_out", lambda *a: asked.append(a) or work_out(*a))
    kept, spec = Outlooks(), AnalysisSpec()
    for said, _ in await asyncio.gather(*(kept.of(spec, None, "") for _ in range(3))):
        assert "telling no change from a loss of 3.0%" in said
    said, problem = await kept.of(spec, None, "")
    assert (len(asked), problem) == (1, None)
    assert "telling no change from a loss of 3.0%" in said
    said, problem = await kept.of(spec.model_copy(update={"deadline": "15s"}), PACE, "measured")
    assert said == ""
    assert problem is not None
    assert (problem.reason, "15s is too short" in problem.message) == ("Undecidable", True)
    _, problem = await kept.of(AnalysisSpec(acceptLength={"nonInferiority": "100%"}), None, "")
    assert problem is not None
    assert problem.message.startswith("spec.canary.analysis: acceptLength.nonInferiority: 100% would let")
    assert len(asked) == 3


def test_it_stands_in_the_condition_from_the_first_look_on() -> None:
    world = stable()
    world.outlook = "a clear case takes 10 pairs"
    world.retuned(15).tick()
    valid = next(c for c in world.status["conditions"] if c["type"] == "Valid")
    assert (valid["status"], valid["message"]) == ("True", "a clear case takes 10 pairs")


def test_what_can_never_be_decided_is_refused_and_starts_once_it_can() -> None:
    world = stable()
    text = "spec.canary.analysis.deadline: 15s is too short, the clearest case takes 10 pairs, 20 s"
    world.problems = (Problem("Undecidable", text),)
    world.retuned(15)
    for _ in range(5):
        world.tick()
    valid = next(c for c in world.status["conditions"] if c["type"] == "Valid")
    assert (valid["status"], valid["reason"], valid["message"]) == ("False", "Undecidable", text)
    assert [e.message for e in world.events if e.reason == "Undecidable"] == [text]
    assert len(world.sets) == 1  # nothing was started for it
    world.problems = ()
    world.until("Stable")
