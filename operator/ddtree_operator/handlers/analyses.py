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
from ddtree_operator.analysis.policy import Policy
from ddtree_operator.analysis.prometheus import Reading, judge
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import MetricVerdict, Outcome, Pair, Verdict
from ddtree_operator.api.spec import PrometheusCheck
from ddtree_operator.core.facts import AnalysisFact
from ddtree_operator.probe.prometheus import query
from ddtree_operator.probe.runner import PairRunner

log = logging.getLogger("ddtree.analysis")

Key = tuple[str, str, str, int, int]  # namespace, name, revision, attempt, step
SAVE_EVERY = 10  # pairs between two checkpoints of a record
READ_EVERY = 5.0  # seconds between two readings of the PromQL checks
READINGS = 50  # kept per check


@dataclass(slots=True)
class Running:
    """One analysis under way, or finished."""

    policy: Policy
    limit: int
    started_at: float
    tally: Tally
    pairs: list[Pair] = field(default_factory=list)
    verdict: Verdict | None = None
    error: str = ""
    seed: int = 0
    digest: str = ""
    checks: list[PrometheusCheck] = field(default_factory=list)
    readings: dict[str, list[Reading]] = field(default_factory=dict)  # by name of the check, newest last
    read_at: float = 0.0

    def judged(self) -> list[MetricVerdict]:
        """Where the PromQL checks stand."""
        return [judge(check, self.readings.get(check.name, [])) for check in self.checks]

    task: asyncio.Task[None] | None = None


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


def summary(verdict: Verdict, digest: str = "") -> dict[str, Any]:
    """What a revision keeps of the verdict that decided over it."""
    by = {m.metric: m for m in verdict.metrics}
    out: dict[str, Any] = {"outcome": str(verdict.outcome), "reason": verdict.reason[:800], "view": view(verdict)}
    for name in ("acceptLength", "throughput"):
        if name in by:
            out[name] = round(by[name].canary, 4)
            out[name + "Baseline"] = round(by[name].baseline, 4)
    return out | ({"digest": digest} if digest else {})


class Analyses:
    """All analyses of this operator. ``save`` and ``load`` keep records outside (a ConfigMap each)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        save: Callable[[Key, Running], Awaitable[str]],
        wake: Callable[[str, str], None],
    ) -> None:
        self._session = session
        self._save = save
        self._wake = wake
        self._running: dict[Key, Running] = {}

    def fact(self, key: Key) -> AnalysisFact | None:
        """What is known of one analysis."""
        run = self._running.get(key)
        if run is None:
            return None
        verdict = run.verdict
        if verdict is None:
            reason = run.error or "waiting for the first pair"
            return AnalysisFact(key[2], key[3], key[4], "notYet", reason, run.started_at)
        return AnalysisFact(
            revision=key[2],
            attempt=key[3],
            step=key[4],
            outcome=str(verdict.outcome),
            reason=run.error or verdict.reason,
            started_at=run.started_at,
            exhausted=verdict.outcome is Outcome.NOT_YET and len(run.pairs) >= run.limit,
            summary=summary(verdict, run.digest),
        )

    def known(self, key: Key) -> bool:
        """True when this analysis runs or has ended here."""
        return key in self._running

    def adopt(self, key: Key, policy: Policy, limit: int, pairs: list[Pair], started_at: float) -> None:
        """Take over a recorded analysis: its pairs count, its verdict is computed again."""
        run = Running(policy, limit, started_at, Tally(policy), list(pairs))
        for pair in pairs:
            run.tally.add(pair)
        if pairs:
            run.verdict = run.tally.verdict()
        self._running[key] = run

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
    ) -> None:
        """Have an adopted analysis running, unless it has ended."""
        run = self._running[key]
        run.seed, run.checks = seed, checks
        limit = run.limit
        if run.verdict is not None and (run.verdict.outcome is not Outcome.NOT_YET or len(run.pairs) >= limit):
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
        )
        run.task = asyncio.create_task(
            self._work(key, run, runner, concurrency), name=f"analysis {'/'.join(map(str, key))}"
        )

    async def _work(self, key: Key, run: Running, runner: PairRunner, batch: int) -> None:
        try:
            while len(run.pairs) < run.limit:
                for pair in await runner.run(batch):
                    run.pairs.append(pair)
                    run.tally.add(pair)
                await self._read(run)
                before = run.verdict.outcome if run.verdict else None
                run.verdict = run.tally.verdict(run.judged())
                run.error = ""
                decided = run.verdict.outcome is not Outcome.NOT_YET
                if decided or len(run.pairs) % SAVE_EVERY < batch:
                    run.digest = await self._save(key, run)
                if decided or before is None:
                    self._wake(key[0], key[1])  # between, the regular looks show how far it is
                if decided:
                    break
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("analysis %s stopped and will be started again: %s", key, error)
            run.error = f"the analysis was interrupted and goes on: {error}"
        self._wake(key[0], key[1])

    async def _read(self, run: Running) -> None:
        """Ask Prometheus, when it is time again."""
        if not run.checks or time.monotonic() - run.read_at < READ_EVERY:
            return
        run.read_at = time.monotonic()
        for check in run.checks:
            readings = run.readings.setdefault(check.name, [])
            readings.append(await query(self._session, check.address, check.query))
            del readings[:-READINGS]

    def forget(self, namespace: str, name: str, *, keep: Key | None = None) -> None:
        """Stop and drop the analyses of a resource, all but ``keep``."""
        for key in [k for k in self._running if k[:2] == (namespace, name) and k != keep]:
            task = self._running.pop(key).task
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop everything."""
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
