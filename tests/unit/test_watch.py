"""The watch after a promotion: the test behind it, the prompts it sends, and what the core makes of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from ddtree_operator.analysis import record
from ddtree_operator.analysis.evaluate import evaluate
from ddtree_operator.analysis.policy import Policy
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.record import Record
from ddtree_operator.analysis.types import Outcome, Pair, Sample
from ddtree_operator.analysis.watch import EPOCHS, Watch, epoch_of, expected_of, policy_for
from ddtree_operator.api.spec import AnalysisSpec
from ddtree_operator.handlers import watches as module
from ddtree_operator.handlers.watches import Watches, same_text
from ddtree_operator.probe.http import EngineError
from unit.test_alarms import promoted, serves, settle
from unit.world import stable

pytestmark = pytest.mark.unit

KEY = ("llm", "m", "0123456789", 0)


def answer(prompt: str, accept: float = 2.5, *, steps: int = 40, ids: tuple[int, ...] = (), **more: Any) -> Sample:
    drafts = round((accept - 1) * steps)
    return Sample(prompt, steps + drafts, steps, drafts, 1.0, ids, **more)


def expected(count: int = 40) -> dict[str, Sample]:
    return {f"p{i}": answer(f"p{i}", 2.0 + i % 10 / 10) for i in range(count)}


def watch(failures: float = 0.0) -> Watch:
    return Watch(policy_for(AnalysisSpec(), True), expected(), failures)


def asked(made: Watch, samples: int, change: float = 0.0, noise: float = 0.0, seed: int = 0) -> int | None:
    """Answers until the watch fails; None when it does not."""
    rng = random.Random(seed)
    for i in range(samples):
        before = made.expected[f"p{i % len(made.expected)}"]
        accept = before.accept_length * (1 + change) * (1 + rng.gauss(0, noise))
        made.add(answer(before.prompt_id, max(1.0, accept)))
        if made.state()[0] is Outcome.FAIL:
            return i + 1
    return None


# the test -----------------------------------------------------------------------------------------------------------


def test_a_large_fall_is_found_within_a_minute_of_prompts_and_a_small_one_later() -> None:
    large, small = asked(watch(), 100, change=-0.4), asked(watch(), 2000, change=-0.12, noise=0.05)
    assert large is not None
    assert large <= 15
    assert small is not None
    assert large < small < 400


@pytest.mark.parametrize("change", [0.0, -0.02, 0.3])
def test_what_is_no_worse_than_the_margin_goes_on_for_the_whole_watch(change: float) -> None:
    assert [asked(watch(), 120, change=change, noise=0.1, seed=s) for s in range(12)] == [None] * 12


def test_failures_are_held_against_those_of_the_canary() -> None:
    def until(share: float, canary: float, seed: int = 1) -> int | None:
        rng, made = random.Random(seed), watch(canary)
        for i in range(300):
            made.add(Sample("p1", error="HTTP 500") if rng.random() < share else answer("p1", 2.1))
            if made.state()[0] is Outcome.FAIL:
                return i + 1
        return None

    assert until(1.0, 0.0) in range(8, 25)
    assert until(0.5, 0.0) in range(8, 60)
    assert until(0.02, 0.0) is None
    assert until(0.2, 0.3) is None
    made = watch()
    for _ in range(30):
        made.add(Sample("p1", error="HTTP 500"))
    assert made.state()[1] == "30 of 30 requests failed, 0% of the canary's did; last error: HTTP 500"


def test_speculation_that_stopped_is_a_failure() -> None:
    made = watch()
    for _ in range(30):
        made.add(Sample("p1", 64, 0, 0, 1.0))
    assert made.state()[0] is Outcome.FAIL
    assert "speculation is inactive" in made.state()[1]


def test_epochs_cut_the_watch_and_share_the_budget() -> None:
    assert [epoch_of(s, 3600) for s in (0, 599, 600, 3599, 3600, -5)] == [0, 0, 1, 5, 5, 0]
    policy = policy_for(AnalysisSpec(), True)
    assert policy.false_rollback * EPOCHS == pytest.approx(0.01)
    assert [g.threshold for g in policy.gates] == [-0.03]
    gain = AnalysisSpec.model_validate({"acceptLength": {"atLeast": "+10%", "nonInferiority": "4%"}})
    assert [g.threshold for g in policy_for(gain, True).gates] == [-0.04]


def test_what_the_canary_showed_comes_from_its_record() -> None:
    pairs = [Pair(answer(f"p{i}"), answer(f"p{i}", 3.0)) for i in range(3)]
    pairs += [Pair(answer("p1"), answer("p1", 2.0)), Pair(answer("p9"), Sample("p9", error="no"))]
    known, failures = expected_of(pairs, True)
    assert {k: s.accept_length for k, s in known.items()} == {"p0": 3.0, "p1": 2.0, "p2": 3.0}
    assert failures == 0.2


def test_texts_are_compared_with_what_a_record_keeps_of_them() -> None:
    ids = tuple(range(5, 69))
    sample = replace(answer("p", ids=ids), completion_tokens=64)
    other = replace(sample, output_ids=(*ids[:-1], 1))
    policy = Policy.from_spec(AnalysisSpec())
    pairs = (Pair(sample, sample), Pair(sample, other))
    made = Record(policy, pairs, evaluate(pairs, policy))
    equal, differing = (p.canary for p in record.load(record.dump(made)).pairs)
    assert same_text(equal, sample)
    assert not same_text(equal, other)
    assert same_text(differing, other)
    assert not same_text(differing, sample)
    assert same_text(Sample("p"), sample)  # nothing to compare
    assert same_text(replace(sample, output_ids=(0, 0, 7)), other)  # only the ids around a difference


# the prompts --------------------------------------------------------------------------------------------------------


class Engine:
    """Answers of one engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: dict[str, Sample], gap: float = 1.0) -> None:
        self.accept, self.ids, self.urls = 0.0, {k: s.output_ids for k, s in made.items()}, []
        self.gap, self.enough = gap, asyncio.Event()  # set after 60 prompts

        async def generate(session: Any, url: str, prompt: Prompt, max_tokens: int) -> Sample:
            self.urls.append(url)
            if len(self.urls) > 60:
                self.enough.set()
            before = made[prompt.id]
            sample = answer(prompt.id, self.accept) if self.accept else before
            return replace(sample, output_ids=self.ids[prompt.id])

        async def tokenize(*_: Any) -> list[int]:
            return [1]

        async def top2_gap(*_: Any) -> float:
            if self.gap < 0:
                raise EngineError("no")
            return self.gap

        monkeypatch.setattr(module, "generate", generate)
        monkeypatch.setattr(module, "tokenize", tokenize)
        monkeypatch.setattr(module, "top2_gap", top2_gap)


def texts(count: int = 10) -> dict[str, Sample]:
    ids = tuple(range(7, 15))
    return {k: replace(s, output_ids=ids, completion_tokens=8, verify_steps=4, accepted_drafts=4) for k, s in
            expected(count).items()}  # fmt: skip


def begun(made: dict[str, Sample]) -> tuple[Watches, asyncio.Event, list[Any]]:
    woken, diverged = asyncio.Event(), []
    watches = Watches(None, lambda *_: woken.set(), diverged.append, every=0.0)  # type: ignore[arg-type]
    prompts = [Prompt(k, "", k) for k in [*made, "unknown"]]
    watches.begin(KEY, Watch(policy_for(AnalysisSpec(), True), made, 0.0), prompts, 8, 0.25)
    return watches, woken, diverged


@pytest.mark.asyncio
async def test_a_fall_wakes_the_operator_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = texts()
    engine = Engine(monkeypatch, made)
    watches, woken, diverged = begun(made)
    assert watches.fact(KEY) is not None
    assert not watches.fact(KEY).failed  # type: ignore[union-attr]
    await asyncio.sleep(0)
    assert engine.urls == []  # no engine is known yet
    watches.reach(KEY, ["a", "b"])
    engine.accept = 1.2
    async with asyncio.timeout(30):
        await woken.wait()
    fact = watches.fact(KEY)
    assert fact is not None
    assert fact.failed
    assert "accept length 1.20 on prompts that gave the canary 2.00" in fact.reason
    assert set(engine.urls) == {"a", "b"}
    assert diverged == []
    await watches.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("gap", "counted"), [(1.0, True), (0.1, False), (-1.0, False)])
async def test_a_text_that_differs_counts_unless_a_tie_may_explain_it(
    monkeypatch: pytest.MonkeyPatch, gap: float, counted: bool
) -> None:
    made = texts()
    engine = Engine(monkeypatch, made, gap)
    engine.ids["p3"] = (9, 9, 9, 9, 9, 9, 9, 9)
    watches, _, diverged = begun(made)
    watches.reach(KEY, ["a"])
    async with asyncio.timeout(30):
        await engine.enough.wait()
    assert len(diverged) == (module.EXPLAINED if counted else 0)
    assert not watches.fact(KEY).failed  # type: ignore[union-attr]
    watches.forget("llm", "m")
    assert watches.fact(KEY) is None


@pytest.mark.asyncio
async def test_a_prompt_that_goes_wrong_in_an_unknown_way_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = texts()
    engine = Engine(monkeypatch, made)
    watches, woken, _ = begun(made)
    answers, broken = module.generate, iter(range(3))

    async def generate(*args: Any) -> Sample:
        if next(broken, None) is not None:
            raise RuntimeError("session is closed")
        return await answers(*args)

    monkeypatch.setattr(module, "generate", generate)
    engine.accept = 1.2
    watches.reach(KEY, ["a"])
    async with asyncio.timeout(30):
        await woken.wait()
    assert watches.fact(KEY).failed  # type: ignore[union-attr]
    watches.reach(KEY, [])  # and again to nobody
    watches.forget("llm", "m")
    watches.reach(KEY, ["a"])


# the core -----------------------------------------------------------------------------------------------------------


def test_a_revision_is_watched_for_an_hour_and_then_left_alone() -> None:
    world, _, new = promoted()
    settle(world)
    assert world.watches[-1] == (new, 0)
    assert 0 < world.decide().wake < 3601
    world.now = world.revisions[new].at + 3601
    before = len(world.watches)
    settle(world)
    assert len(world.watches) == before


def test_a_fall_goes_back_once() -> None:
    world, old, new = promoted()
    world.fell[new] = "accept length 1.20 on prompts that gave the canary 2.50"
    settle(world)
    assert serves(world) == old
    assert world.status["phase"] == "RolledBack"
    assert world.status["message"] == "after promotion: accept length 1.20 on prompts that gave the canary 2.50"
    assert world.revisions[new].cause == "watch"
    assert not world.outages
    watched = len(world.watches)
    settle(world)
    assert len(world.watches) == watched  # neither the one that was left nor the one gone back to
    world.fell.clear()
    world.ask("retry").until("Stable")
    assert serves(world) == new
    assert settle(world).watches[-1] == (new, 1)


@pytest.mark.parametrize("drop", ["alert", "rollback"])
def test_without_a_way_back_or_by_wish_it_is_only_said_once(drop: str) -> None:
    world = stable(rollback={"onDrop": drop})
    if drop == "alert":
        world.retuned(15).until("Stable")
    serving = world.status["revision"]
    world.fell[serving] = "worse"
    settle(world)
    writes = world.writes
    settle(world, 30)
    assert serves(world) == serving
    assert world.status["phase"] == "Stable"
    assert [e.reason for e in world.events].count("WatchFailed") == 1
    assert world.writes == writes
    assert world.status["history"][-1]["log"][-1]["verb"] == "watch"


def test_an_off_watch_asks_nothing() -> None:
    world = stable(rollback={"watch": "0s"})
    settle(world)
    assert world.watches == []


def test_what_was_gone_back_to_by_an_edit_is_not_watched() -> None:
    world, old, _ = promoted()
    world.edit(engine={"speculative": {"algorithm": "DFLASH"}})
    settle(world)
    assert serves(world) == old
    assert world.status["phase"] == "Stable"
    world.watches.clear()
    settle(world)
    assert world.watches == []
