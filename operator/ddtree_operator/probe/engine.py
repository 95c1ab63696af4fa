"""Read an engine's own state: health, settings, counters. One adapter per engine kind."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from ddtree_operator.probe.http import EngineError, get_json, get_text

_COUNTERS = ("sglang:num_requests_total", "sglang:generation_tokens_total", "sglang:spec_verify_calls_total")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says it runs."""

    model_path: str
    algorithm: str  # NONE when it does not speculate
    draft_tokens: int  # tokens verified a step, 0 without speculation
    dtype: str  # "" when it does not say
    deterministic: bool  # the same text in any batch, by its own account
    version: str
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Monotonic counters, summed over the engine's ranks and label sets; they start at 0 with the process."""

    requests: float
    generated_tokens: float
    verify_steps: float


class EngineReader(Protocol):
    """Adapter of an engine kind. Methods raise EngineError with one sentence."""

    async def healthy(self) -> bool:
        """Whether the engine answers its health check; False for any failure."""
        ...

    async def info(self) -> EngineInfo:
        """Settings the engine runs with."""
        ...

    async def counters(self) -> EngineCounters:
        """Counters since the process started."""
        ...


class SGLangReader:
    """SGLang 0.5: /health, /server_info, /metrics."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, timeout: float = 10.0) -> None:
        self._session = session
        self._url = base_url.rstrip("/")
        self._timeout = timeout

    async def healthy(self) -> bool:
        """One token is generated for it, and SGLang waits a second: allow at least 5 s."""
        try:
            await get_text(self._session, f"{self._url}/health", self._timeout)
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        """From /server_info, which holds the server arguments."""
        raw = await get_json(self._session, f"{self._url}/server_info", self._timeout)
        if not isinstance(raw.get("model_path"), str):
            raise EngineError(f"{self._url}/server_info has no model_path; is it SGLang?")
        # A plugin's algorithm runs under the name of the built-in one it extends; the command line has its own name.
        command = str(raw.get("launch_command") or "")
        asked = re.findall(r"--speculative-algo(?:rithm)?[ =](\w+)", command)
        algorithm = asked[-1] if asked else raw.get("speculative_algorithm")
        draft_tokens = raw.get("speculative_num_draft_tokens")
        return EngineInfo(
            model_path=raw["model_path"],
            algorithm=algorithm if isinstance(algorithm, str) and algorithm else "NONE",
            draft_tokens=draft_tokens if isinstance(draft_tokens, int) else 0,
            dtype=str(raw.get("dtype") or "").removeprefix("torch."),
            deterministic="--enable-deterministic-inference" in command.split(),
            version=str(raw.get("version") or ""),
            raw=raw,
        )

    async def counters(self) -> EngineCounters:
        """From /metrics; the engine needs --enable-metrics. Gauges are not read: they freeze when traffic stops."""
        url = f"{self._url}/metrics"
        text = await get_text(self._session, url, self._timeout)
        wanted = dict.fromkeys(_COUNTERS, 0.0)
        found = False
        for line in text.splitlines():
            # Read by hand: the page has thousands of lines, and a pair needs it twice a side.
            found = found or line.startswith("sglang:")
            name = line.partition(" ")[0].partition("{")[0]
            if name in wanted:
                wanted[name] += _number(url, name, line)
        if not found:
            raise EngineError(f"{url} has no sglang: metrics; start the engine with --enable-metrics")
        requests, tokens, steps = wanted.values()
        return EngineCounters(requests=requests, generated_tokens=tokens, verify_steps=steps)


def _number(url: str, name: str, line: str) -> float:
    """Value of a line ``name{labels} value [timestamp]``."""
    words = line[line.rfind("}") + 1 if "{" in line else len(name) :].split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        raise EngineError(f"{url}: {name} has no number") from None
    if not math.isfinite(value) or value < 0:
        raise EngineError(f"{url}: {name} is {value}")
    return value


def engine_reader(kind: str, session: aiohttp.ClientSession, base_url: str, timeout: float = 10.0) -> EngineReader:
    """The adapter for ``spec.engine.kind``. Raises EngineError for a kind without one."""
    if kind == "sglang":
        return SGLangReader(session, base_url, timeout)
    if kind == "vllm":
        raise EngineError("engine.kind vllm is not supported yet: its counters are not read; use sglang")
    raise EngineError(f"engine.kind {kind!r} is unknown; use sglang")
