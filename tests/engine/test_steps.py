"""Every request takes exactly the verify steps, with the accepted drafts, that an offline run predicts."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from engine.fleet import HERE, Fleet, Scenario, ask, engine, environment, greedy, models, prompts, python

pytestmark = pytest.mark.engine
TOKENS, BLOCK = 40, 8
ASKED = prompts(30, seed=77)
ROUNDS = [ask(ASKED, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)]


def scenario(budget: int) -> Scenario:
    options = engine("DDTREE", speculative_ddtree_budget=budget) if budget else engine("DFLASH")
    return Scenario.make(f"steps-{budget or 'chain'}", options, ROUNDS)


@pytest.mark.parametrize("budget", [0, 3, 15, 63])
def test_steps_are_the_offline_ones(fleet: Fleet, tmp_path: Path, budget: int) -> None:
    future = fleet.submit(scenario(budget))
    texts = greedy("tiny", ASKED, TOKENS + BLOCK)
    (tmp_path / "spec.json").write_text(
        json.dumps({"prompts": ASKED, "texts": texts, "tokens": TOKENS, "budget": budget})
    )
    subprocess.run(
        [python(), HERE / "offline.py", models("tiny"), tmp_path / "spec.json", tmp_path / "out.json"],
        check=True,
        env=environment(),
        capture_output=True,
    )
    expected = json.loads((tmp_path / "out.json").read_text())
    outcome = future.result()
    assert outcome.answers is not None, outcome.log[-4000:]
    for steps, answer in zip(expected, outcome.answers["rounds"][0], strict=True):
        meta = answer["meta"]
        histogram = {d: n for d, n in enumerate(meta["spec_correct_drafts_histogram"]) if n}
        assert histogram == dict(Counter(steps))
        assert (meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (len(steps), sum(steps))
