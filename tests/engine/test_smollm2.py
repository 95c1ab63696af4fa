"""The real pair: the same text as Transformers', and a tree needs fewer steps than a chain of the same width."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.fleet import Fleet, Outcome, Scenario, engine, greedy, until_eos

pytestmark = pytest.mark.engine
TOKENS = 48
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that reverses a linked list.",
    "Explain how rainbows form.",
    "List five facts about owls.",
    "Return a JSON object describing a bicycle.",
    "Write an email asking for a day off.",
)
TEXTS = [f"{SYSTEM}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]


def scenario(name: str, algorithm: str, **extra: Any) -> Scenario:
    params = {"temperature": 0, "max_new_tokens": TOKENS}
    options = engine(algorithm, "smollm2", **extra)
    return Scenario.make(name, options, [{"requests": [{"text": text, "params": params} for text in TEXTS]}])


CHAIN, TREE = scenario("smollm2-chain", "DFLASH"), scenario("smollm2-tree", "DDTREE", speculative_ddtree_budget=15)


def counted(outcome: Outcome) -> tuple[list[dict[str, Any]], int, int]:
    assert outcome.answers is not None, outcome.log[-4000:]
    answers = outcome.answers["rounds"][0]
    metas = [a["meta"] for a in answers]
    return answers, sum(m["spec_verify_ct"] for m in metas), sum(m["spec_num_correct_drafts"] for m in metas)


@pytest.mark.parametrize("scenario", [CHAIN, TREE], ids=lambda s: s.name)
def test_greedy_equals_transformers(fleet: Fleet, scenario: Scenario) -> None:
    answers, _, _ = counted(fleet.outcome(scenario))
    expected = greedy("smollm2", TEXTS, TOKENS)
    assert [a["ids"] for a in answers] == [until_eos(e, TOKENS, ignore_eos=False) for e in expected]


def test_the_tree_needs_fewer_steps(fleet: Fleet) -> None:
    _, chain_steps, chain_drafts = counted(fleet.outcome(CHAIN))
    _, tree_steps, tree_drafts = counted(fleet.outcome(TREE))
    report = json.dumps({"chain": 1 + chain_drafts / chain_steps, "tree": 1 + tree_drafts / tree_steps})
    assert tree_steps < 0.95 * chain_steps, report
