"""Prompts to promoted engines, slowly, held against what their canary answered."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Outcome, Sample
from ddtree_operator.analysis.watch import Watch
from ddtree_operator.core.facts import WatchFact
from ddtree_operator.handlers.runs import Runs
from ddtree_operator.probe.generate import generate, tokenize, top2_gap
from ddtree_operator.probe.http import EngineError

log = logging.getLogger("ddtree.watch")

Key = tuple[str, str, str, int]  # namespace, name, revision, attempt
EVERY = 5.0  # seconds between two prompts to one resource
EXPLAINED = 3  # differing texts that are looked into, per epoch: each costs a request per token


@dataclass(slots=True)
class Running:
    """One watch under way."""

    watch: Watch
    urls: list[str]
    max_tokens: int
    tie_gap: float
    task: asyncio.Task[None] | None = None
    asking: str = ""  # the engine that is being asked
    doubtful: list[Sample] = field(default_factory=list)  # no answer at all: its engine failed, or went
    failed: str = ""  # why, once it has
    asked: int = 0
    explained: int = 0
    prompts: list[Prompt] = field(default_factory=list)


class Watches(Runs[Key, Running]):
    """All watches of this operator. Nothing of them is kept: after a restart the epoch begins anew."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        wake: Callable[[str, str], None],
        diverged: Callable[[Key], None],
        every: float = EVERY,
    ) -> None:
        super().__init__()
        self._session = session
        self._wake = wake
        self._diverged = diverged  # called for each text that differs from the canary's with no tie to explain it
        self._every = every

    def fact(self, key: Key) -> WatchFact | None:
        """What is known of one watch."""
        run = self._running.get(key)
        return WatchFact(key[2], key[3], bool(run.failed), run.failed) if run is not None else None

    def epoch(self, key: Key) -> int | None:
        """Epoch that is being watched; None when this watch does not run here."""
        run = self._running.get(key)
        return run.watch.epoch if run is not None else None

    def begin(self, key: Key, watch: Watch, prompts: Sequence[Prompt], max_tokens: int, tie_gap: float) -> int:
        """Begin a watch, or its next epoch. Returns how many prompts it has: with none, nothing is watched."""
        self.forget(key[0], key[1])
        known = [p for p in prompts if p.id in watch.expected]
        run = self._running[key] = Running(watch, [], max_tokens, tie_gap, prompts=known)
        if known:
            self._go(key, run)
        return len(known)

    def reach(self, key: Key, urls: Sequence[str]) -> None:
        """The engines that serve now; none of them for a while costs the watch time, and nothing it has learnt."""
        if key in self._running:
            self._running[key].urls = list(urls)

    def there(self, namespace: str, name: str, urls: frozenset[str]) -> None:
        """The addresses of a resource's engines that are still there, ready or not. What is asked of others is dropped:
        that a pod or its node is gone says nothing of the engine.
        """
        for key in [k for k in self._running if k[:2] == (namespace, name)]:
            run = self._running[key]
            run.doubtful = [s for s in run.doubtful if s.unreached in urls]
            if run.task is not None and run.asking and run.asking not in urls:
                run.task.cancel()
                run.asking = ""
                self._go(key, run)

    def _go(self, key: Key, run: Running) -> None:
        run.task = asyncio.create_task(self._work(key, run), name=f"watch {'/'.join(key[:3])}")

    async def _work(self, key: Key, run: Running) -> None:
        while not run.failed:
            await asyncio.sleep(self._every)
            if not run.urls:
                continue
            try:
                await self._ask(key, run)
            except Exception as error:  # a watch that dies in silence would look like one that finds nothing
                log.error("the watch of %s/%s goes on after %s: %s", key[0], key[1], type(error).__name__, error)

    async def _ask(self, key: Key, run: Running) -> None:
        """One prompt to one of the engines."""
        prompt = run.prompts[run.asked % len(run.prompts)]
        url = run.urls[run.asked % len(run.urls)]
        run.asked += 1
        run.asking = url
        sample = await generate(self._session, url, prompt, run.max_tokens)
        run.asking = ""
        if sample.unreached:
            run.doubtful.append(sample)
            return
        for failed in [s for s in run.doubtful if s.unreached == url]:  # it is there: so it was the engine
            run.doubtful.remove(failed)
            run.watch.add(failed)
        run.watch.add(sample)
        if sample.error is None and not same_text(run.watch.expected[prompt.id], sample):
            await self._look_into(key, run, url, prompt, sample)
        outcome, reason = run.watch.state()
        if outcome is Outcome.FAIL:
            run.failed = reason
            self._wake(key[0], key[1])

    async def _look_into(self, key: Key, run: Running, url: str, prompt: Prompt, sample: Sample) -> None:
        """Whether some position of the text is a tie, where two engines may part and both be right."""
        run.explained += 1
        if run.explained > EXPLAINED:
            return
        try:
            ids = await tokenize(self._session, url, prompt.text)
            for i in range(len(sample.output_ids)):
                if await top2_gap(self._session, url, ids + list(sample.output_ids[:i])) <= run.tie_gap:
                    return
        except EngineError as error:
            log.warning("a text that differs from the canary's could not be explained: %s", error)
            return
        log.error("the text of prompt %s differs from the canary's, and it has no tie", prompt.id)
        self._diverged(key)


def same_text(recorded: Sample, answer: Sample) -> bool:
    """Whether an answer has the ids of a recorded one, of which the record may keep only length and hash.

    True as well when there is nothing to compare: no ids, or only those around a difference.
    """
    kept, ids = recorded.output_ids, answer.output_ids
    whole = bool(kept) and len(kept) == recorded.completion_tokens and kept[0] != 0
    if not whole or not ids or kept == ids:
        return True
    stand_in = int(hashlib.sha256(repr(ids).encode()).hexdigest()[:8], 16)
    return kept == (stand_in,) * len(ids)
