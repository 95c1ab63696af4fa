"""At temperature above 0 the text has the target's own distribution: the tree may save steps, never change odds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.fleet import HERE, Fleet, Outcome, Scenario, ask, engine, environment, models, python

pytestmark = pytest.mark.engine
PROMPTS = [[20, 30, 40], [99, 7, 56, 23, 88]]
SAMPLES, TOKENS = 900, 4
OPTIONS = engine("DDTREE", speculative_ddtree_budget=15, max_running_requests=32)
PLAIN = {"temperature": 1.0}
CUT = {"temperature": 0.7, "top_k": 6, "top_p": 0.85}
# in favour of what was drawn before, so that it is drawn again
LIKED = {"temperature": 1.0, "frequency_penalty": -1.0, "presence_penalty": -1.0, "repetition_penalty": 0.8}
LIKED["min_new_tokens"] = 3


def rounds(params: dict[str, float]) -> list[dict[str, object]]:
    return [ask([p for p in PROMPTS for _ in range(SAMPLES // 2)], max_new_tokens=TOKENS, ignore_eos=True, **params)]


SCENARIO = Scenario.make("sampling", OPTIONS, [*rounds(PLAIN), *rounds(CUT), *rounds(LIKED)])


def scores(tmp_path: Path, outcome: Outcome, number: int, params: dict[str, float]) -> dict[str, object]:
    """z-scores of how often the first, second, third … most likely token was drawn, by the target's exact odds."""
    assert outcome.answers is not None, outcome.log[-4000:]
    drawn = [a["ids"] for a in outcome.answers["rounds"][number]]
    asked = [p for p in PROMPTS for _ in range(SAMPLES // 2)]
    (tmp_path / "spec.json").write_text(json.dumps({"prompts": asked, "drawn": drawn, "params": params}))
    subprocess.run(
        [python(), HERE / "odds.py", models("tiny") / "target", tmp_path / "spec.json", tmp_path / "out.json"],
        check=True,
        env=environment(),
        capture_output=True,
    )
    result: dict[str, object] = json.loads((tmp_path / "out.json").read_text())
    return result


@pytest.mark.parametrize("scenario", [SCENARIO], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("number", "params"), [(0, PLAIN), (1, CUT), (2, LIKED)], ids=["plain", "top-k-top-p", "penalties"]
)
def test_the_odds_are_the_targets(
    fleet: Fleet, tmp_path: Path, scenario: Scenario, number: int, params: dict[str, float]
) -> None:
    outcome = fleet.outcome(scenario)
    result = scores(tmp_path, outcome, number, params)
    assert result["forbidden"] == 0
    zs = result["z"]
    assert isinstance(zs, list)
    assert len(zs) >= 4
    # five standard errors: one false alarm in more than a hundred thousand runs, over all groups
    assert max(abs(z) for z in zs) < 5, result
    assert outcome.answers is not None
    metas = [a["meta"] for a in outcome.answers["rounds"][number]]
    assert sum(m["spec_num_correct_drafts"] for m in metas) > 100, "the tree was hardly used"
