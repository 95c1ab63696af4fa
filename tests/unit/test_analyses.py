"""Running analyses: nothing is decided before it is recorded, a restart changes nothing, a pause sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from analysis_streams import pair
from ddtree_operator.analysis import Outcome, Pair, Policy, Record, Tally, Verdict, evaluate, record
from ddtree_operator.analysis.prometheus import Reading
from ddtree_operator.api.spec import AnalysisSpec, PrometheusCheck
from ddtree_operator.core.facts import Revision
from ddtree_operator.handlers import analyses, checks, memory, records
from ddtree_operator.handlers.analyses import Analyses, Kept, Key, Running
from ddtree_operator.handlers.kube import ApiError

pytestmark = pytest.mark.unit

KEY: Key = ("llm", "qwen", "8c1d2e3f40", 0, 1)
POLICY = Policy.from_spec(AnalysisSpec())
GOOD, EQUAL = pair(accept=2.65, tps=25.0), pair()
CHECK = PrometheusCheck(name="errors", address="http://p", query="q", max=0.05, interval="1s", error_limit=3)


class Script:
    """Stands for a PairRunner: the pairs it answers with, and how often it was asked."""

    answers: Sequence[Pair] = (GOOD,)
    asked = 0
    fifth = asyncio.Event()  # set once five pairs were asked for
    reached: Sequence[Sequence[str]] = ()  # addresses of baseline and canary in the newest run
    live = None

    def __init__(self, *_: Any, start: int = 0, **__: Any) -> None:
        self.next = start
        self.baseline_urls: list[str] = []
        self.canary_urls: list[str] = []

    async def run(self, n: int) -> list[Pair]:
        await asyncio.sleep(0)
        Script.reached = (self.baseline_urls, self.canary_urls)
        Script.asked += n
        if Script.asked >= 5:
            Script.fifth.set()
        self.next += n
        return [self.answers[(self.next - n + i) % len(self.answers)] for i in range(n)]


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> type[Script]:
    Script.answers, Script.asked, Script.fifth = (GOOD,), 0, asyncio.Event()
    monkeypatch.setattr(analyses, "PairRunner", Script)
    return Script


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """What Prometheus says next; the last answer is repeated."""
    said = [Reading(0.01)]

    async def reading(*_: Any) -> Reading:
        return said.pop(0) if len(said) > 1 else said[0]

    monkeypatch.setattr(checks, "reading", reading)
    monkeypatch.setattr(checks, "seconds", lambda text: 0.0)
    return said


class Bench:
    """An Analyses whose records stay in memory."""

    def __init__(self, policy: Policy = POLICY, with_checks: Sequence[PrometheusCheck] = ()) -> None:
        self.policy, self.checks = policy, list(with_checks)
        self.records: list[bytes] = []
        self.seen_while_saving: list[str] = []
        self.woken = asyncio.Event()
        self.analyses = Analyses(None, self._save, lambda *_: self.woken.set())  # type: ignore[arg-type]

    async def _save(self, key: Key, run: Running, verdict: Verdict) -> str:
        fact = self.analyses.fact(key)
        self.seen_while_saving.append(fact.outcome if fact else "none")
        await asyncio.sleep(0)
        judged = tuple(m for m in verdict.metrics if m.metric.startswith("prometheus/"))
        self.records.append(record.dump(Record(run.policy, tuple(run.pairs), verdict, judged)))
        return record.digest(self.records[-1])

    def kept(self) -> Kept:
        return Kept(record.load(self.records[-1]), record.digest(self.records[-1]), 1000.0)

    def begin(self, earlier: Kept | None = None, canary: str = "c") -> None:
        if not self.analyses.known(KEY):
            self.analyses.adopt(KEY, self.policy, self.policy.max_pairs, self.checks, earlier)
        self.analyses.ensure(
            KEY, prompts=[], baseline_urls=["b"], canary_urls=[canary], seed=1, concurrency=1, max_tokens=8,
            checks=self.checks,
        )  # fmt: skip

    async def over(self) -> Any:
        task = self.analyses._running[KEY].task
        if task is not None:
            await asyncio.wait_for(asyncio.shield(task), 60)
        return self.analyses.fact(KEY)


@pytest.mark.asyncio
async def test_a_decision_is_recorded_before_anybody_sees_it():
    bench = Bench()
    bench.begin()
    fact = await bench.over()
    assert fact.outcome == "pass"
    assert set(bench.seen_while_saving) == {"notYet"}
    assert fact.summary["digest"] == record.digest(bench.records[-1])
    assert fact.summary["pace"]["pairs"] == 10
    assert record.recompute(record.load(bench.records[-1])).outcome is Outcome.PASS


@pytest.mark.asyncio
async def test_argo_3080_a_verdict_survives_a_restart_with_its_digest_and_sends_nothing_more():
    bench = Bench()
    bench.begin()
    before = await bench.over()
    asked = Script.asked
    after = Bench()
    after.begin(bench.kept())
    fact = await after.over()
    assert (fact.outcome, fact.summary) == (before.outcome, before.summary)
    assert fact.started_at == 1000.0
    assert Script.asked == asked
    assert after.records == []


@pytest.mark.asyncio
async def test_a_restart_never_lets_the_pairs_pass_without_the_prometheus_checks(answers):
    """The record was a checkpoint at which only the check was missing."""
    answers[:] = [Reading(error="down")]
    bench = Bench(with_checks=[CHECK.model_copy(update={"error_limit": 30})])
    bench.begin()
    fact = await bench.over()
    assert fact.outcome == "notYet"
    assert "30 errors in a row" in fact.exhausted
    answers[:] = [Reading(0.9)]
    after = Bench(with_checks=[CHECK])
    after.begin(bench.kept())
    assert after.analyses.fact(KEY).outcome == "notYet"
    fact = await after.over()
    assert fact.outcome == "fail"
    assert "prometheus/errors: 0.9, 3 times in a row not at most 0.05" in fact.reason


@pytest.mark.asyncio
async def test_errors_of_a_check_end_an_analysis_undecided_and_whoever_resumes_tries_again(answers):
    answers[:] = [Reading(error="down")]
    bench = Bench(with_checks=[CHECK])
    bench.begin()
    fact = await bench.over()
    assert fact.outcome == "notYet"
    assert fact.exhausted == "prometheus/errors: 3 errors in a row, the last: down"
    assert fact.kept["digest"] == record.digest(bench.records[-1])
    bench.analyses.rest("llm", "qwen")
    answers[:] = [Reading(0.01)]
    bench.begin()
    assert (await bench.over()).outcome == "pass"


@pytest.mark.asyncio
async def test_used_up_pairs_end_an_analysis_with_a_record():
    Script.answers = (EQUAL,)
    bench = Bench(replace(POLICY, max_pairs=23))
    bench.begin()
    fact = await bench.over()
    assert fact.exhausted == "all 23 pairs (maxPairs) are used up"
    assert Script.asked == 23
    assert len(bench.kept().record.pairs) == 23
    after = Bench(replace(POLICY, max_pairs=23))
    after.begin(bench.kept())
    assert (await after.over()).exhausted == fact.exhausted
    assert Script.asked == 23


async def under_way(script) -> Bench:
    """An analysis that has sent five pairs and goes on."""
    script.answers = (EQUAL,)
    bench = Bench()
    bench.begin()
    await asyncio.wait_for(script.fifth.wait(), 60)
    return bench


@pytest.mark.asyncio
async def test_a_paused_rollout_is_sent_no_pairs_and_goes_on_where_it_was(script):
    bench = await under_way(script)
    bench.analyses.rest("llm", "qwen")
    asked = Script.asked
    for _ in range(20):
        await asyncio.sleep(0)
    assert Script.asked == asked
    bench.begin()
    assert (await bench.over()).outcome == "pass"
    pairs = record.load(bench.records[-1]).pairs
    assert len(pairs) == evaluate(pairs, POLICY).pairs == 52


@pytest.mark.asyncio
async def test_pairs_go_to_the_engine_that_took_anothers_place(script):
    bench = await under_way(script)
    assert script.reached == (["b"], ["c"])
    bench.begin(canary="d")  # as each look does, with what is ready then
    assert (await bench.over()).outcome == "pass"
    assert script.reached == (["b"], ["d"])


@pytest.mark.asyncio
async def test_a_record_of_another_policy_is_judged_anew():
    bench = Bench()
    bench.begin()
    await bench.over()
    after = Bench(replace(POLICY, min_pairs=40))
    after.begin(bench.kept())
    assert after.analyses.fact(KEY).outcome == "notYet"
    assert (await after.over()).outcome == "pass"
    assert len(after.kept().record.pairs) == 40


RESOURCE = {
    "apiVersion": "ddtree.dev/v1alpha1",
    "kind": "DDTreeDeployment",
    "metadata": {"name": "qwen", "namespace": "llm", "uid": "1"},
}


class OneConfigMap:
    """The part of Kube that records use, with one object in it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None

    async def create(self, obj: dict[str, Any]) -> dict[str, Any] | None:
        if self.kept is not None:
            return None
        self.kept = obj
        return obj

    async def patch(self, _: Any, namespace: str, name: str, body: dict[str, Any]) -> None:
        assert self.kept is not None
        assert (namespace, name) == (KEY[0], self.kept["metadata"]["name"])
        self.kept = {**self.kept, **body}

    async def get(self, *_: Any) -> dict[str, Any] | None:
        return self.kept


@pytest.mark.asyncio
async def test_a_record_in_its_config_map_is_what_a_restart_finds():
    kube: Any = OneConfigMap()
    assert await records.load(kube, KEY, "1") is None
    digests = []
    for count in (10, 20):
        run = Running(POLICY, 2000, 1_700_000_000.0, Tally(POLICY), pairs=[GOOD] * count)
        verdict = evaluate(run.pairs, POLICY)
        digests.append(await records.save(kube, KEY, run, verdict, RESOURCE))
    kept = await records.load(kube, KEY, "1")
    assert kept is not None
    assert (kept.digest, kept.started_at) == (digests[1], 1_700_000_000.0)
    assert (len(kept.record.pairs), kept.record.verdict) == (20, verdict)
    assert kept.record.notes["revision"] == KEY[2]
    assert kube.kept["data"] == {"outcome": "pass", "reason": verdict.reason}
    assert kube.kept["metadata"]["ownerReferences"][0]["uid"] == "1"
    kube.kept["binaryData"] = {"pairs.jsonl.gz": "bm9uc2Vuc2U="}
    assert await records.load(kube, KEY, "1") is None


@pytest.mark.asyncio
async def test_a_record_of_an_earlier_resource_of_the_same_name_is_neither_read_nor_written():
    kube: Any = OneConfigMap()
    run = Running(POLICY, 2000, 1_700_000_000.0, Tally(POLICY), pairs=[GOOD] * 20)
    verdict = evaluate(run.pairs, POLICY)
    await records.save(kube, KEY, run, verdict, RESOURCE)
    before = dict(kube.kept)
    anew = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "2"}}
    assert await records.load(kube, KEY, "2") is None
    with pytest.raises(ApiError, match="does not belong to this resource"):
        await records.save(kube, KEY, run, verdict, anew)
    assert kube.kept == before
    kube.kept = None  # collected with its owner
    await records.save(kube, KEY, run, verdict, anew)
    assert await records.load(kube, KEY, "2") is not None


def test_what_was_done_to_a_rollout_outlives_the_operator():
    done = ({"at": "2026-11-30T02:00:00Z", "by": "ann", "verb": "skip", "text": "hotfix"},)
    revision = Revision("8c1d2e3f40", 3, {"model": {"path": "m"}}, log=done, summary={"pace": {"pairs": 9}})
    assert memory.from_object(memory.to_object(revision, RESOURCE)) == revision
