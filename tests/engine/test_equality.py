"""Greedy text is token for token what Transformers makes of the target alone, in every mode."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.fleet import TOKENS, Fleet, Outcome, Scenario, ask, engine, greedy, prompts, until_eos

pytestmark = pytest.mark.engine

BUDGETS, PAGES = (7, 15, 31, 63), (1, 16, 64)
CONTEXT = 112  # tokens, of the engine whose requests run into the end of the context
PER_ENGINE = 84  # requests of one engine's first round; a dozen engines make a thousand


def workload(seed: int, count: int, prompt_seed: int | None = None) -> list[dict[str, Any]]:
    """Two rounds of the same prompts: the second finds the first's KV in the radix cache. Requests arrive over a
    while, a tenth leaves early, half may end at <eos>. ``prompt_seed``: of the prompts, where others share them."""
    rng = random.Random(seed)
    asked = prompts(count, seed if prompt_seed is None else prompt_seed)
    spread = 1.5 * max(1.0, count / PER_ENGINE)  # seconds
    rounds = []
    for name in ("miss", "hit"):
        requests = []
        for index, ids in enumerate(asked if name == "miss" else asked[: count // 3]):
            request: dict[str, Any] = {
                "ids": ids,
                "params": {
                    "temperature": 0,
                    "max_new_tokens": rng.randrange(1, TOKENS + 1),
                    "ignore_eos": rng.random() < 0.5,
                },
                "delay": round(rng.random() * spread, 3),
            }
            if rng.random() < 0.1:
                request |= {"abort_after": rng.randrange(1, 4), "rid": f"{name}-{index}"}
                request["params"]["ignore_eos"] = True
            requests.append(request)
        rounds.append({"requests": requests})
    return rounds


def matrix(full: bool = False, count: int = PER_ENGINE, prompt_seed: int | None = None) -> list[Scenario]:
    """Every budget with every page size; overlap on and off alternate so that each meets every budget and page
    (``full``: all combinations). Chunked prefill everywhere, in chunks smaller than most prompts."""
    out = []
    for b, budget in enumerate(BUDGETS):
        for p, page in enumerate(PAGES):
            for overlap in (True, False):
                if not full and overlap != ((b + p) % 2 == 0):
                    continue
                name = f"ddtree-b{budget}-p{page}-{'overlap' if overlap else 'sync'}"
                options = engine(
                    "DDTREE",
                    speculative_ddtree_budget=budget,
                    page_size=page,
                    disable_overlap_schedule=not overlap,
                    chunked_prefill_size=64,
                )
                out.append(Scenario.make(name, options, workload(100 * b + 10 * p + overlap, count, prompt_seed)))
    return out


def to_the_end(asked: list[list[int]]) -> dict[str, Any]:
    """As many tokens as SGLang lets a context hold (two less than its length), up to ``TOKENS``."""
    params = [
        {"temperature": 0, "max_new_tokens": min(TOKENS, CONTEXT - len(ids) - 2), "ignore_eos": True} for ids in asked
    ]
    return {"requests": [{"ids": ids, "params": p} for ids, p in zip(asked, params, strict=True)]}


def crowd(seed: int) -> dict[str, Any]:
    """Long requests that all come at once: more than a pool of 700 slots holds to their ends, however fast the machine
    is."""
    rng = random.Random(seed)
    asked = [[rng.randrange(5, 128) for _ in range(90)] for _ in range(12)]
    return ask(asked, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)


def others() -> list[Scenario]:
    small = workload(seed=900, count=40)
    return [
        Scenario.make("plain", engine(None), small),
        Scenario.make("ngram", engine("NGRAM", speculative_num_draft_tokens=6), small),
        Scenario.make("dflash", engine("DFLASH"), small),
        Scenario.make("ddtree-b1", engine("DDTREE", speculative_ddtree_budget=1), small),
        Scenario.make("ddtree-b4-mixed", engine("DDTREE", speculative_ddtree_budget=4, enable_mixed_chunk=True), small),
        Scenario.make("ddtree-b255", engine("DDTREE", speculative_ddtree_budget=255), workload(seed=901, count=16)),
        Scenario.make(
            "ddtree-b15-spine", engine("DDTREE", speculative_ddtree_budget=15), small, {"SGLANG_DDTREE_SPINE": "1"}
        ),
        Scenario.make(
            "ddtree-b63-context-end",
            engine("DDTREE", speculative_ddtree_budget=63, context_length=CONTEXT),
            [to_the_end(prompts(30, seed=902))],
        ),
        Scenario.make(
            "ddtree-b31-retraction",
            engine("DDTREE", speculative_ddtree_budget=31, max_total_tokens=700, schedule_conservativeness=0.3),
            [*small, crowd(seed=903)],
        ),
    ]


def check(scenario: Scenario, outcome: Outcome) -> tuple[int, int]:
    """Compare every answer; returns (accepted drafts, verify steps)."""
    assert outcome.answers is not None, outcome.log[-4000:]
    wrong, drafts, steps, hits = [], 0, 0, 0
    for number, (block, answers) in enumerate(
        zip((json.loads(r) for r in scenario.rounds), outcome.answers["rounds"], strict=True)
    ):
        requests = block["requests"]
        expected = greedy("tiny", [r["ids"] for r in requests], TOKENS)
        for index, (request, full, answer) in enumerate(zip(requests, expected, answers, strict=True)):
            params = request["params"]
            want = until_eos(full, params["max_new_tokens"], params["ignore_eos"])
            got = answer.get("ids")
            if answer.get("aborted"):
                ok = got == full[: len(got)]  # one that leaves may get more than it asked for: the last step's run
            else:
                ok = got == want
                meta = answer["meta"]
                hits += number == 1 and meta["cached_tokens"] > 0
                drafts += meta.get("spec_num_correct_drafts") or 0
                steps += meta.get("spec_verify_ct") or 0
                # a mixed batch and a prefill after retraction give a token that no verify step counts
                if meta.get("spec_verify_ct") and not scenario.name.endswith(("mixed", "retraction")):
                    assert meta["completion_tokens"] <= 1 + meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
            if not ok:
                wrong.append((number, index, len(request["ids"]), got, want))
    assert not wrong, f"{len(wrong)} answers differ, first: {wrong[0]}"
    if len(outcome.answers["rounds"]) > 1:
        assert hits > 0, "no prefix was found in the radix cache"
    assert outcome.answers["flushed"], "the scheduler is not idle after the last answer"
    assert outcome.answers["alive"] == 4
    return drafts, steps


@pytest.mark.parametrize("scenario", [*matrix(), *others()], ids=lambda s: s.name)
def test_greedy_equals_transformers(fleet: Fleet, scenario: Scenario) -> None:
    drafts, steps = check(scenario, fleet.outcome(scenario))
    if scenario.name.endswith("retraction"):
        assert "Retract requests" in fleet.outcome(scenario).log, "no request was retracted"
    if scenario.name.startswith(("ddtree", "dflash")):
        assert steps > 0
        assert drafts / steps > 0.2, "the drafter's proposals are hardly ever accepted"
