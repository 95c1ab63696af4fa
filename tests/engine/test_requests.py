"""What a request can ask for beside a length: with a tree it gets what plain decoding gives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.fleet import Fleet, Scenario, engine, prompts

pytestmark = pytest.mark.engine
ASKED = prompts(6, seed=41)
PATTERNS = ("[a-h]{3,24}", "(cat|dog|cow)(, (cat|dog|cow)){2,5}", "[0-9]+\\.[0-9]{2}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ant", "bee"]}, "ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
# pieces of what the tiny model writes, longer than a token, so that a path can run over their end
STOPS = ([",ñ", "bjb"], ["JøI", "AI6"], ["@R", "qj", "Fz"], ["never"])
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "grammar": [{"regex": pattern} for pattern in PATTERNS] + [{}],
    "json": [{"json_schema": json.dumps(SCHEMA)}, {}],
    "stop strings": [{"stop": stop} for stop in STOPS] + [{"stop": STOPS[2], "no_stop_trim": True}],
    "stop tokens": [{"stop_token_ids": [70, 48, 125]}, {"stop_token_ids": [37, 66]}],
    "log-probabilities": [{}],
}
PARTS = list(SAMPLING)
ROUNDS = [
    {
        "requests": [
            {
                "ids": ids,
                "params": {"temperature": 0, "max_new_tokens": 48, **more},
                "more": {"return_logprob": True, "top_logprobs_num": 3} if part == "log-probabilities" else {},
            }
            for ids in ASKED
            for more in SAMPLING[part]
        ]
    }
    for part in PARTS
]
OPTIONS: dict[str, Any] = {"grammar_backend": "xgrammar", "constrained_json_disable_any_whitespace": True}
PLAIN = Scenario.make("requests-plain", engine(None, **OPTIONS), ROUNDS)
TREE = Scenario.make("requests-ddtree", engine("DDTREE", speculative_ddtree_budget=15, **OPTIONS), ROUNDS)


def pairs(fleet: Fleet, part: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(what was asked for, the tree's answer, plain's) of a part; texts, tokens and why they end are equal."""
    reference = fleet.submit(PLAIN)
    outcome, plain = fleet.outcome(TREE), reference.result()
    assert outcome.answers is not None, outcome.log[-4000:]
    assert plain.answers is not None, plain.log[-4000:]
    number = PARTS.index(part)
    got, want = outcome.answers["rounds"][number], plain.answers["rounds"][number]
    for key in ("ids", "text"):
        assert [a[key] for a in got] == [a[key] for a in want]
    assert [a["meta"]["finish_reason"] for a in got] == [a["meta"]["finish_reason"] for a in want]
    assert sum(a["meta"]["spec_num_correct_drafts"] for a in got) > len(got), "the tree was hardly used"
    return list(zip(SAMPLING[part] * len(ASKED), got, want, strict=True))


def test_text_under_a_regular_expression(fleet: Fleet) -> None:
    whole = [
        (asked["regex"], answer["text"])
        for asked, answer, _ in pairs(fleet, "grammar")
        if asked and answer["meta"]["finish_reason"]["type"] == "stop"
    ]
    assert whole, "no constrained answer came to its end"
    for pattern, text in whole:
        assert re.fullmatch(pattern, text), (pattern, text)


def test_json_under_a_schema(fleet: Fleet) -> None:
    whole = [
        json.loads(answer["text"])
        for asked, answer, _ in pairs(fleet, "json")
        if asked and answer["meta"]["finish_reason"]["type"] == "stop"
    ]
    assert whole, "no object came to its end"
    for value in whole:
        assert list(value) == ["name", "ok", "n"]
        assert value["name"] in ("ant", "bee")
        assert value["n"] in (1, 22, 333)


def test_stop_strings(fleet: Fleet) -> None:
    seen = set()
    for asked, answer, _ in pairs(fleet, "stop strings"):
        matched = answer["meta"]["finish_reason"].get("matched")
        if isinstance(matched, str):
            seen.add((matched, "no_stop_trim" in asked))
            assert answer["text"].endswith(matched) == ("no_stop_trim" in asked)
            assert answer["text"].count(matched) == ("no_stop_trim" in asked)
    assert len({text for text, _ in seen}) > 2, "hardly any stop string was met"


def test_stop_tokens(fleet: Fleet) -> None:
    met = 0
    for asked, answer, _ in pairs(fleet, "stop tokens"):
        matched = answer["meta"]["finish_reason"].get("matched")
        if matched in asked["stop_token_ids"]:
            met += 1
            assert answer["ids"][-1] == matched
            assert not set(answer["ids"][:-1]) & set(asked["stop_token_ids"])
    assert met > 2, "hardly any stop token was met"


def test_log_probabilities(fleet: Fleet) -> None:
    for _, got, want in pairs(fleet, "log-probabilities"):
        mine, plain = got["meta"], want["meta"]
        assert [token for _, token, _ in mine["output_token_logprobs"]] == got["ids"]
        for key in ("output_token_logprobs", "output_top_logprobs"):
            mine_flat, plain_flat = (
                [entry for at in m[key] for entry in (at if isinstance(at[0], list) else [at])] for m in (mine, plain)
            )
            assert [token for _, token, _ in mine_flat] == [token for _, token, _ in plain_flat]
            assert [v for v, *_ in mine_flat] == pytest.approx([v for v, *_ in plain_flat], abs=1e-4)
