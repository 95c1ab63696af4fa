"""Users' prompts by opt-in: who gets them, how many, and that nothing of them is left behind."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from ddtree_operator.analysis import Outcome, Policy, Record, evaluate, record
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Pair, Sample
from ddtree_operator.api.spec import AnalysisSpec, DDTreeSpec
from ddtree_operator.core.facts import EngineSet, Observed, PodFact, Revision
from ddtree_operator.handlers import live_prompts
from ddtree_operator.handlers.analyses import Analyses
from ddtree_operator.handlers.kube import ApiError
from ddtree_operator.probe import PairRunner, generate
from ddtree_operator.probe.live import LiveTraffic, Wish, without_text
from simengine.process import SimEngine

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "patches/sglang_ddtree/src"
sys.path.insert(0, str(PLUGIN))
from sglang_ddtree import live  # noqa: E402

pytestmark = pytest.mark.unit

TOKEN = "0123456789abcdef0123"
SECRET_TEXT = "my diagnosis is none of your business, number "
SET = [Prompt(f"p{i}", "test", f"prompt number {i}") for i in range(25)]
POLICY = Policy.from_spec(AnalysisSpec.model_validate({"throughput": {"enabled": False}}))
TREE = ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def kept(one: live.Live) -> list[list[int]]:
    return list(one.take(100)["prompts"])


def test_an_engine_keeps_nothing_before_it_is_asked_and_nothing_after_the_asking_ends(clock):
    one = live.Live(clock)
    one.offer("a", [1, 2], plain=True)
    assert kept(one) == []
    one.offer("a", [1, 2], plain=True)
    clock.now += live.LEASE + 1
    assert not one.armed()
    assert not one._kept
    assert kept(one) == []


def test_an_engine_keeps_few_and_gives_each_once(clock):
    one = live.Live(clock)
    kept(one)
    for i in range(1000):
        one.offer("a", [i], plain=True)
        clock.now += live.EVERY / 2 if i < 900 else 0  # a rush at the end
    given = kept(one)
    assert len(given) == live.KEPT
    assert given[-1][0] <= 900
    assert kept(one) == []


def test_an_engine_leaves_out_our_own_health_checks_long_prompts_and_what_is_no_plain_text(clock):
    one = live.Live(clock)
    one.take(3)
    for rid, ids, plain in (
        ("ddtree-probe-1", [1], True),
        ("HEALTH_CHECK_2", [2], True),
        ("b", [1, 2, 3, 4], True),
        ("c", [3], False),
        ("d", None, True),
        ("e", [], True),
        ("f", [7, 7], True),
    ):
        one.offer(rid, ids, plain)
        clock.now += 1
    assert one.take(3) == {"prompts": [[7, 7]], "skipped": {"long": 1, "other": 3}, "lease": live.LEASE}


@pytest.mark.parametrize(
    ("odd", "plain"),
    [({}, True), ({"mm_inputs": object()}, False), ({"lora_id": "x"}, False), ({"session_id": "s"}, False)],
)
def test_plain_text_is_what_its_ids_say(odd, plain):
    assert live.is_plain(SimpleNamespace(sampling_params=1, **odd)) is plain
    assert not live.is_plain(SimpleNamespace(**odd))  # an embedding request


def test_a_user_never_notices_that_listening_failed(monkeypatch, caplog):
    async def send(self: object, request: object) -> str:
        return "sent"

    monkeypatch.setattr(live, "LIVE", None)
    assert asyncio.run(live._wrap_send(send)(None, SimpleNamespace(rid="r", input_ids=[424242]))) == "sent"
    assert "AttributeError" in caplog.text
    assert "424242" not in caplog.text


@pytest.mark.parametrize(
    ("content", "given", "status"),
    [(None, TOKEN, 404), ("short", "short", 404), (TOKEN, "", 401), (TOKEN, TOKEN + "x", 401), (TOKEN, TOKEN, None)],
)
def test_the_token_is_read_afresh_and_must_be_long(tmp_path, content, given, status):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content + "\n")
    refused = live.refusal(str(file), given)
    assert (refused and refused[0]) == status


def test_without_its_variable_the_engine_is_not_touched():
    live.install({})
    assert live.HOOKS.missing() == {}


# The operator's side, with simulated engines that hold the plugin's own piece


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as s:
        yield s


@pytest.fixture
def serving(tmp_path: Path) -> Any:
    """Makes an engine that gives its prompts to whoever has TOKEN."""
    (tmp_path / "token").write_text(TOKEN)
    path = f"{ROOT / 'tests/simengine'}:{PLUGIN}"

    def make(*flags: str) -> SimEngine:
        return SimEngine(*flags, env={"PYTHONPATH": path, live.TOKEN_ENV: str(tmp_path / "token")})

    return make


async def ask(session: aiohttp.ClientSession, engine: SimEngine, first: int, count: int) -> None:
    """What users do: one request after the other, no faster than prompts are kept."""
    for i in range(first, first + count):
        body = {"text": f"{SECRET_TEXT}{i}", "sampling_params": {"max_new_tokens": 4}}
        async with session.post(f"{engine.url}/generate", json=body) as answer:
            assert answer.status == 200
        await asyncio.sleep(live.EVERY)


def runner(session, baseline, canary, wait=True, token=TOKEN) -> PairRunner:
    traffic = LiveTraffic(session, [baseline.url], Wish(token, 100, wait))
    return PairRunner(session, [baseline.url], [canary.url], SET, 5, 2, 48, live=traffic)


@pytest.mark.asyncio
async def test_pairs_of_users_prompts_give_a_verdict_and_leave_no_trace_of_the_text(session, serving):
    with serving() as baseline, SimEngine(*TREE) as canary:
        run = runner(session, baseline, canary)
        assert await run.run(8) == []  # from now on the engine keeps some
        await ask(session, baseline, 0, 12)
        pairs = [*await run.run(8), *await run.run(8)]
        assert [p.baseline.prompt_id for p in pairs] == [f"live-{i}" for i in range(1, 13)]
        assert all(p.baseline.error is None and p.canary.error is None for p in pairs), pairs
        assert await run.run(8) == []  # each once; our own requests are no users'
        verdict = evaluate(pairs, POLICY)
        assert verdict.outcome is Outcome.PASS, verdict.reason
        data = record.dump(Record(POLICY, tuple(pairs), verdict))
        assert record.recompute(record.load(data)) == verdict
        lines = gzip.decompress(data).decode()
        assert "diagnosis" not in lines
        rows = [json.loads(line) for line in lines.splitlines()[1:-1]]
        lengths = [row[3][0] for row in rows if isinstance(row[3][1], str)]
        assert lengths  # of equal answers there is the length, and the hash of that many zeros
        assert {row[3][1] for row in rows if row[3][0] == 48} <= {record._row(stand_in(48), False, True)[3][1]}


def stand_in(length: int) -> Pair:
    zeros = Sample("x", output_ids=(0,) * length)
    return Pair(zeros, zeros)


@pytest.mark.asyncio
async def test_a_wrong_token_in_an_answer_to_a_user_fails_and_is_not_recorded(session, serving):
    with serving() as baseline, SimEngine(*TREE, "--sim-fault-every", "12") as canary:
        run = runner(session, baseline, canary)
        await run.run(2)
        await ask(session, baseline, 0, 2)
        pairs = await run.run(2)
        verdict = evaluate(pairs, POLICY)
        assert verdict.outcome is Outcome.FAIL
        assert "parity" in verdict.reason
        assert {i for p in pairs for i in p.baseline.output_ids + p.canary.output_ids} <= {0, 1, 2}
        data = record.dump(Record(POLICY, tuple(pairs), verdict))
        assert record.recompute(record.load(data)) == verdict


@pytest.mark.asyncio
async def test_when_users_are_quiet_the_set_goes_on_if_the_resource_says_so(session, serving):
    with serving() as baseline, SimEngine(*TREE) as canary:
        run = runner(session, baseline, canary, wait=False)
        assert [p.baseline.prompt_id[0] for p in await run.run(3)] == ["p"] * 3
        await ask(session, baseline, 0, 2)
        ids = [p.baseline.prompt_id for p in await run.run(3)]
        assert ids[:2] == ["live-1", "live-2"]
        assert ids[2].startswith("p")


@pytest.mark.asyncio
async def test_what_an_engine_says_about_a_users_prompt_is_not_repeated(session):
    from aiohttp import web

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": f"bad input: {await request.text()}"}}, status=400)

    app = web.Application()
    app.router.add_post("/generate", handler)
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    try:
        sample = await generate(session, url, Prompt("live-1", "live", "", (424242,)), 4)
        assert sample.error == f"{url}/generate answered 400"
        assert "424242" not in repr(Prompt("live-1", "live", "", (424242,)))
    finally:
        await server.cleanup()


@pytest.mark.asyncio
async def test_no_prompts_is_said_and_is_never_a_pass(session, serving):
    with serving() as baseline, SimEngine() as stock:
        for engine, token, says in (
            (stock, TOKEN, "answered 404: the engine was started without live prompts"),
            (baseline, "f" * 20, "answered 401: the engine has another token"),
        ):
            run = runner(session, engine, stock, token=token)
            assert await run.run(4) == []
            assert run.live is not None
            assert says in run.live.problem
            assert token not in repr(run.live.wish)
        quiet = asyncio.Event()

        async def save(*_: Any) -> str:
            raise AssertionError("there is nothing to record")

        analyses = Analyses(session, save, lambda *_: quiet.set())
        key = ("ns", "qwen", "8c1d2e3f40", 0, 1)
        analyses.adopt(key, POLICY, 100, [], None)
        analyses.ensure(
            key, prompts=SET, baseline_urls=[baseline.url], canary_urls=[stock.url], seed=1, concurrency=2,
            max_tokens=8, checks=[], users=(Wish(TOKEN, 100, True), [baseline.url]),
        )  # fmt: skip
        await asyncio.wait_for(quiet.wait(), 60)
        fact = analyses.fact(key)
        await analyses.close()
        assert fact is not None
        assert fact.outcome == "notYet"
        assert fact.reason.startswith("waiting for users' prompts: the engines that serve had no new ones")


def test_stand_ins_part_where_the_outputs_did():
    def ids(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        made = without_text(Pair(Sample("x", output_ids=a), Sample("x", output_ids=b)))
        return made.baseline.output_ids, made.canary.output_ids

    assert ids((5, 6), (5, 6)) == ((0, 0), (0, 0))
    assert ids((5, 6, 7), (5, 9)) == ((0, 1, 1), (0, 2))
    assert ids((5, 6, 7), (5, 6)) == ((0, 0, 1), (0, 0))
    assert ids((), (5,)) == ((), (2,))


# The opt-in


class Secrets:
    """A cluster with one Secret, or an error."""

    def __init__(self, found: dict[str, Any] | None = None, status: int = 0) -> None:
        self.found, self.status = found, status

    async def get(self, kind: object, namespace: str, name: str) -> dict[str, Any] | None:
        assert name == "qwen-live-prompts"
        if self.status:
            raise ApiError(self.status, "no")
        return self.found


def spec(**live_traffic: Any) -> DDTreeSpec:
    analysis = {"prompts": {"liveTraffic": live_traffic}}
    models = {"model": {"path": "org/m"}, "drafter": {"path": "org/d"}}
    return DDTreeSpec.model_validate({**models, "canary": {"analysis": analysis}})


def secret(token: str) -> dict[str, Any]:
    return {"data": {"token": base64.b64encode(token.encode()).decode()}}


async def wish(kube: Secrets, wanted: DDTreeSpec, model: str = "org/m") -> tuple[Wish | None, str]:
    serving = Revision(hash="a", number=1, spec={"model": {"path": model}})
    found, problem = await live_prompts.wish(kube, wanted, {"name": "qwen", "namespace": "llm"}, serving)  # type: ignore[arg-type]
    return found, f"{problem.reason}: {problem.message}" if problem else ""


@pytest.mark.asyncio
async def test_who_does_not_opt_in_is_not_asked_for_a_secret():
    plain = DDTreeSpec.model_validate({"model": {"path": "org/m"}, "drafter": {"path": "org/d"}})
    assert await wish(Secrets(status=500), plain) == (None, "")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kube", "model", "says"),
    [
        (
            Secrets(),
            "org/m",
            "SecretMissing: liveTraffic needs Secret qwen-live-prompts in namespace llm; make it with",
        ),
        (Secrets(status=403), "org/m", "SecretForbidden: liveTraffic needs Secret qwen-live-prompts"),
        (Secrets(secret("short")), "org/m", "SecretMissing: Secret qwen-live-prompts has no token of 16 characters"),
        (Secrets({"data": {"token": "!"}}), "org/m", "SecretMissing: Secret qwen-live-prompts has no token"),
        (Secrets(secret("x" * 20 + "\n\ny")), "org/m", "SecretMissing: Secret qwen-live-prompts has no token"),
        (Secrets(secret(TOKEN)), "org/other", "LiveTrafficNotPossible: liveTraffic gives token ids of org/other"),
    ],
)
async def test_an_opt_in_that_cannot_work_is_said_at_once(kube, model, says):
    found, problem = await wish(kube, spec(), model)
    assert found is None
    assert problem.startswith(says)


@pytest.mark.asyncio
async def test_an_opt_in():
    found, problem = await wish(Secrets(secret(TOKEN + "\n")), spec(whenQuiet="set", longest=77))
    assert (found, problem) == (Wish(TOKEN, 77, wait=False), "")


def test_prompts_come_from_the_engines_that_serve_and_before_a_first_rollout_from_none():
    def pods(*ips: str) -> tuple[PodFact, ...]:
        return tuple(PodFact(name=ip, ip=ip, ready=True) for ip in ips)

    sets = (
        EngineSet("q-a", "a", pods=pods("1", "2")),
        EngineSet("q-b", "b", pods=pods("3")),
        EngineSet("q-base-a", "a", baseline=True, pods=pods("4")),
    )
    wanted = Wish(TOKEN, 10, True)
    seen = Observed(sets=sets, service_selector={"ddtree.dev/revision": "a"})
    assert live_prompts.sources(wanted, seen) == (wanted, ["http://1:30000", "http://2:30000"])
    assert live_prompts.sources(wanted, Observed(sets=sets)) is None
    nobody = Observed(sets=sets, service_selector={"ddtree.dev/revision": "none"})
    assert live_prompts.sources(wanted, nobody) is None
    shared = Observed(sets=sets, service_selector={"ddtree.dev/deployment": "q"})
    assert live_prompts.sources(wanted, shared) == (wanted, [f"http://{i}:30000" for i in (1, 2, 3)])
    assert live_prompts.sources(None, seen) is None
