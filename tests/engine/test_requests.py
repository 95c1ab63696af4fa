"""Constrained text: the tree gives what plain decoding gives under the same grammar."""

from __future__ import annotations

import re

import pytest

from engine.fleet import Fleet, Scenario, engine, prompts

pytestmark = pytest.mark.engine
PATTERNS = ("[a-h]{3,24}", "(cat|dog|cow)(, (cat|dog|cow)){2,5}", "[0-9]+\\.[0-9]{2}")
ASKED = prompts(6, seed=41)
ROUNDS = [
    {
        "requests": [
            {"ids": ids, "params": {"temperature": 0, "max_new_tokens": 32, **({"regex": pattern} if pattern else {})}}
            for ids in ASKED
            for pattern in (*PATTERNS, None)
        ]
    }
]
PLAIN = Scenario.make("grammar-plain", engine(None, grammar_backend="xgrammar"), ROUNDS)
TREE = Scenario.make(
    "grammar-ddtree", engine("DDTREE", speculative_ddtree_budget=15, grammar_backend="xgrammar"), ROUNDS
)


@pytest.mark.parametrize("scenario", [TREE], ids=lambda s: s.name)
def test_constrained_text_is_that_of_plain_decoding(fleet: Fleet, scenario: Scenario) -> None:
    reference = fleet.submit(PLAIN)
    outcome, plain = fleet.outcome(scenario), reference.result()
    assert outcome.answers is not None, outcome.log[-4000:]
    assert plain.answers is not None, plain.log[-4000:]
    got, want = outcome.answers["rounds"][0], plain.answers["rounds"][0]
    assert [a["ids"] for a in got] == [a["ids"] for a in want]
    finished = [
        (pattern, answer["text"])
        for answer, pattern in zip(got, (*PATTERNS, None) * len(ASKED), strict=True)
        if pattern and answer["meta"]["finish_reason"]["type"] == "stop"
    ]
    assert finished, "no constrained answer came to its end"
    for pattern, text in finished:
        assert re.fullmatch(pattern, text), (pattern, text)
