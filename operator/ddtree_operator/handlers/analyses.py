"""Running analyses: prompts to both sides in pairs, a verdict after each, a record that survives the operator."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ddtree_operator.analysis.evaluate import Tally
from ddtree_operator.analysis.pace import Pace, pace
from ddtree_operator.analysis.policy import Policy
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.record import Record
from ddtree_operator.analysis.types import MetricVerdict, Outcome, Pair, Verdict
from ddtree_operator.api.spec import PrometheusCheck
from ddtree_operator.core.facts import AnalysisFact
from ddtree_operator.handlers.checks import Checks
from ddtree_operator.handlers.runs import Runs
from ddtree_operator.probe.http import answers
from ddtree_operator.probe.live import LiveTraffic, Wish
from ddtree_operator.probe.runner import PairRunner

log = logging.getLogger("ddtree.analysis")

Key = tuple[str, str, str, int, int]  # namespace, name, revision, attempt, step
SAVE_EVERY = 10  # pairs between two checkpoints of a record
DOUBT = 1.0  # seconds between two looks whether an engine that gave no answer is there
QUIET = 5.0  # seconds between two looks for users' prompts when there were none


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier run of an analysis left behind."""

    record: Record
    digest: str
    started_at: float  # epoch seconds, 0.0 when unknown


@dataclass(slots=True)
class Running:
    """One analysis under way, or finished."""

    policy: Policy
    limit: int
    started_at: float
    tally: Tally
    pairs: list[Pair] = field(default_factory=list)
    verdict: Verdict | None = None
    stuck: str = ""  # why no further pair can decide; "" while one may
    error: str = ""
    quiet: str = ""  # why no pairs are sent at present; "" while they are
    seed: int = 0
    kept: dict[str, Any] = field(default_factory=dict)  # summary of the verdict that the record holds, with its digest
    checks: Checks = field(default_factory=Checks)
    baseline_urls: list[str] = field(default_factory=list)  # these three: of engines that are ready now
    canary_urls: list[str] = field(default_factory=list)
    user_urls: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    engines: frozenset[str] = frozenset()  # addresses of those that are being asked

    @property
    def ended(self) -> bool:
        """True when there is nothing more to send."""
        return bool(self.stuck) or (self.verdict is not None and self.verdict.outcome is not Outcome.NOT_YET)


def _quiet(runner: PairRunner) -> str:
    """Why a runner had nothing to send."""
    live = runner.live
    if live is not None and live.problem:
        return f"no users' prompts: {live.problem}"
    left = {k: n for k, n in live.skipped.items() if n} if live is not None else {}
    words = {"long": "too long", "other": "not plain text"}
    skipped = "; left out: " + ", ".join(f"{n} {words[k]}" for k, n in left.items()) if left else ""
    return f"waiting for users' prompts: the engines that serve had no new ones{skipped}"


def view(verdict: Verdict) -> dict[str, Any]:
    """The verdict as the status shows it."""
    return {
        "pairs": verdict.pairs,
        "errors": verdict.errors,
        "rule": verdict.rule,
        "metrics": [metric_view(m) for m in verdict.metrics],
    }


def metric_view(m: MetricVerdict) -> dict[str, Any]:
    """One metric; numbers that are not finite are left out, since JSON has none."""
    numbers = {
        "baseline": m.baseline,
        "canary": m.canary,
        "estimate": m.estimate,
        "low": m.low,
        "high": m.high,
        "threshold": m.threshold,
    }
    finite = {k: round(x, 5) for k, x in numbers.items() if math.isfinite(x)}
    return {
        "metric": m.metric,
        "outcome": str(m.outcome),
        **finite,
        "pairs": m.pairs,
        "reason": m.reason[:300],
    }


def summary(verdict: Verdict, digest: str = "", measured: Pace | None = None) -> dict[str, Any]:
    """What a revision keeps of the verdict that decided over it; ``measured`` serves later forecasts."""
    by = {m.metric: m for m in verdict.metrics}
    out: dict[str, Any] = {"outcome": str(verdict.outcome), "reason": verdict.reason[:800], "view": view(verdict)}
    for name in ("acceptLength", "throughput"):
        if name in by:
            out[name] = round(by[name].canary, 4)
            out[name + "Baseline"] = round(by[name].baseline, 4)
    out |= {"digest": digest} if digest else {}
    return out | ({"pace": measured.as_dict()} if measured else {})


class Analyses(Runs[Key, Running]):
    """All analyses of this operator. ``save`` and ``load`` keep records outside (a ConfigMap each)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        save: Callable[[Key, Running, Verdict], Awaitable[str]],
        wake: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self._session = session
        self._save = save
        self._wake = wake

    def fact(self, key: Key) -> AnalysisFact | None:
        """What is known of one analysis."""
        run = self._running.get(key)
        if run is None:
            return None
        verdict = run.verdict
        if verdict is None:
            reason = run.error or run.quiet or "waiting for the first pair"
            return AnalysisFact(key[2], key[3], key[4], "notYet", reason, run.started_at)
        decided = verdict.outcome is not Outcome.NOT_YET
        return AnalysisFact(
            revision=key[2],
            attempt=key[3],
            step=key[4],
            outcome=str(verdict.outcome),
            reason=run.error or (f"{run.quiet}; {verdict.reason}" if run.quiet and not decided else verdict.reason),
            started_at=run.started_at,
            exhausted=run.stuck,
            summary=run.kept if decided else summary(verdict),
            kept=run.kept,
        )

    def known(self, key: Key) -> bool:
        """True when this analysis runs or has ended here."""
        return key in self._running

    def adopt(
        self,
        key: Key,
        policy: Policy,
        limit: int,
        checks: list[PrometheusCheck],
        earlier: Kept | None,
    ) -> None:
        """Take over an analysis: the pairs of its record count, and a verdict that it holds stands as it was."""
        run = self._running[key] = Running(policy, limit, time.time(), Tally(policy))
        run.checks.define(checks)
        if earlier is None:
            return
        kept = earlier.record
        run.started_at = earlier.started_at or run.started_at
        run.pairs = list(kept.pairs)
        for pair in run.pairs:
            run.tally.add(pair)
        stands = kept.policy == policy and run.tally.verdict(kept.checks) == kept.verdict
        verdict = kept.verdict if stands else run.tally.verdict(run.checks.judged())
        if stands:
            run.kept = summary(verdict, earlier.digest, pace(run.pairs))
        if stands or verdict.outcome is Outcome.NOT_YET:  # else the next pair decides, and is recorded
            run.verdict = verdict
        if stands and verdict.outcome is Outcome.NOT_YET:
            run.stuck = self._stuck(run)

    def ensure(
        self,
        key: Key,
        *,
        prompts: list[Prompt],
        baseline_urls: list[str],
        canary_urls: list[str],
        seed: int,
        concurrency: int,
        max_tokens: int,
        checks: list[PrometheusCheck],
        users: tuple[Wish, list[str]] | None = None,
    ) -> None:
        """Have an adopted analysis running, unless it has ended, with the engines that are ready now. ``users``: users'
        prompts that are wished for, and the engines which serve them."""
        run = self._running[key]
        run.seed = seed
        run.baseline_urls, run.canary_urls = baseline_urls, canary_urls
        run.user_urls = users[1] if users else []
        run.checks.define(checks)
        if run.ended:
            return
        if run.task is not None and not run.task.done():
            return
        runner = PairRunner(
            self._session,
            baseline_urls,
            canary_urls,
            prompts,
            seed=seed,
            concurrency=concurrency,
            max_tokens=max_tokens,
            start=len(run.pairs),
            live=LiveTraffic(self._session, users[1], users[0], start=len(run.pairs)) if users else None,
        )
        run.task = asyncio.create_task(
            self._work(key, run, runner, concurrency), name=f"analysis {'/'.join(map(str, key))}"
        )

    async def _work(self, key: Key, run: Running, runner: PairRunner, batch: int) -> None:
        try:
            while not run.ended:
                # An engine that was replaced has another address.
                runner.baseline_urls, runner.canary_urls = run.baseline_urls, run.canary_urls
                run.engines = frozenset([*run.baseline_urls, *run.canary_urls])
                if runner.live is not None:
                    runner.live.urls = run.user_urls
                new = await runner.run(max(1, min(batch, run.limit - len(run.pairs))))
                await self._doubt(run, new)
                for pair in new:
                    run.pairs.append(pair)
                    run.tally.add(pair)
                quiet, run.quiet = run.quiet, "" if new else _quiet(runner)
                await run.checks.read(self._session)
                verdict = run.tally.verdict(run.checks.judged())
                stuck = self._stuck(run) if verdict.outcome is Outcome.NOT_YET else ""
                over = bool(stuck) or verdict.outcome is not Outcome.NOT_YET
                if over or (new and len(run.pairs) % SAVE_EVERY < batch):
                    # Recorded first: a decision is never seen without the record that it can be made from again.
                    digest = await self._save(key, run, verdict)
                    run.kept = summary(verdict, digest, pace(run.pairs))
                first = run.verdict is None
                run.verdict, run.stuck, run.error = verdict, stuck, ""
                if over or first or run.quiet != quiet:
                    self._wake(key[0], key[1])  # between, the regular looks show how far it is
                if not new:
                    await asyncio.sleep(QUIET)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("analysis %s stopped and will be started again: %s", key, error)
            run.error = f"the analysis was interrupted and goes on: {error}"
        self._wake(key[0], key[1])

    async def _doubt(self, run: Running, new: list[Pair]) -> None:
        """Wait until every engine that gave no answer at all answers again: then it was the engine that failed, and it
        counts. If its pod or its node went, ``there`` ends this, and those pairs are sent again.
        """
        for url in dict.fromkeys(s.unreached for pair in new for s in (pair.baseline, pair.canary) if s.unreached):
            while not await answers(self._session, url):
                run.quiet = f"{url} does not answer; what was asked of it counts once it does"
                await asyncio.sleep(DOUBT)

    def there(self, namespace: str, name: str, urls: frozenset[str]) -> None:
        """The addresses of a resource's engines that are still there, ready or not. What is asked of others is dropped:
        that a pod or its node is gone says nothing of the engine. ``ensure`` goes on with those that are ready.
        """
        for run in (self._running[k] for k in self._running if k[:2] == (namespace, name)):
            if run.task is not None and not run.task.done() and not run.engines <= urls:
                run.task.cancel()
                run.task = None
                run.quiet = ""

    @staticmethod
    def _stuck(run: Running) -> str:
        """Why going on is no use; "" while it may be."""
        if len(run.pairs) >= run.limit:
            return f"all {run.limit} pairs (maxPairs) are used up"
        return run.checks.given_up()

    def rest(self, namespace: str, name: str) -> None:
        """Send no more pairs for a resource until ``ensure`` is called again; what was measured stays."""
        for key in [k for k in self._running if k[:2] == (namespace, name)]:
            run = self._running[key]
            if run.task is not None:
                run.task.cancel()
                run.task = None
            if run.stuck and len(run.pairs) < run.limit:  # PromQL checks: whoever resumes has seen to them
                run.stuck = ""
                run.checks.start_anew()
