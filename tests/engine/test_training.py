"""The drafter's training recipe, run for a few seconds: it learns, resumes, and writes what an engine loads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from engine.fleet import ROOT, environment, models, python

pytestmark = pytest.mark.engine
RECIPE = ROOT / "models/smollm2-135m-dflash"


def train(target: Path, prompts: Path, out: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    command = [python(), str(RECIPE / "train.py"), str(target), str(prompts), str(out), "--seconds", str(seconds)]
    size = ["--tokens", "40", "--batch", "4", "--generate", "6"]
    return subprocess.run(command + size, env=environment(), capture_output=True, text=True, timeout=1200, check=False)


def test_the_recipe_trains_a_drafter(tmp_path: Path) -> None:
    target = models("smollm2") / "target"
    chat = "<|im_start|>user\nName some {}.<|im_end|>\n<|im_start|>assistant\n"
    make = (
        "import json, sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "json.dump([t(text).input_ids for text in json.loads(sys.argv[2])], open(sys.argv[3], 'w'))"
    )
    texts = json.dumps([chat.format(word) for word in ("trees", "birds", "rivers", "tools", "games", "cities")])
    prompts, out = tmp_path / "prompts.json", tmp_path / "out"
    subprocess.run([python(), "-c", make, str(target), texts, str(prompts)], env=environment(), check=True)

    first = train(target, prompts, out, 40)
    assert first.returncode == 0, first.stderr[-2000:]
    state = json.loads((out / "train.json").read_text())
    assert state["step"] >= 2
    assert state["last"][1] < state["history"][0][1]
    wanted = json.loads((RECIPE / "config.json").read_text())
    made = json.loads((out / "drafter/config.json").read_text())
    assert {key: made[key] for key in ("hidden_size", "num_hidden_layers", "block_size")} == {
        key: wanted[key] for key in ("hidden_size", "num_hidden_layers", "block_size")
    }
    assert any((out / "drafter").glob("*.safetensors"))

    assert train(target, prompts, out, 50).returncode == 0
    resumed = json.loads((out / "train.json").read_text())
    assert resumed["step"] > state["step"]
    assert resumed["history"][0] == state["history"][0]
