"""After a whole text of tree steps the KV of its tokens is what a prefill of the same tokens writes, in the target's
pool and in the drafter's."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from engine.fleet import TOKENS, Fleet, Scenario, ask, engine, greedy, prompts, python

pytestmark = pytest.mark.engine
ASKED = prompts(3, seed=9)

COMPARE = """
import sys, torch
for path in sys.argv[1:]:
    steps, prefill = (torch.load(f"{path}.{part}") for part in ("steps", "prefill"))
    for kind, mine, want in zip(("target", "drafter"), steps["kv"], prefill["kv"]):
        n = min(mine.shape[1], prefill["prefix"])
        mine, want = mine[:, :n].flatten(2), want[:, :n].flatten(2)
        error = (mine - want).abs().amax(-1) / want.std()
        shifted = (mine[:, 1:] - want[:, :-1]).abs().amax(-1).median() / want.std()
        print(kind, n, float(error.max()), float(shifted))
"""


def name(ids: list[int]) -> str:
    """As the patch ``dump-kv`` names its files."""
    return hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]


def test_kv_after_tree_steps_is_what_a_prefill_writes(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("kv")
    texts = [ids + out for ids, out in zip(ASKED, greedy("tiny", ASKED, TOKENS), strict=True)]
    rounds = [
        ask([ids], temperature=0, max_new_tokens=count, ignore_eos=True)
        for asked, text in zip(ASKED, texts, strict=True)
        for ids, count in ((asked, TOKENS), (text, 4))
    ]
    scenario = Scenario.make(
        "kv",
        engine("DDTREE", speculative_ddtree_budget=31, disable_radix_cache=True),
        rounds,
        env={"DDTREE_TEST_DUMP": str(folder)},
        fault="dump-kv",
    )
    outcome = fleet.outcome(scenario)
    assert outcome.answers is not None, outcome.log[-3000:]
    assert outcome.log.count("ddtree: memory: ") == 7, "the ledger is printed once, before the launch"
    pairs: list[Path] = []
    for asked, text in zip(ASKED, texts, strict=True):
        pair = folder / f"pair-{name(asked)}"
        (folder / name(asked)).rename(f"{pair}.steps")
        (folder / name(text)).rename(f"{pair}.prefill")
        pairs.append(pair)
    done = subprocess.run(
        [python(), "-c", COMPARE, *map(str, pairs)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in lines] == ["target", "drafter"] * len(ASKED)
    for kind, rows, error, shifted in lines:
        assert int(rows) > TOKENS, (kind, rows)
        assert float(error) < 1e-3, (kind, error)
        assert float(shifted) > 0.1, "the comparison would not see a slot too far"
