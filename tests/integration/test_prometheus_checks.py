"""PromQL checks against a real Prometheus that scrapes a real target: one fresh number counts, nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from ddtree_operator.analysis import Policy, Prompt, Record, Verdict, record
from ddtree_operator.api.spec import AnalysisSpec, PrometheusCheck
from ddtree_operator.handlers.analyses import Analyses, Key, Running
from ddtree_operator.probe.prometheus import reading
from simengine.process import SimEngine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; the machine may be busy
KEY: Key = ("llm", "m", "8c1d2e3f40", 0, 1)


@dataclass
class Target:
    """What Prometheus scrapes: lines of text, changed by the tests."""

    lines: dict[str, str] = field(default_factory=dict)  # series -> value [timestamp]
    down: bool = False
    scrapes: int = 0
    url: str = ""

    async def serve(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        if self.down:
            return web.Response(status=503)
        return web.Response(text="".join(f"{name} {value}\n" for name, value in self.lines.items()))


@dataclass
class Setup:
    """A target and the Prometheus that scrapes it four times a second."""

    target: Target
    address: str
    process: subprocess.Popen[str]
    session: aiohttp.ClientSession

    def check(self, query: str, **more: Any) -> PrometheusCheck:
        given = {"name": "c", "address": self.address, "query": query, "min": 1.0, "interval": "1s", **more}
        return PrometheusCheck.model_validate(given)

    async def read(self, query: str, **more: Any) -> float | str:
        """A value, or the sentence of an error."""
        found = await reading(self.session, self.check(query, **more))
        return found.value if found.error is None else found.error

    async def until(self, look: Callable[[], Awaitable[object]], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not await look():
            assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
            await asyncio.sleep(0.1)

    async def reads(self, wanted: float | str, query: str, **more: Any) -> None:
        """Wait until a reading is this value, or an error with these words."""
        seen: list[float | str] = [""]

        async def look() -> bool:
            seen[0] = await self.read(query, **more)
            return wanted in seen[0] if isinstance(wanted, str) and isinstance(seen[0], str) else seen[0] == wanted

        await self.until(look, f"{query} reads {wanted!r}; it reads {seen[0]!r}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def prometheus(folder: Path, scraped: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The pinned Prometheus; its address and process."""
    made = subprocess.run([ROOT / "dev/cluster/build-binaries", "prometheus"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    config = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "scrape_configs": [{"job_name": "engine", "static_configs": [{"targets": [scraped]}]}],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as out:
        process = subprocess.Popen(
            [
                Path(made.stdout.strip()) / "prometheus",
                f"--config.file={folder / 'prometheus.json'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            yield f"http://{address}", process
        finally:
            process.kill()
            process.wait()


@pytest_asyncio.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    target = Target({'accept{rank="0"}': "3.9", "busy_total": "0"})
    app = web.Application()
    app.router.add_get("/metrics", target.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target.url = f"127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            with prometheus(tmp_path, target.url) as (address, process):
                made = Setup(target, address, process, session)
                await made.reads(3.9, "accept")
                yield made
    finally:
        await runner.cleanup()


@pytest.mark.asyncio
async def test_exactly_one_finite_series_or_an_error(setup: Setup) -> None:
    setup.target.lines |= {'accept{rank="1"}': "1.0", "broken": "NaN", "endless": "+Inf"}
    await setup.reads("2 series; aggregate it to exactly one", "accept")
    assert await setup.read("max(accept)") == 3.9
    assert await setup.read('accept{rank="1"}') == 1.0
    await setup.reads("the value is NaN", "broken")
    await setup.reads("the value is +Inf", "endless")
    for query, says in {
        "nobody_wrote_this": "0 series",
        "scalar(accept)": "a scalar, not a vector of one series",
        "accept[10s]": "a matrix, not a vector",
        '"text"': "a string, not a vector",
        "vector(0) / 0": "the value is NaN",
        "sum(accept": "answered 400",
        "accept / ": "answered 400",
    }.items():
        assert says in str(await setup.read(query)), query


@pytest.mark.asyncio
async def test_b3_a_target_that_is_gone_is_no_number(setup: Setup) -> None:
    setup.target.down = True
    await setup.reads("0 series", "accept")
    await setup.reads("0 series", "max(accept)")
    setup.target.down = False
    await setup.reads(3.9, "accept")


@pytest.mark.asyncio
async def test_b3_a_sample_older_than_max_age_is_no_number_even_inside_a_sum(setup: Setup) -> None:
    """With a time of its own a sample is never marked stale: it would answer for five minutes."""
    before = (time.time() - 90) * 1000
    setup.target.lines["pushed"] = f"7 {before:.0f}"
    await setup.reads(7.0, "pushed", maxAge="10m")
    assert await setup.read("sum(pushed)", maxAge="10m") == 7.0
    assert "0 series" in str(await setup.read("pushed", maxAge="1m"))
    assert "0 series" in str(await setup.read("sum(pushed)", maxAge="1m"))


@pytest.mark.asyncio
async def test_b4_a_gauge_that_froze_with_the_traffic_is_no_number(setup: Setup) -> None:
    """Scraped anew all the time, and yet an old value: only the counter beside it tells."""
    activity = "sum(rate(busy_total[2s]))"
    await setup.reads("activity is 0", "accept", activity=activity)
    assert await setup.read("accept") == 3.9
    count = 0

    async def busy() -> bool:
        nonlocal count
        count += 5
        setup.target.lines["busy_total"] = str(count)
        return await setup.read("accept", activity=activity) == 3.9

    await setup.until(busy, "the check reads while there is traffic")
    await setup.reads("activity is 0", "accept", activity=activity)
    assert "activity: the query gives 0 series" in str(await setup.read("accept", activity="nobody_wrote_this"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (web.Response(text="<html>log in</html>", content_type="text/html"), "not JSON: <html>log in</html>"),
        (web.Response(text=""), "not JSON: (empty)"),
        (web.Response(status=302, headers={"Location": "/login"}), "answered 302"),
        (web.Response(status=503, text="down for lunch"), "answered 503: down for lunch"),
        (web.json_response({"status": "error", "error": "too many samples"}), "too many samples"),
    ],
)
async def test_b2_whatever_stands_in_front_of_prometheus_is_not_taken_for_it(answer: web.Response, says: str) -> None:
    async def serve(_: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_get("/api/v1/query", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            found = await reading(session, PrometheusCheck(name="c", address=address, query="x", min=1))
        assert says in (found.error or "")
    finally:
        await runner.cleanup()


class Judged:
    """An analysis of two simulated engines, with checks at the real Prometheus."""

    def __init__(self, setup: Setup, checks: list[PrometheusCheck], engines: tuple[SimEngine, SimEngine]) -> None:
        self.engines, self.checks = engines, checks
        self.records: list[bytes] = []
        self.spec = AnalysisSpec(throughput={"nonInferiority": "90%"}, prometheus=checks, maxPairs=100000)
        self.analyses = Analyses(setup.session, self._save, lambda *_: None)

    async def _save(self, key: Key, run: Running, verdict: Verdict) -> str:
        checks = tuple(m for m in verdict.metrics if m.metric.startswith("prometheus/"))
        self.records.append(record.dump(Record(run.policy, tuple(run.pairs), verdict, checks)))
        return record.digest(self.records[-1])

    def begin(self) -> None:
        if not self.analyses.known(KEY):
            policy = Policy.from_spec(self.spec)
            self.analyses.adopt(KEY, policy, self.spec.max_pairs, self.checks, None)
        prompts = [Prompt(f"p{i}", "chat", f"Tell me about number {i}.") for i in range(40)]
        self.analyses.ensure(
            KEY,
            prompts=prompts,
            baseline_urls=[self.engines[0].url],
            canary_urls=[self.engines[1].url],
            seed=1,
            concurrency=1,
            max_tokens=16,
            checks=self.checks,
        )

    def now(self) -> Any:
        fact = self.analyses.fact(KEY)
        assert fact is not None
        return fact


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[SimEngine, SimEngine]]:
    tree = ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16")
    with SimEngine() as baseline, SimEngine(*tree) as canary:
        yield baseline, canary


@pytest.mark.asyncio
async def test_pairs_and_checks_decide_together(setup: Setup, engines: tuple[SimEngine, SimEngine]) -> None:
    judged = Judged(setup, [setup.check("accept", min=2.0)], engines)
    judged.begin()
    await setup.until(lambda: _true(judged.now().outcome != "notYet"), "a verdict")
    fact = judged.now()
    assert (fact.outcome, "prometheus/c: 3.9, 3 times in a row at least 2" in fact.reason) == ("pass", True)
    assert record.recompute(record.load(judged.records[-1])) == record.load(judged.records[-1]).verdict
    await judged.analyses.close()


@pytest.mark.asyncio
async def test_a_bad_number_three_times_fails_however_good_the_pairs_are(
    setup: Setup, engines: tuple[SimEngine, SimEngine]
) -> None:
    judged = Judged(setup, [setup.check("accept", min=5.0)], engines)
    judged.begin()
    await setup.until(lambda: _true(judged.now().outcome != "notYet"), "a verdict")
    assert judged.now().outcome == "fail"
    assert "prometheus/c: 3.9, 3 times in a row not at least 5" in judged.now().reason
    await judged.analyses.close()


@pytest.mark.asyncio
async def test_prometheus_that_goes_away_is_no_failure_and_ends_undecided(
    setup: Setup, engines: tuple[SimEngine, SimEngine]
) -> None:
    judged = Judged(setup, [setup.check("accept", min=2.0, errorLimit=4)], engines)
    setup.process.kill()
    setup.process.wait()
    judged.begin()
    await setup.until(lambda: _true(judged.now().exhausted), "the error limit")
    fact = judged.now()
    assert fact.outcome == "notYet"
    assert "prometheus/c: 4 errors in a row, the last: cannot connect to" in fact.exhausted
    assert fact.kept["digest"] == record.digest(judged.records[-1])
    await judged.analyses.close()


async def _true(value: object) -> object:
    return value
