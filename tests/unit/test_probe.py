"""The prober against simulated engines and broken servers, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from ddtree_operator.analysis import Outcome, Policy, Sample, evaluate
from ddtree_operator.analysis.parity import Parity, compare
from ddtree_operator.analysis.prometheus import Reading
from ddtree_operator.api.spec import AnalysisSpec, PrometheusCheck
from ddtree_operator.probe import EngineError, PairRunner, Prompt, engine_reader, generate, schedule, top2_gap
from ddtree_operator.probe.counters import disagreement
from ddtree_operator.probe.engine import EngineCounters
from ddtree_operator.probe.prometheus import query, reading
from simengine.process import SimEngine

pytestmark = pytest.mark.unit

PROMPTS = [Prompt(f"p{i}", "test", f"prompt number {i}") for i in range(25)]
TREE = ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16")


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as s:
        yield s


def runner(session, baseline, canary, **more) -> PairRunner:
    return PairRunner(session, [baseline.url], [canary.url], PROMPTS, 5, 2, 48, **more)


async def serve(handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    run = web.AppRunner(app)
    await run.setup()
    site = web.TCPSite(run, "127.0.0.1", 0)
    await site.start()
    return run, f"http://127.0.0.1:{run.addresses[0][1]}"


@pytest.mark.asyncio
async def test_pairs_of_equal_engines(session):
    with SimEngine() as baseline, SimEngine(*TREE) as canary:
        pairs = await runner(session, baseline, canary).run(30)
        assert all(p.baseline.error is None and p.canary.error is None for p in pairs)
        assert all(p.baseline.prompt_id == p.canary.prompt_id for p in pairs)
        assert all(p.divergence is None for p in pairs)
        assert {p.canary_first for p in pairs} == {True, False}
        assert len({p.baseline.prompt_id for p in pairs[:25]}) == 25
        verdict = evaluate(pairs, Policy.from_spec(AnalysisSpec.model_validate({"throughput": {"enabled": False}})))
        assert verdict.outcome is Outcome.PASS, verdict.reason


@pytest.mark.asyncio
async def test_a_restarted_runner_goes_on_where_the_first_was(session):
    with SimEngine() as engine:
        whole = await runner(session, engine, engine).run(8)
        rest = await runner(session, engine, engine, start=5).run(3)
        assert [p.baseline.prompt_id for p in rest] == [p.baseline.prompt_id for p in whole[5:]]
        assert [p.canary_first for p in rest] == [p.canary_first for p in whole[5:]]


def test_schedule_is_fair_and_seeded():
    order = [schedule(1, i, 10) for i in range(40)]
    for turn in range(4):
        assert sorted(n for n, _ in order[turn * 10 : turn * 10 + 10]) == list(range(10))
    assert order != [schedule(2, i, 10) for i in range(40)]
    first = sum(schedule(3, i, 10)[1] for i in range(2000))
    assert 900 < first < 1100


@pytest.mark.asyncio
async def test_a_fault_is_a_bug_and_a_tie_is_a_tie(session):
    with SimEngine() as baseline, SimEngine(*TREE, "--sim-fault-every", "20") as faulty:
        pairs = await runner(session, baseline, faulty).run(6)
        kinds = [compare(p, 3.8e-6) for p in pairs if p.divergence]
        assert Parity.BUG in kinds
        assert all(p.divergence.error is None for p in pairs if p.divergence)
    with (
        SimEngine("--sim-tie-every", "8") as baseline,
        SimEngine("--sim-tie-every", "8", "--sim-tie-flip", "1") as flip,
    ):
        pairs = await runner(session, baseline, flip).run(6)
        kinds = [compare(p, 3.8e-6) for p in pairs]
        assert Parity.TIE in kinds
        assert set(kinds) <= {Parity.TIE, Parity.EQUAL}


@pytest.mark.asyncio
async def test_misfit_drafter_fails(session):
    with SimEngine() as baseline, SimEngine(*TREE, "--speculative-draft-model-path", "sim/misfit") as canary:
        pairs = await runner(session, baseline, canary).run(12)
        verdict = evaluate(pairs, Policy.from_spec(AnalysisSpec()))
        assert verdict.outcome is Outcome.FAIL
        assert "acceptLength" in verdict.reason


@pytest.mark.asyncio
async def test_warm_up_is_not_a_sample(session):
    with SimEngine() as engine:
        reader = engine_reader("sglang", session, engine.url)
        await runner(session, engine, engine, warmup=2).run(3)
        assert (await reader.counters()).requests == 2 + 6


@pytest.mark.asyncio
async def test_counters_agree_with_meta_info(session):
    with SimEngine(*TREE) as engine:
        samples = [await generate(session, engine.url, p, 32) for p in PROMPTS[:5]]
        counters = await engine_reader("sglang", session, engine.url).counters()
        assert counters.verify_steps == sum(s.verify_steps for s in samples)
        assert counters.generated_tokens == sum(s.completion_tokens for s in samples)
        info = await engine_reader("sglang", session, engine.url).info()
        assert (info.algorithm, info.draft_tokens, info.dtype) == ("DDTREE", 17, "float32")
        assert await engine_reader("sglang", session, engine.url).healthy()


def json_answer(answer: object, status: int = 200):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    return handler


def text_answer(text: str, status: int = 200):
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type="text/html")

    return handler


GOOD_META = {"completion_tokens": 2, "spec_verify_ct": 1, "spec_num_correct_drafts": 1}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (text_answer(""), "answered nothing where JSON was expected"),
        (text_answer("<html><h1>Log in</h1></html>"), "answered HTML where JSON was expected"),
        (text_answer('{"text": "cut'), "where JSON was expected"),
        (text_answer("go away", 302), "answered 302: go away"),
        (json_answer({"error": {"message": "input too long"}}, 400), "answered 400: input too long"),
        (json_answer({"detail": "Not Found"}, 404), "answered 404: Not Found"),
        (json_answer({"status": "error"}), "has no meta_info"),
        (json_answer([1, 2]), "a JSON list where an object was expected"),
        (json_answer({"meta_info": {}}), "no meta_info.completion_tokens"),
        (json_answer({"meta_info": {**GOOD_META, "spec_verify_ct": "3"}}), "spec_verify_ct"),
        (json_answer({"meta_info": {**GOOD_META, "completion_tokens": 2.5}}), "completion_tokens"),
        (json_answer({"meta_info": {**GOOD_META, "completion_tokens": -1}}), "not a count"),
        (json_answer({"meta_info": GOOD_META, "output_ids": "abc"}), "output_ids"),
        (json_answer({"meta_info": {**GOOD_META, "finish_reason": {"type": "abort", "message": "no KV"}}}), "no KV"),
        (text_answer("x" * (9 << 20)), "more than 8 MiB"),
    ],
)
async def test_argo_4535_bad_answers_are_errors_in_one_sentence(session, handler, says):
    """B2: whatever comes back where a result was due is an error, never a result."""
    server, url = await serve(handler)
    try:
        sample = await generate(session, url, PROMPTS[0], 4, 30)
        assert sample.error is not None
        assert says in sample.error
        assert "\n" not in sample.error
        assert len(sample.error) < 320
    finally:
        await server.cleanup()


@pytest.mark.asyncio
async def test_nobody_there_and_no_answer(session):
    closed, url = await serve(text_answer(""))
    await closed.cleanup()
    sample = await generate(session, url, PROMPTS[0], 4, 5)
    assert "cannot connect" in (sample.error or "")
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    server, url = await serve(hang)
    try:
        sample = await generate(session, url, PROMPTS[0], 4, 0.2)
        assert "no answer from" in (sample.error or "")
        assert "within 0.2 s" in (sample.error or "")
    finally:
        release.set()
        await server.cleanup()
    assert "not an address" in ((await generate(session, "http://", PROMPTS[0], 4)).error or "")


@pytest.mark.asyncio
async def test_a_dead_canary_gives_error_samples_not_exceptions(session):
    with SimEngine() as baseline, SimEngine("--sim-crash-after", "3") as canary:
        pairs = await runner(session, baseline, canary).run(8)
        assert len(pairs) == 8
        assert all(p.baseline.error is None for p in pairs)
        assert any(p.canary.error for p in pairs)


@pytest.mark.asyncio
async def test_unreadable_gap_is_told(session):
    async def ids_only(request: web.Request) -> web.Response:
        if request.path != "/generate":
            return web.Response(status=404, text="no such thing")
        return web.json_response({"meta_info": GOOD_META, "output_ids": [1, 2]})

    server, url = await serve(ids_only)
    try:
        with SimEngine() as baseline:
            pairs = await PairRunner(session, [baseline.url], [url], PROMPTS, 0, 1, 8, warmup=0).run(1)
        said = pairs[0].divergence
        assert said is not None
        assert said.canary_gap is None
        assert said.baseline_gap is not None
        assert "404" in (said.error or "")
        with pytest.raises(EngineError, match="two best tokens"):
            await top2_gap(session, url, [1])
    finally:
        await server.cleanup()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--enable-metrics"),
        ("up 1\n", "--enable-metrics"),
        ("sglang:num_requests_total NaN\n", "is nan"),
        ("sglang:num_requests_total -4\n", "is -4"),
        ("<html>", "--enable-metrics"),
        ('sglang:num_requests_total{a="b"}\n', "has no number"),
    ],
)
async def test_bad_metrics_are_errors(session, text, says):
    server, url = await serve(text_answer(text))
    try:
        with pytest.raises(EngineError, match=says):
            await engine_reader("sglang", session, url).counters()
    finally:
        await server.cleanup()


@pytest.mark.asyncio
async def test_the_gauge_that_freezes_when_idle_is_never_read_and_counters_are_summed_over_ranks(session):
    text = (
        'sglang:spec_verify_calls_total{tp_rank="0 }"} 5 1700000000\nsglang:spec_verify_calls_total{tp_rank="1"} 7\n'
        'sglang:spec_accept_length{tp_rank="0"} 3.9\n'
    )
    server, url = await serve(text_answer(text))
    try:
        counters = await engine_reader("sglang", session, url).counters()
        assert counters.verify_steps == 12
        assert counters.requests == 0
    finally:
        await server.cleanup()


@pytest.mark.asyncio
@pytest.mark.parametrize(("flags", "deterministic"), [("", False), (" --enable-deterministic-inference --tp 2", True)])
async def test_an_engines_own_account_of_itself(session, flags, deterministic):
    said = {
        "model_path": "m",
        "dtype": "torch.bfloat16",
        "speculative_algorithm": "DFLASH",
        "speculative_num_draft_tokens": 64,
        "launch_command": f"python -m sglang.launch_server --speculative-algorithm DDTREE{flags}",
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(said)

    server, url = await serve(answer)
    try:
        info = await engine_reader("sglang", session, url).info()
    finally:
        await server.cleanup()
    assert (info.algorithm, info.draft_tokens, info.dtype) == ("DDTREE", 64, "bfloat16")
    assert info.deterministic is deterministic


@pytest.mark.asyncio
async def test_other_engine_kinds(session):
    with pytest.raises(EngineError, match="vllm is not supported yet"):
        engine_reader("vllm", session, "http://x")
    with pytest.raises(EngineError, match="unknown"):
        engine_reader("tgi", session, "http://x")


def test_empty_sides_are_refused():
    with pytest.raises(ValueError, match="at least one baseline"):
        PairRunner(None, [], ["u"], PROMPTS, 0, 1, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one prompt"):
        PairRunner(None, ["u"], ["u"], [], 0, 1, 8)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_prometheus_query(session):
    async def answer(request: web.Request) -> web.Response:
        assert request.query["lookback_delta"] == "60s"
        number = {"sum(x)": "0.25", "busy": "3", "idle": "0"}[request.query["query"]]
        series = {"metric": {}, "value": [float(request.query["time"]), number]}
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": [series]}})

    server, url = await serve(answer)
    check = PrometheusCheck(name="x", address=url, query="sum(x)", max=1, max_age="1m")
    try:
        assert (await query(session, url, "sum(x)", 60)).value == 0.25
        assert await reading(session, check.model_copy(update={"activity": "busy"})) == Reading(0.25)
        idle = await reading(session, check.model_copy(update={"activity": "idle"}))
        assert "activity is 0" in (idle.error or "")
    finally:
        await server.cleanup()
    assert "cannot connect" in ((await query(session, url, "x", 60, 5)).error or "")


def counters(requests: float, tokens: float, steps: float) -> EngineCounters:
    return EngineCounters(requests, tokens, steps)


ANSWERS = [Sample("a", 10, 4, 6, 1.0), Sample("b", 12, 5, 7, 1.0)]


@pytest.mark.parametrize(
    ("moved", "extra", "agrees"),
    [
        ((2, 22, 9), 0, True),
        ((3, 23, 9), 1, True),
        ((2, 22, 10), 0, False),  # nobody else was there, so the answers left a step out
        ((2, 23, 9), 0, False),
        ((5, 80, 40), 0, True),  # other traffic
        ((5, 80, 8), 0, False),
        ((1, 22, 9), 0, False),
        ((-7, -70, -30), 0, True),  # the engine started anew
    ],
)
def test_counters_against_answers(moved, extra, agrees):
    before = counters(10, 100, 50)
    after = counters(10 + moved[0], 100 + moved[1], 50 + moved[2])
    assert (disagreement(before, after, ANSWERS, extra) is None) is agrees


def test_failed_requests_leave_only_the_lower_bound():
    samples = [*ANSWERS, Sample("c", error="timeout")]
    assert disagreement(counters(0, 0, 0), counters(3, 40, 20), samples) is None
    assert disagreement(counters(0, 0, 0), counters(3, 40, 8), samples) is not None


@pytest.mark.asyncio
async def test_answers_that_contradict_the_counters_are_errors(session, monkeypatch):
    monkeypatch.setattr("ddtree_operator.probe.counters.LAG", 0.1)
    with SimEngine() as baseline, SimEngine(*TREE, "--sim-meta-steps", "0.5") as canary:
        pairs = await runner(session, baseline, canary).run(3)
        assert all(p.baseline.error is None for p in pairs)
        assert all("contradict its answers" in (p.canary.error or "") for p in pairs)
    with SimEngine() as baseline, SimEngine(*TREE, "--sim-no-metrics", "1") as canary:
        pairs = await runner(session, baseline, canary).run(3)
        assert all(p.canary.error is None for p in pairs)
