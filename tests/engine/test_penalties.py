"""Penalties, a minimum length and a bias: the text of a tree is the one of plain decoding, token for token."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.fleet import EOS, Fleet, Outcome, Scenario, engine, prompts, transformers

pytestmark = pytest.mark.engine
TOKENS = 40
STOPS = [70, 48, 125]  # tokens that the tiny model likes to write
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "liked": {"repetition_penalty": 0.8, "frequency_penalty": -0.3},
    "minimum": {"min_new_tokens": 23, "stop_token_ids": STOPS},
    "bias": {"logit_bias": {"70": 2.0, "37": -3.0}},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.2,
        "min_new_tokens": 9,
        "stop_token_ids": STOPS,
        "logit_bias": {"2": 1.0, "48": 1.5},
    },
}


def rounds(count: int, seed: int) -> list[dict[str, Any]]:
    """Every prompt with every kind, shuffled: batches are mixed. Twice: then every prefix is in the radix cache."""
    rng = random.Random(seed)
    asked = [(ids, params) for ids in prompts(count, seed) for params in KINDS.values()]
    out = []
    for _ in range(2):
        rng.shuffle(asked)
        params = {"temperature": 0, "max_new_tokens": TOKENS}
        out.append(
            {"requests": [{"ids": i, "params": params | p, "delay": round(rng.random(), 3)} for i, p in asked]}
        )
    return out


ROUNDS = rounds(7, seed=61)
TREE = {"speculative_ddtree_budget": 15}
PLAIN = Scenario.make("penalties-plain", engine(None, disable_overlap_schedule=True), ROUNDS)
TREES = [
    Scenario.make("penalties-p1-overlap", engine("DDTREE", **TREE), ROUNDS),
    Scenario.make(
        "penalties-p16-sync", engine("DDTREE", **TREE, page_size=16, disable_overlap_schedule=True), ROUNDS
    ),
    Scenario.make(
        "penalties-p16-mixed",
        engine("DDTREE", **TREE, page_size=16, enable_mixed_chunk=True, chunked_prefill_size=32),
        ROUNDS,
    ),
    Scenario.make(
        "penalties-retraction",
        engine("DDTREE", speculative_ddtree_budget=31, max_total_tokens=700, schedule_conservativeness=0.3),
        ROUNDS,
    ),
]


def differing(outcome: Outcome) -> dict[str, int]:
    """Answers that are not what Transformers writes, by kind."""
    assert outcome.answers is not None, outcome.log[-4000:]
    names = {json.dumps(params): name for name, params in KINDS.items()}
    wrong = dict.fromkeys(KINDS, 0)
    for block, answers in zip(ROUNDS, outcome.answers["rounds"], strict=True):
        spec = []
        for request in block["requests"]:
            params = {k: v for k, v in request["params"].items() if k not in ("temperature", "max_new_tokens")}
            ends = [EOS, *params.get("stop_token_ids", [])]
            spec.append({"ids": request["ids"], "params": params, "ends": ends, "tokens": TOKENS})
        for asked, answer, want in zip(spec, answers, transformers("tiny", "penalised.py", spec), strict=True):
            wrong[names[json.dumps(asked["params"])]] += answer["ids"] != want
    return {name: count for name, count in wrong.items() if count}


@pytest.mark.parametrize("scenario", [PLAIN, *TREES], ids=lambda s: s.name)
def test_penalised_text_equals_transformers(fleet: Fleet, scenario: Scenario) -> None:
    outcome = fleet.outcome(scenario)
    assert not differing(outcome)
    assert outcome.answers is not None
    if scenario.name.endswith("retraction"):
        assert "Retract requests" in outcome.log, "no request was retracted"
    if scenario is not PLAIN:
        metas = [answer["meta"] for block in outcome.answers["rounds"] for answer in block]
        assert sum(m["spec_num_correct_drafts"] for m in metas) > len(metas), "the tree was hardly used"
        assert any(m["cached_tokens"] for m in metas), "no prefix was found in the radix cache"
        assert outcome.answers["flushed"]
