"""Every request takes exactly the verify steps that an offline run predicts, and in each the same path through the same
tree."""

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


def scenario(budget: int, block: int, dump: Path) -> Scenario:
    if not budget:
        return Scenario.make("steps-chain", engine("DFLASH"), ROUNDS)
    options, env = engine("DDTREE", speculative_ddtree_budget=budget), {"DDTREE_TEST_DUMP": str(dump)}
    if block != BLOCK:
        options["speculative_dflash_block_size"] = block
    return Scenario.make(f"steps-{budget}-{block}", options, ROUNDS, env=env, fault="dump-paths")


@pytest.mark.parametrize(("budget", "block"), [(0, BLOCK), (3, BLOCK), (5, 4), (15, BLOCK), (63, BLOCK)])
def test_steps_are_the_offline_ones(fleet: Fleet, tmp_path: Path, budget: int, block: int) -> None:
    """``block`` smaller than the drafter's own: ``--speculative-dflash-block-size``."""
    dump = tmp_path / "paths.jsonl"
    future = fleet.submit(scenario(budget, block, dump))
    texts = greedy("tiny", ASKED, TOKENS + BLOCK)
    (tmp_path / "spec.json").write_text(
        json.dumps({"prompts": ASKED, "texts": texts, "tokens": TOKENS, "budget": budget, "block": block})
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
    for paths, answer in zip(expected, outcome.answers["rounds"][0], strict=True):
        meta, steps = answer["meta"], [len(path) - 1 for path in paths]
        histogram = {d: n for d, n in enumerate(meta["spec_correct_drafts_histogram"]) if n}
        assert histogram == dict(Counter(steps))
        assert (meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (len(steps), sum(steps))
    if not budget:
        return
    taken: dict[str, list[list[int]]] = {}
    for line in dump.read_text().splitlines():
        ids, path = json.loads(line)
        taken.setdefault(json.dumps(ids), []).append(path)
    for ids, paths in zip(ASKED, expected, strict=True):
        # with overlap one more step may have begun when a text was already whole
        assert taken[json.dumps(ids)][: len(paths)] == paths
    if budget > BLOCK:
        assert any(path != [*range(len(path))] for paths in expected for path in paths), "no path left the first nodes"
