"""Penalties, a minimum length and a bias: the text of a tree is the one of plain decoding, token for token."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from engine.fleet import EOS, Fleet, Outcome, Scenario, engine, prompts, transformers
from engine.mutations.make import MUST

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


ASKED = prompts(5, seed=61)


def rounds(seed: int, spread: float = 0.5) -> list[dict[str, Any]]:
    """Every prompt with every kind, shuffled: batches are mixed. Twice: then every prefix is in the radix cache.
    Requests arrive over ``spread`` seconds."""
    rng = random.Random(seed)
    asked = [(ids, params) for ids in ASKED for params in KINDS.values()]
    out = []
    for _ in range(2):
        rng.shuffle(asked)
        params = {"temperature": 0, "max_new_tokens": TOKENS}
        out.append(
            {"requests": [{"ids": i, "params": params | p, "delay": round(spread * rng.random(), 3)} for i, p in asked]}
        )
    return out


# Only plain decoding with overlap scheduling has a defined order, but there SGLang counts one step late; without, it
# adds and scales in the order of a Python set of classes. So plain is asked only where the order is no matter.
ORDERED = ("liked", "all")
ROUNDS = rounds(seed=61)
SINGLE = [KINDS[name] for name in ("frequency", "presence", "repetition", "minimum")]
MORE = [
    {
        "ids": ids,
        "params": {"temperature": 0, "max_new_tokens": 24, **params, **more},
        "more": {} if more else {"return_logprob": True, "top_logprobs_num": 3},
    }
    for ids in ASKED[:3]
    for params in SINGLE
    for more in ({"regex": "[a-h]{3,24}"}, {})
]
BOTH = [*ROUNDS, {"requests": MORE}]
GRAMMAR = {"grammar_backend": "xgrammar"}
TREE = {"speculative_ddtree_budget": 15}
PLAIN = Scenario.make("penalties-plain", engine(None, disable_overlap_schedule=True, **GRAMMAR), BOTH)
TREES = [
    Scenario.make("penalties-p1-overlap", engine("DDTREE", **TREE, **GRAMMAR), BOTH),
    Scenario.make("penalties-p16-sync", engine("DDTREE", **TREE, page_size=16, disable_overlap_schedule=True), ROUNDS),
    Scenario.make(
        "penalties-p16-mixed",
        engine("DDTREE", **TREE, page_size=16, enable_mixed_chunk=True, chunked_prefill_size=32),
        ROUNDS[:1],
    ),
    Scenario.make(
        "penalties-retraction",
        engine("DDTREE", speculative_ddtree_budget=31, max_total_tokens=640, schedule_conservativeness=0.3),
        rounds(seed=62, spread=0.0)[:1],
    ),
]


@cache
def expected() -> dict[str, list[int]]:
    """Transformers' text by prompt and penalties."""
    spec = [
        {"ids": ids, "params": params, "ends": [EOS, *params.get("stop_token_ids", [])], "tokens": TOKENS}
        for ids in ASKED
        for params in KINDS.values()
    ]
    texts = transformers("tiny", "penalised.py", spec)
    return {json.dumps([s["ids"], s["params"]]): text for s, text in zip(spec, texts, strict=True)}


def differing(scenario: Scenario, outcome: Outcome) -> dict[str, int]:
    """Answers that are not what Transformers writes, by kind."""
    assert outcome.answers is not None, outcome.log[-4000:]
    names = {json.dumps(params): name for name, params in KINDS.items()}
    wrong = dict.fromkeys(KINDS, 0)
    for block, answers in list(zip(map(json.loads, scenario.rounds), outcome.answers["rounds"], strict=True))[:2]:
        for request, answer in zip(block["requests"], answers, strict=True):
            params = {k: v for k, v in request["params"].items() if k not in ("temperature", "max_new_tokens")}
            wrong[names[json.dumps(params)]] += answer["ids"] != expected()[json.dumps([request["ids"], params])]
    return {name: count for name, count in wrong.items() if count}


FAULTY = [
    Scenario.make(fault, engine("DDTREE", **TREE), [{"requests": ROUNDS[0]["requests"][:24]}], fault=fault)
    for fault, must in MUST.items()
    if must == "penalised"
]


@pytest.mark.parametrize("scenario", [PLAIN, *TREES], ids=lambda s: s.name)
def test_penalised_text_equals_transformers(fleet: Fleet, scenario: Scenario) -> None:
    outcome = fleet.outcome(scenario)
    wrong = differing(scenario, outcome)
    if scenario is PLAIN:
        wrong = {name: count for name, count in wrong.items() if name not in ORDERED}
    assert not wrong
    assert outcome.answers is not None
    if scenario.name.endswith("retraction"):
        assert "Retract requests" in outcome.log, "no request was retracted"
    if scenario is not PLAIN:
        metas = [answer["meta"] for block in outcome.answers["rounds"] for answer in block]
        assert sum(m["spec_num_correct_drafts"] for m in metas) > len(metas), "the tree was hardly used"
        if len(scenario.rounds) > 1:
            assert any(m["cached_tokens"] for m in metas), "no prefix was found in the radix cache"
        assert outcome.answers["flushed"]


@pytest.mark.parametrize("scenario", FAULTY, ids=lambda s: s.name)
def test_a_fault_shows_where_it_counts(fleet: Fleet, scenario: Scenario) -> None:
    wrong = set(differing(scenario, fleet.outcome(scenario)))
    assert wrong
    assert wrong <= {"frequency", "presence", "repetition", "liked", "all"}


def test_log_probabilities_and_grammar(fleet: Fleet) -> None:
    """Both come after the penalties; one kind of penalty each, where plain decoding has an order."""
    plain, tree = (fleet.submit(scenario).result().answers for scenario in (PLAIN, TREES[0]))
    assert plain is not None
    assert tree is not None
    want, got = plain["rounds"][2], tree["rounds"][2]
    assert [a["ids"] for a in got] == [a["ids"] for a in want]
    assert [a["text"] for a in got] == [a["text"] for a in want]
    for mine, other in zip(got, want, strict=True):
        for key in ("output_token_logprobs", "output_top_logprobs"):
            a, b = (
                [entry for at in m["meta"].get(key, ()) for entry in (at if isinstance(at[0], list) else [at])]
                for m in (mine, other)
            )
            assert [token for _, token, _ in a] == [token for _, token, _ in b]
            assert [v for v, *_ in a] == pytest.approx([v for v, *_ in b], abs=1e-4)
