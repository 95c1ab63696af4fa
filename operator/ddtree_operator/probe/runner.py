"""Pairs of requests: the same prompt to baseline and canary, in an order that only the seed decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import aiohttp

from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Pair
from ddtree_operator.probe.counters import CounterCheck
from ddtree_operator.probe.divergence import explain_divergence
from ddtree_operator.probe.generate import DEFAULT_TIMEOUT, generate
from ddtree_operator.probe.live import LiveTraffic, without_text


@lru_cache(maxsize=16)
def _round_order(seed: int, turn: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"prompts {seed} {turn}").shuffle(order)
    return tuple(order)


def schedule(seed: int, index: int, prompts: int) -> tuple[int, bool]:
    """Prompt number and whether the canary goes first, for pair ``index`` (from 0) with a set of ``prompts``.

    Every prompt comes once before any comes again, and each round has another order. A pure function of its
    arguments: a restarted prober goes on where it was, and a record can be checked.
    """
    turn, place = divmod(index, prompts)
    return _round_order(seed, turn, prompts)[place], random.Random(f"side {seed} {index}").random() < 0.5


class PairRunner:
    """Sends pairs. Within a pair one side answers before the other is asked, so the two never compete with each
    other for the same cores; ``concurrency`` pairs run at a time, so both sides see the same load.

    ``start`` is the number of pairs already run by a predecessor. URLs may be replaced between calls of ``run``. With
    ``live``, users' prompts come first; the set fills up what is missing unless the wish is to wait.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        baseline_urls: Sequence[str],
        canary_urls: Sequence[str],
        prompts: Sequence[Prompt],
        seed: int,
        concurrency: int,
        max_tokens: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        warmup: int = 1,
        start: int = 0,
        live: LiveTraffic | None = None,
    ) -> None:
        if not baseline_urls or not canary_urls:
            raise ValueError("a pair needs at least one baseline and one canary engine")
        if not prompts:
            raise ValueError("a pair needs at least one prompt")
        self.baseline_urls = list(baseline_urls)
        self.canary_urls = list(canary_urls)
        self.next = start
        self._session = session
        self._prompts = list(prompts)
        self._seed = seed
        self._concurrency = max(1, concurrency)
        self._max_tokens = max_tokens
        self._timeout = timeout
        self._warmup = warmup
        self._warm: set[str] = set()
        self.live = live

    async def run(self, n: int) -> list[Pair]:
        """Run ``n`` pairs, check them against the engines' counters, and return them in schedule order. Fewer, even
        none, when users' prompts are waited for.

        What an engine does never raises; cancelling leaves no request behind.
        """
        users = await self.live.draw(n) if self.live is not None else []
        if self.live is not None and self.live.wish.wait:
            n = len(users)
        if not n:
            return []
        await self._warm_up()
        indices = range(self.next, self.next + n)
        self.next += n
        limit = asyncio.Semaphore(self._concurrency)
        checks = {url: CounterCheck(self._session, url) for url in {*self.baseline_urls, *self.canary_urls}}
        await asyncio.gather(*(check.start() for check in checks.values()))

        async def one(index: int, prompt: Prompt) -> tuple[Pair, tuple[int, int]]:
            async with limit:
                return await self._pair(index, prompt)

        prompts = [*users, *(self._scheduled(i) for i in indices[len(users) :])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, p)) for i, p in zip(indices, prompts, strict=True)]
        pairs, beside = [t.result()[0] for t in tasks], [t.result()[1] for t in tasks]
        return await self._checked(checks, indices, pairs, beside)

    def _scheduled(self, index: int) -> Prompt:
        return self._prompts[schedule(self._seed, index, len(self._prompts))[0]]

    def _urls(self, index: int) -> tuple[str, str]:
        return self.baseline_urls[index % len(self.baseline_urls)], self.canary_urls[index % len(self.canary_urls)]

    async def _checked(
        self,
        checks: dict[str, CounterCheck],
        indices: Sequence[int],
        pairs: list[Pair],
        beside: Sequence[tuple[int, int]],
    ) -> list[Pair]:
        """The pairs, with errors in place of samples that their engine's counters contradict. ``beside``: requests
        that were sent on each side for a pair besides the two that are measured."""
        places: dict[str, list[tuple[int, str]]] = {url: [] for url in checks}
        extra = dict.fromkeys(checks, 0)
        for place, (index, pair) in enumerate(zip(indices, pairs, strict=True)):
            for url, side, others in zip(self._urls(index), ("baseline", "canary"), beside[place], strict=True):
                places[url].append((place, side))
                extra[url] += others
                said = pair.divergence
                extra[url] += said is not None and getattr(said, f"{side}_gap") is not None
        for url, check in checks.items():
            samples = await check.finish([getattr(pairs[i], side) for i, side in places[url]], extra[url])
            for (i, side), sample in zip(places[url], samples, strict=True):
                if sample is not getattr(pairs[i], side):
                    pairs[i] = (
                        replace(pairs[i], baseline=sample) if side == "baseline" else replace(pairs[i], canary=sample)
                    )
        return pairs

    async def _warm_up(self) -> None:
        """First answers pay for compilation and cold caches: they are thrown away, whatever they are."""
        for url in dict.fromkeys([*self.baseline_urls, *self.canary_urls]):
            if url not in self._warm:
                self._warm.add(url)
                for i in range(self._warmup):
                    await generate(self._session, url, self._scheduled(i), self._max_tokens, self._timeout)

    async def _pair(self, index: int, prompt: Prompt) -> tuple[Pair, tuple[int, int]]:
        canary_first = schedule(self._seed, index, len(self._prompts))[1]
        baseline_url, canary_url = self._urls(index)
        beside = await self._level(prompt, (baseline_url, canary_url)) if prompt.live else (0, 0)
        ask = [baseline_url, canary_url]
        if canary_first:
            ask.reverse()
        samples = [await generate(self._session, url, prompt, self._max_tokens, self._timeout) for url in ask]
        if canary_first:
            samples.reverse()
        pair = Pair(samples[0], samples[1], canary_first)
        if pair.baseline.output_ids and pair.canary.output_ids:
            said = await explain_divergence(self._session, baseline_url, canary_url, prompt, pair, self._timeout)
            pair = replace(pair, divergence=said) if said is not None else pair
        return (without_text(pair) if prompt.live else pair), beside

    async def _level(self, prompt: Prompt, urls: tuple[str, str]) -> tuple[int, int]:
        """The baseline may have a user's prompt in its prefix cache, from serving it: one token on each side first, so
        that both have. Returns how many answers each side gave."""
        samples = [await generate(self._session, url, prompt, 1, self._timeout) for url in urls]
        return int(samples[0].error is None), int(samples[1].error is None)
