"""Faults put into the package must be noticed: by the start-up check, or by the comparison with Transformers."""

from __future__ import annotations

import pytest

from engine.fleet import (
    TOKENS,
    Fleet,
    Outcome,
    Scenario,
    ask,
    engine,
    greedy,
    prompts,
)
from engine.mutations.make import MUST

pytestmark = pytest.mark.engine
ASKED = prompts(24, seed=5)
ROUNDS = [ask(ASKED, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)]
DDTREE = engine("DDTREE", speculative_ddtree_budget=31)


def faulty(fault: str) -> Scenario:
    return Scenario.make(fault, DDTREE, ROUNDS, fault=fault)


def differing(outcome: Outcome) -> int:
    assert outcome.answers is not None, outcome.log[-4000:]
    answers = outcome.answers["rounds"][0]
    return sum(a["ids"] != want for a, want in zip(answers, greedy("tiny", ASKED, TOKENS), strict=True))


def accept_length(outcome: Outcome) -> float:
    assert outcome.answers is not None
    metas = [a["meta"] for a in outcome.answers["rounds"][0]]
    return 1 + sum(m["spec_num_correct_drafts"] for m in metas) / sum(m["spec_verify_ct"] for m in metas)


SOUND = Scenario.make("sound", DDTREE, ROUNDS)
REFUSED, TEXT, SLOWER = (
    [faulty(name) for name, must in MUST.items() if must == want] for want in ("refused", "text", "slower")
)
MISFIT = Scenario.make(
    "misfit",
    DDTREE | {"speculative_draft_model_path": "@tiny/drafter-misfit"},
    ROUNDS,
)


@pytest.mark.parametrize("scenario", REFUSED, ids=lambda s: s.name)
def test_the_start_up_check_refuses(fleet: Fleet, scenario: Scenario) -> None:
    outcome = fleet.outcome(scenario)
    assert outcome.answers is None
    assert outcome.status != 0
    assert outcome.refusal().startswith("the start-up check failed: with the tree mask a node's logits differ")
    assert outcome.log.count("ddtree: refused: ") == 1


@pytest.mark.parametrize("scenario", TEXT, ids=lambda s: s.name)
def test_the_text_differs(fleet: Fleet, scenario: Scenario) -> None:
    """These slip past the start-up check, which looks at one pass; the canary's parity check is there for them."""
    assert differing(fleet.outcome(scenario)) > len(ASKED) / 3


@pytest.mark.parametrize("scenario", [SOUND, *SLOWER, MISFIT], ids=lambda s: s.name)
def test_the_drafter_cannot_change_the_text(fleet: Fleet, scenario: Scenario) -> None:
    assert differing(fleet.outcome(scenario)) == 0
    sound = accept_length(fleet.outcome(SOUND))
    assert sound > 2
    if scenario is not SOUND:
        assert accept_length(fleet.outcome(scenario)) < sound
