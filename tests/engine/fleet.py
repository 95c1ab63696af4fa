"""Engine processes for the tests: which ones, at most two at a time, each once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "patches/sglang_ddtree/src"))
from sglang_ddtree import series  # noqa: E402

TIMEOUT = int(os.environ.get("ENGINE_TIMEOUT", "900"))  # seconds an engine run may take, on a busy machine
TOKENS = 48  # most tokens a request of the matrix asks for
EOS = 2
# lock files, one of which is held while something runs: a machine shared with others may name some
LOCKS = os.environ.get("ENGINE_LOCKS", "").split()


@contextmanager
def turn() -> Iterator[None]:
    """Wait for one of the locks, if there are any."""
    held = [Path(path).open("w") for path in LOCKS]  # noqa: SIM115
    try:
        while held:
            for file in held:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
            time.sleep(0.2)
        yield
    finally:
        for file in held:
            file.close()


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
    fault: str = ""  # a name of ``mutations/``

    @staticmethod
    def make(
        name: str,
        kwargs: dict[str, Any],
        rounds: list[dict[str, Any]],
        env: dict[str, str] | None = None,
        fault: str = "",
    ) -> Scenario:
        packed = tuple(json.dumps(r) for r in rounds)
        return Scenario(name, tuple(kwargs.items()), packed, tuple((env or {}).items()), fault)

    def keywords(self) -> dict[str, Any]:
        """Of sglang.Engine; ``@pair/`` at the start of a value becomes the pair's folder, which is made only now."""

        def place(value: Any) -> Any:
            if isinstance(value, tuple):
                return [place(item) for item in value]
            if isinstance(value, str) and value.startswith("@"):
                pair, _, rest = value[1:].partition("/")
                return str(models(pair) / rest)
            return value

        return {key: place(value) for key, value in self.kwargs}


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


class Driver:
    """A driver process: imports SGLang once, then runs engine after engine."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [python(), HERE / "driver.py"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def play(self, scenario: Scenario) -> Outcome:
        """Start the engine, play the rounds, end it."""
        with tempfile.TemporaryDirectory(prefix="ddtree-engine-") as folder:
            spec, out, log = Path(folder, "spec.json"), Path(folder, "out.json"), Path(folder, "log")
            rounds = [json.loads(r) for r in scenario.rounds]
            fault = str(HERE / "mutations" / f"{scenario.fault}.patch") if scenario.fault else ""
            content = {"engine": scenario.keywords(), "env": dict(scenario.env), "fault": fault, "rounds": rounds}
            spec.write_text(json.dumps(content))
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with turn():
                print(spec, out, log, TIMEOUT, file=self.process.stdin, flush=True)
                answer = self.process.stdout.readline()
            text = log.read_text(errors="replace") if log.exists() else "the driver itself ended"
            answers = json.loads(out.read_text()) if out.exists() else None
            return Outcome(answers, text, int(answer) if answer.strip() else -1)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Fleet:
    """Runs scenarios two at a time, in the order they are first seen; every one once. Drivers are kept for the next
    scenario with the same code."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.runs: dict[Scenario, Future[Outcome]] = {}
        self._idle: list[Driver] = []
        self._lock = threading.Lock()

    def submit(self, scenario: Scenario) -> Future[Outcome]:
        if scenario not in self.runs:
            self.runs[scenario] = self.pool.submit(self._play, scenario)
        return self.runs[scenario]

    def outcome(self, scenario: Scenario) -> Outcome:
        return self.submit(scenario).result()

    def _play(self, scenario: Scenario) -> Outcome:
        with self._lock:
            driver = self._idle.pop() if self._idle else Driver()
        try:
            return driver.play(scenario)
        finally:
            if driver.process.poll() is None:
                with self._lock:
                    self._idle.append(driver)

    def end(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        for driver in self._idle:
            driver.end()


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


def greedy(pair: str, asked: Sequence[list[int] | str], tokens: int) -> list[list[int]]:
    """Transformers' greedy continuations of prompts (ids or text)."""
    return transformers(pair, "greedy.py", {"prompts": list(asked), "tokens": tokens})


def transformers(pair: str, script: str, what: Any) -> list[list[int]]:
    """What a script of this folder makes of a specification with a pair's target, kept in the cache by everything it
    depends on."""
    model = models(pair) / "target"
    spec = json.dumps(what)
    key = hashlib.sha256(f"{model}\n{(HERE / script).read_text()}\n{spec}".encode()).hexdigest()[:16]
    cached = models(pair).parent / "greedy" / f"{key}.json"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            Path(folder, "spec.json").write_text(spec)
            subprocess.run(
                [python(), HERE / script, model, Path(folder, "spec.json"), Path(folder, "out.json")],
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


@cache
def site() -> Path:
    """site-packages that hold SGLang in the engine environment."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('sglang').origin).parents[1])"
    return Path(subprocess.run([python(), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def shadow(series_folder: str) -> str:
    """A folder for PYTHONPATH with the packages a series touches: links to the originals, the patched files in place.
    ``series_folder``: relative to the repository."""
    patches = series.load(ROOT / series_folder)
    folder = ROOT / "build" / "shadow" / series_folder.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    roots = {"sglang": site(), "sglang_ddtree": ROOT / "patches/sglang_ddtree/src"}

    def read(path: str) -> str | None:
        source = roots[path.split("/")[0]] / path
        return source.read_text() if source.exists() else None

    files = series.run(patches, read)
    for package in sorted({path.split("/")[0] for path in files}):
        changed = {Path(path).stem for path in files if path.startswith(package + "/")}
        for parent, _, names in os.walk(roots[package] / package):
            target = folder / Path(parent).relative_to(roots[package])
            target.mkdir(parents=True)
            for entry in names:
                if not (target.name == "__pycache__" and entry.split(".")[0] in changed):
                    (target / entry).symlink_to(Path(parent, entry))
    for path, text in files.items():
        target = folder / path
        target.unlink(missing_ok=True)
        if text is not None:
            target.write_text(text)
    return str(folder)


def engine(algorithm: str | None, pair: str = "tiny", **extra: Any) -> dict[str, Any]:
    """Keywords of sglang.Engine for a pair."""
    out: dict[str, Any] = {"model_path": f"@{pair}/target", "log_level": "warning", "max_running_requests": 6}
    if algorithm:
        out["speculative_algorithm"] = algorithm
    if algorithm in ("DFLASH", "DDTREE"):
        out["speculative_draft_model_path"] = f"@{pair}/drafter"
    return out | extra


def ask(ids: list[list[int]], **params: Any) -> dict[str, Any]:
    """A round: all prompts at once, with the same sampling parameters."""
    return {"requests": [{"ids": one, "params": params} for one in ids]}
