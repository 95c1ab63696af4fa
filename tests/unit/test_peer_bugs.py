"""Bugs that users of other rollout tools met, as far as they concern the decision, on the whole of it.

NAMED says which test names which bug. Many looks at no difference are in test_analysis_sequential, the same answers
from a real server in integration/test_prometheus_checks, restarts of the whole operator in
integration/test_operator_killed;
what is no matter of analysis (aborts, promotions, steady state) is in test_decide.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from analysis_streams import noisy_pairs
from ddtree_operator.analysis import Policy, evaluate
from ddtree_operator.analysis.power import fewest_pairs
from ddtree_operator.api.spec import AnalysisSpec
from ddtree_operator.core.facts import AnalysisFact
from ddtree_operator.handlers.analyses import summary
from unit.world import stable

pytestmark = pytest.mark.unit

OUTCOMES = {"ok": "pass", "fail": "fail", "error": "notYet", "inconclusive": "notYet"}


@pytest.mark.parametrize("on_inconclusive", ["pause", "rollback"])
@pytest.mark.parametrize("script", list(itertools.product(OUTCOMES, repeat=3)))
def test_argo_4479_a_revision_serves_only_if_every_analysis_said_pass(
    script: tuple[str, ...], on_inconclusive: str
) -> None:
    """B1, over all outcomes of three analysis steps."""
    steps = [{"analysis": {}}] * 3
    world = stable(canary={"steps": steps, "analysis": {"onInconclusive": on_inconclusive}})
    old = world.status["revision"]
    ends = iter(script)
    now: dict[tuple[str, int, int], str] = {}

    def verdict(fact: AnalysisFact) -> AnalysisFact:
        key = (fact.revision, fact.attempt, fact.step)
        if key not in now:
            now[key] = next(ends)
        kind = now[key]
        stuck = f"{kind}: no more" if OUTCOMES[kind] == "notYet" else ""
        return AnalysisFact(*key, OUTCOMES[kind], kind, exhausted=stuck)

    world.judge = verdict
    world.retuned(15)
    for _ in range(60):
        world.tick()
    promoted = world.status["phase"] == "Stable"
    assert promoted == (script == ("ok",) * 3)
    if not promoted:
        assert world.status["stable"]["revision"] == old
        first = next(kind for kind in script if kind != "ok")
        paused = OUTCOMES[first] == "notYet" and on_inconclusive == "pause"
        assert world.status["phase"] == ("Paused" if paused else "RolledBack")
    assert not world.outages


def test_argo_4602_engines_that_never_start_are_no_good_measurement() -> None:
    """B2: whatever hinders them, nothing is measured, and nothing is promoted."""
    world = stable()
    old = world.status["revision"]
    world.retuned(15).tick()
    world.failure[f"m-{world.status['revision']}"] = "they cannot be made"
    for _ in range(600):
        world.tick()
    assert world.status["phase"] == "RolledBack"
    assert world.status["stable"]["revision"] == old
    assert not any(revision != old for revision, _, _ in world.analyses)


NAMED = {
    "B1 failed measurements end as success": "argo_4479",
    "B2 unreadable metric counted as success": "argo_4535",
    "B2 a measurement that never starts": "argo_4602",
    "B3 empty vector, NaN, several series": "argo_1466_4535_4680",
    "B3 the last of several series": "flagger_takes_the_last",
    "B3 goes on after a check without a value": "flagger_1689",
    "B4 gauge that froze": "sglang_a_gauge_that_froze",
    "B4 more accepted than proposed": "sglang_11572",
    "B4 zeros in answers": "sglang_13754",
    "B5 low traffic": "suna_3403",
    "B13 restarts": "argo_3080",
    "B20 too large": "argo_3259",
}


@pytest.mark.parametrize("bug", NAMED)
def test_each_bug_of_the_list_has_a_test_that_names_it(bug: str) -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert f"def test_{NAMED[bug]}" in tests


def test_argo_4479_count_2_and_failure_limit_2_is_refused_before_it_starts() -> None:
    """F2: an analysis that cannot tell anything is no analysis."""
    policy = Policy.from_spec(AnalysisSpec(min_pairs=2, max_pairs=2))
    assert fewest_pairs(policy) > policy.max_pairs


def test_argo_3259_a_status_stays_below_64_kilobytes_whatever_happened() -> None:
    """B20: ten thousand pairs, long reasons, many revisions, everything commanded by hand."""
    verdict = evaluate(noisy_pairs(0, 10_000, 0.0, 0.0), Policy.from_spec(AnalysisSpec()))
    kept = summary(verdict, "sha256:" + "0" * 64)
    long = "x" * 5000

    def judge(fact: AnalysisFact) -> AnalysisFact:
        return AnalysisFact(fact.revision, fact.attempt, fact.step, "notYet", long, summary=kept, kept=kept)

    world = stable(canary={"analysis": {"deadline": "1m"}}, rollback={"keep": 50})
    world.judge = judge
    for budget in range(1, 26):
        world.retuned(budget).until("Paused")
        for _ in range(5):
            world.ask("resume", reason=long[:500]).tick()
            world.ask("pause", reason=long[:500]).tick()
        world.ask("abort", reason=long[:500]).until("RolledBack")
    assert len(json.dumps(world.status)) < 64 << 10
    assert len(world.status["history"]) == 20
    assert len(world.status["history"][-1]["log"]) == 8
    biggest = max(len(json.dumps(r.summary) + json.dumps(r.log)) for r in world.revisions.values())
    assert biggest < 16 << 10  # kept in an annotation, of which an object may have 256 KiB
