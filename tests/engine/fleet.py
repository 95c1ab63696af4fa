"""Engine processes for the tests: which ones, at most two at a time, each once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TIMEOUT = 900  # seconds an engine run may take, on a busy machine
TOKENS = 48  # most tokens a request of the matrix asks for
EOS = 2
PREFIX = os.environ.get("ENGINE_RUN", "").split()  # a command to run engines under, such as one that waits for a free core


@cache
def python() -> str:
    """The engine environment's interpreter."""
    given = os.environ.get("ENGINE_PYTHON")
    if given:
        return given
    folder = subprocess.run([ROOT / "dev/env.sh", "engine"], check=True, stdout=subprocess.PIPE, text=True)
    return f"{folder.stdout.strip()}/bin/python"


@cache
def models(pair: str) -> Path:
    """The folder of a model pair, made on first use."""
    out = subprocess.run([ROOT / "models/prepare", pair], check=True, stdout=subprocess.PIPE, text=True)
    return Path(out.stdout.strip())


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What an engine on a CPU needs; one thread each, for two run side by side."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_DDTREE")}
    return base | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


@dataclass(frozen=True)
class Scenario:
    """An engine and its workload. ``kwargs``: of sglang.Engine; ``env``: on top of ``environment``; ``name`` is its
    id."""

    name: str
    kwargs: tuple[tuple[str, Any], ...]
    rounds: tuple[str, ...]  # JSON of each round, so that the scenario can be hashed
    env: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def make(
        name: str, kwargs: dict[str, Any], rounds: list[dict[str, Any]], env: dict[str, str] | None = None
    ) -> Scenario:
        return Scenario(name, tuple(kwargs.items()), tuple(json.dumps(r) for r in rounds), tuple((env or {}).items()))


@dataclass
class Outcome:
    """``answers``: the driver's output, or None when the engine did not come up; ``log``: stdout and stderr."""

    answers: dict[str, Any] | None
    log: str
    status: int

    def refusal(self) -> str:
        """The one line, without its prefix; empty when there is none."""
        lines = [line for line in self.log.splitlines() if line.startswith("ddtree: refused: ")]
        return lines[0].removeprefix("ddtree: refused: ") if lines else ""


def play(scenario: Scenario) -> Outcome:
    """Start the engine, play the rounds, end it."""
    with tempfile.TemporaryDirectory(prefix="ddtree-engine-") as folder:
        spec, out = Path(folder, "spec.json"), Path(folder, "out.json")
        spec.write_text(
            json.dumps({"engine": dict(scenario.kwargs), "rounds": [json.loads(r) for r in scenario.rounds]})
        )
        process = subprocess.Popen(
            [*PREFIX, python(), HERE / "driver.py", spec, out],
            env=environment(dict(scenario.env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            log, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            log, _ = process.communicate()
            log += f"\nkilled after {TIMEOUT} s"
        answers = json.loads(out.read_text()) if out.exists() else None
        return Outcome(answers, log, process.returncode)


@dataclass
class Fleet:
    """Runs scenarios two at a time, in the order they are first seen; every one once."""

    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))
    runs: dict[Scenario, Future[Outcome]] = field(default_factory=dict)

    def submit(self, scenario: Scenario) -> Future[Outcome]:
        if scenario not in self.runs:
            self.runs[scenario] = self.pool.submit(play, scenario)
        return self.runs[scenario]

    def outcome(self, scenario: Scenario) -> Outcome:
        return self.submit(scenario).result()


def prompts(count: int, seed: int, vocab: int = 128, first: int = 5) -> list[list[int]]:
    """Random prompts of a dozen lengths, half of them with a common beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(first, vocab) for _ in range(40)]
    out = []
    for _ in range(count):
        length = rng.choice((1, 2, 3, 5, 8, 13, 17, 30, 47, 64, 80, 96))
        body = [rng.randrange(first, vocab) for _ in range(length)]
        out.append([*shared[: length // 2], *body[length // 2 :]] if rng.random() < 0.5 else body)
    return out


def greedy(pair: str, asked: list[list[int]], tokens: int) -> list[list[int]]:
    """Transformers' greedy continuations, kept in the cache by everything they depend on."""
    model = models(pair) / "target"
    spec = json.dumps({"prompts": asked, "tokens": tokens})
    key = hashlib.sha256(f"{model}\n{(HERE / 'greedy.py').read_text()}\n{spec}".encode()).hexdigest()[:16]
    cached = models(pair).parent / "greedy" / f"{key}.json"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            Path(folder, "spec.json").write_text(spec)
            subprocess.run(
                [*PREFIX, python(), HERE / "greedy.py", model, Path(folder, "spec.json"), Path(folder, "out.json")],
                check=True,
                env=environment(),
                capture_output=True,
            )
            Path(folder, "out.json").replace(cached)
    result: list[list[int]] = json.loads(cached.read_text())
    return result


def until_eos(ids: list[int], limit: int, ignore_eos: bool) -> list[int]:
    """What an engine answers when the model would go on with ``ids``: at most ``limit`` tokens, up to <eos>."""
    ids = ids[:limit]
    if not ignore_eos and EOS in ids:
        ids = ids[: ids.index(EOS) + 1]
    return ids
