"""Check what answers say about themselves against the engine's own counters. Disagreement is an error, not a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from ddtree_operator.analysis.types import Sample
from ddtree_operator.probe.engine import EngineCounters, SGLangReader
from ddtree_operator.probe.http import EngineError

LAG = 3.0  # seconds that counters may trail an answer


class CounterCheck:
    """Between two readings, the counters of one engine must have moved by what its answers claim.

    Exactly so when nobody else sent requests in between; at least so when the engine also serves traffic. An engine
    without readable counters is not checked: that is no disagreement.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._reader = SGLangReader(session, url)
        self._url = url
        self._before: EngineCounters | None = None

    async def start(self) -> None:
        """Take the first reading."""
        self._before = await self._read()

    async def finish(self, samples: Sequence[Sample], extra_requests: int = 0) -> list[Sample]:
        """The samples, or errors in their place when the counters contradict them.

        ``samples`` are all answers of this engine since ``start``; ``extra_requests`` were sent beside them and
        generated one token each. Samples that are errors already stay as they are, and then only the lower bound holds.
        """
        before = self._before
        deadline = asyncio.get_running_loop().time() + LAG
        problem: str | None = None
        while before is not None and samples:
            after = await self._read()
            problem = None if after is None else disagreement(before, after, samples, extra_requests)
            if problem is None or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.1)
        if problem is None:
            return list(samples)
        sentence = f"the counters of {self._url} contradict its answers: {problem}"
        return [s if s.error is not None else Sample(s.prompt_id, error=sentence) for s in samples]

    async def _read(self) -> EngineCounters | None:
        try:
            return await self._reader.counters()
        except EngineError:
            return None


def disagreement(
    before: EngineCounters, after: EngineCounters, samples: Sequence[Sample], extra_requests: int = 0
) -> str | None:
    """What is wrong, in half a sentence; None when the counters fit (or start anew, since the engine did)."""
    moved = {
        "verify steps": after.verify_steps - before.verify_steps,
        "tokens": after.generated_tokens - before.generated_tokens,
        "requests": after.requests - before.requests,
    }
    if min(moved.values()) < 0:
        return None
    claimed = {
        "verify steps": sum(s.verify_steps for s in samples),
        "tokens": sum(s.completion_tokens for s in samples) + extra_requests,
        "requests": sum(s.error is None for s in samples) + extra_requests,
    }
    alone = moved["requests"] == len(samples) + extra_requests and not any(s.error for s in samples)
    for name, claim in claimed.items():
        if moved[name] < claim or (alone and moved[name] != claim):
            return f"{claim:.0f} {name} claimed, {moved[name]:.0f} counted"
    return None
