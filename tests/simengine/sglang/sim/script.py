"""Command line and environment of the simulated engine."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from sglang.srt import sim_profile

MISFIT = 1.02  # accept length of a drafter that does not fit


@dataclass
class Script:
    """What to play; every field is a SIM_<NAME> variable and a --sim-<name> flag."""

    accept: str = ""
    noise: float = 0.1
    step_delay: float = 0.002
    stream_delay: float = 0.0  # of a step of a streamed answer; 0: step_delay
    jitter: float = 0.0
    start_delay: float = 0.0
    health_delay: float = 1.0
    seed: int = 0
    refuse: str = ""
    crash_at_start: str = ""
    crash_after: int = 0
    fault_every: int = 0
    tie_every: int = 40
    tie_flip: int = 0
    html_every: int = 0
    error_every: int = 0
    hang_every: int = 0
    drop_field: str = ""
    meta_steps: float = 1.0
    no_metrics: int = 0
    drain: float = 30.0


@dataclass
class Settings:
    """SGLang's own arguments, as far as they matter here."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    revision: str | None = None
    enable_metrics: bool = False
    algorithm: str = "NONE"
    draft_model_path: str | None = None
    budget: int | None = None
    dtype: str = "auto"
    tp_size: int = 1
    command: str = ""

    @property
    def draft_tokens(self) -> int:
        """Tokens verified a step: the tree with its root, or a chain of 16."""
        if self.algorithm == "NONE":
            return 0
        return (self.budget or 16) + 1 if self.algorithm == "DDTREE" else 16


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Settings, Script]:
    """Read both; unknown flags are ignored as long as the engine can be played without them."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--revision")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--speculative-algorithm", "--speculative-algo", default="NONE", dest="algorithm")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", dest="draft_model_path")
    parser.add_argument("--speculative-ddtree-budget", type=int, dest="budget")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    for f in fields(Script):
        kind = type(f.default)
        raw = environ.get(f"SIM_{f.name.upper()}")
        default = f.default if raw is None or raw == "" else kind(raw)
        parser.add_argument(f"--sim-{f.name.replace('_', '-')}", type=kind, default=default, dest=f"sim_{f.name}")
    known = vars(parser.parse_known_args(list(argv))[0])
    script = Script(**{f.name: known.pop(f"sim_{f.name}") for f in fields(Script)})
    settings = Settings(**known, command=shlex.join(argv))
    if sim_profile.KV_SHIFT and settings.algorithm == "DDTREE" and not script.fault_every:
        script.fault_every = 12
    return settings, script


def start_error(settings: Settings, script: Script) -> str | None:
    """Text to print before exiting with 1; None when the engine starts."""
    if script.refuse:
        return f"ddtree: refused: {script.refuse}"
    if settings.algorithm == "DDTREE" and sim_profile.MASK != "tree":
        return f"ddtree: refused: self-check failed, the verify mask is {sim_profile.MASK} where a tree mask is needed"
    if script.crash_at_start:
        return _traceback(f"RuntimeError: {script.crash_at_start}")
    for path in (settings.model_path, settings.draft_model_path):
        if path is None:
            continue
        if path.startswith("/") and not os.path.exists(path):  # noqa: PTH110 - any kind of file will do
            return _traceback(f"OSError: Can't load the configuration of '{path}': no such directory")
        if not path.startswith("/") and "missing" in path:
            return _traceback(f"OSError: {path} is not a local folder and is not a valid model identifier")
    if settings.algorithm in ("DFLASH", "DDTREE", "EAGLE3") and settings.draft_model_path is None:
        return _traceback(f"ValueError: {settings.algorithm} needs --speculative-draft-model-path")
    return None


def accept_length(settings: Settings, script: Script) -> float:
    """Mean accept length to play."""
    if settings.algorithm == "NONE":
        return 1.0
    values = {k: float(v) for k, v in sim_profile.ACCEPT_LENGTH.items()}
    for part in filter(None, (p.strip() for p in script.accept.split(","))):
        name, _, value = part.rpartition("=")
        values[name or settings.algorithm] = float(value)
    exact = f"{settings.algorithm}:{settings.budget}"
    if "misfit" in (settings.draft_model_path or "") and not script.accept:
        return MISFIT
    return max(1.0, values.get(exact, values.get(settings.algorithm, 1.0)))


def _traceback(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "sglang/launch_server.py", in run_server\n{last}'
