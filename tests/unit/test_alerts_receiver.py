"""The webhook over loopback: who is let in, what is recorded, and what Alertmanager is told."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from ddtree_operator.alerts import receiver as module
from ddtree_operator.alerts.guards import Bucket, Tokens
from ddtree_operator.alerts.receiver import Limits, Receiver
from ddtree_operator.handlers import alerting
from ddtree_operator.handlers.alerting import Recorder
from ddtree_operator.handlers.kube import ApiError
from ddtree_operator.handlers.operator import read_certificate, server_tls
from unit.alert_bodies import REVISION, TOKEN, Revisions, alert, notification

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]


@dataclass
class Bench:
    """A receiver with its store, and a client."""

    api: Revisions
    url: str
    session: aiohttp.ClientSession
    woken: list[tuple[str, str]]
    codes: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when something was recorded

    async def post(self, body: bytes, token: str | None = TOKEN, kind: str = "application/json") -> tuple[int, Any]:
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {token}"} if token is not None else {})
        async with self.session.post(self.url, data=io.BytesIO(body), headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text


@asynccontextmanager
async def bench(tmp_path: Path, limits: Limits | None = None) -> AsyncIterator[Bench]:
    file = tmp_path / "token"
    if not file.exists():
        file.write_text(f"{TOKEN}\n")
    api, woken = Revisions(), []
    api.put("llm", "m", REVISION)
    codes: list[int] = []
    news = asyncio.Event()

    def wake(namespace: str, name: str) -> None:
        woken.append((namespace, name))
        news.set()

    recorder = Recorder(api, wake)  # type: ignore[arg-type]
    made = Receiver(
        Tokens(file), frozenset({"llm"}), recorder.store, limits or Limits(), lambda code, _: codes.append(code)
    )
    runner = await made.start("127.0.0.1", 0)
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        yield Bench(api, f"http://127.0.0.1:{port}/alerts", session, woken, codes, news)
    await runner.cleanup()


@pytest_asyncio.fixture
async def it(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench(tmp_path) as made:
        yield made


async def test_a_firing_alert_is_recorded_on_its_revision_and_wakes_the_operator(it: Bench) -> None:
    code, answer = await it.post(notification(alert(severity="critical")))
    assert (code, answer) == (200, {"results": [{"fingerprint": "9f2c", "result": "recorded"}], "truncatedAlerts": 0})
    [row] = it.api.recorded()
    assert row["name"] == "DDTreeAcceptLengthLow"
    assert row["labels"]["severity"] == "critical"
    assert row["summary"] == "accept length 1.4 instead of 2.5"
    assert it.woken == [("llm", "m")]
    assert it.codes == [200]


async def test_repeats_and_resolved_write_nothing(it: Bench) -> None:
    for _ in range(3):
        await it.post(notification(alert()))
    code, answer = await it.post(notification(alert(status="resolved")))
    assert code == 200
    assert answer["results"][0]["result"] == "resolved"
    assert it.api.writes == 1
    assert it.woken == [("llm", "m")]


async def test_one_notification_with_the_same_alert_twice_and_another(it: Bench) -> None:
    _, answer = await it.post(notification(alert(), alert(), alert(fingerprint="77")))
    assert [r["result"] for r in answer["results"]] == ["recorded"] * 3
    assert len(it.api.recorded()) == 2
    assert it.api.writes == 1


async def test_an_alert_that_comes_back_later_is_another_one(it: Bench) -> None:
    await it.post(notification(alert()))
    await it.post(notification(alert(starts="2026-11-30T09:00:00Z")))
    assert len(it.api.recorded()) == 2


@pytest.mark.parametrize("result", ["rolledBack", "aborted", "undone"])
async def test_about_a_revision_that_was_rolled_back_nothing_is_written(it: Bench, result: str) -> None:
    it.api.put("llm", "m", REVISION, {"result": result})
    _, answer = await it.post(notification(alert()))
    assert answer["results"][0]["result"] == "ignored"
    assert f"is {result} already" in answer["results"][0]["why"]
    assert it.api.writes == 0


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é" * 20])
async def test_forged_notifications_are_refused_unread(it: Bench, token: str | None) -> None:
    code, _ = await it.post(notification(alert()), token=token)
    assert code == 401
    assert it.api.writes == 0


async def test_another_scheme_is_no_bearer_token(it: Bench) -> None:
    headers = {"Authorization": f"Basic {TOKEN}", "Content-Type": "application/json"}
    async with it.session.post(it.url, data=notification(alert()), headers=headers) as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"version": "4", "alerts": NaN}', 400, "not JSON"),
        (b"[]", 400, 'version "4"'),
        (notification(version="3"), 400, 'version "4"'),
        (notification(alerts={}), 400, "not a list"),
        (notification(alerts=["x"]), 400, "not a list"),
        (notification(truncatedAlerts=-1), 400, "truncatedAlerts"),
        (notification(*[alert()] * 501), 400, "max_alerts"),
        (notification(alert(ddtreedeployment="../prod")), 400, "not the name of a DDTreeDeployment"),
        (notification(alert(namespace="a/b")), 400, "not the name of a namespace"),
        (notification(alert(revision="7")), 400, "not a revision's hash"),
        (notification(alert(revision="")), 400, "no label revision"),
        (notification(alert(starts="soon")), 400, "startsAt"),
        (notification(alert(starts="2026-11-30T01:00:00")), 400, "startsAt"),
        (notification(alert(fingerprint="")), 400, "fingerprint"),
        (notification(alert(status="maybe")), 400, "neither firing nor resolved"),
        (notification(alert() | {"labels": {"namespace": 1}}), 400, "labels"),
        (notification(alert(namespace="kube-system")), 403, "not watched"),
    ],
)
async def test_what_is_no_notification_is_refused_in_words(it: Bench, body: bytes, code: int, words: str) -> None:
    status, answer = await it.post(body)
    assert status == code
    assert words in (answer if isinstance(answer, str) else answer["results"][0]["why"])
    assert it.api.writes == 0


async def test_other_types_and_large_bodies_are_refused(it: Bench) -> None:
    assert (await it.post(notification(alert()), kind="text/plain"))[0] == 415
    assert (await it.post(notification(alert(), x="x" * (1 << 20))))[0] == 413
    assert it.api.writes == 0


async def test_a_body_that_breaks_off_records_nothing(it: Bench) -> None:
    host, port = it.url.removeprefix("http://").removesuffix("/alerts").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /alerts HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    body = notification(alert())
    writer.write(f"{head}Content-Length: {len(body) + 9}\r\n\r\n".encode() + body)
    writer.write_eof()
    await reader.read()
    writer.close()
    assert it.api.writes == 0
    assert (await it.post(notification(alert())))[0] == 200


async def test_a_mixed_notification_is_dealt_with_one_by_one(it: Bench) -> None:
    body = notification(
        alert(), alert(namespace="x"), alert(revision="?"), alert(revision="f" * 10), truncatedAlerts=12
    )
    code, answer = await it.post(body)
    assert code == 200
    assert [r["result"] for r in answer["results"]] == ["recorded", "forbidden", "malformed", "ignored"]
    assert answer["truncatedAlerts"] == 12


async def test_a_foreign_object_of_that_name_is_left_alone(it: Bench) -> None:
    it.api.put("llm", "m", REVISION)
    it.api.objects["llm", f"m-{REVISION}"]["metadata"]["labels"]["ddtree.dev/deployment"] = "other"
    _, answer = await it.post(notification(alert()))
    assert answer["results"][0]["result"] == "ignored"
    assert it.api.writes == 0


def broken(status: int, *verbs: str, times: int = 1000) -> Callable[[str, str], ApiError | None]:
    left = [times]

    def fail(verb: str, name: str) -> ApiError | None:
        if verb not in verbs or left[0] <= 0:
            return None
        left[0] -= 1
        return ApiError(status, "after" if status == 0 and verb == "patch" else "no")

    return fail


@pytest.mark.parametrize("status", [0, 403, 429, 500, 503])
async def test_5xx_when_nothing_could_be_recorded_and_the_repeat_is_recorded(
    it: Bench, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(alerting, "PAUSES", (0.0, 0.0))
    it.api.fail = broken(status, "get")
    assert (await it.post(notification(alert())))[0] == 503
    assert it.api.writes == 0
    it.api.fail = broken(status, "get", times=2)
    assert (await it.post(notification(alert())))[0] == 200
    assert len(it.api.recorded()) == 1


async def test_a_write_that_timed_out_after_it_was_made_is_not_made_again(
    it: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "PAUSES", (0.0,))
    it.api.fail = broken(0, "patch", times=1)
    code, answer = await it.post(notification(alert()))
    assert (code, answer["results"][0]["result"]) == (200, "duplicate")
    assert it.api.writes == 1


async def test_of_two_writers_at_once_both_alerts_are_kept(it: Bench) -> None:
    bodies = [notification(alert(fingerprint=f"{i:x}")) for i in range(8)]
    answers = await asyncio.gather(*(it.post(b) for b in bodies))
    assert {code for code, _ in answers} == {200}
    assert len(it.api.recorded()) == 8


async def test_what_could_not_be_recorded_beside_what_was_is_tried_again_here(
    it: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 5xx now would make Alertmanager send what was recorded already."""
    monkeypatch.setattr(alerting, "PAUSES", ())
    monkeypatch.setattr(module, "LATER", (0.0, 0.0))
    it.api.put("llm", "n", REVISION)
    left = [2]

    def fail(verb: str, name: str) -> ApiError | None:
        if name.startswith("n-") and left[0]:
            left[0] -= 1
            return ApiError(500, "no")
        return None

    it.api.fail = fail
    it.news.clear()
    code, answer = await it.post(notification(alert(), alert(ddtreedeployment="n")))
    assert (code, [r["result"] for r in answer["results"]]) == (200, ["recorded", "later"])
    async with asyncio.timeout(10):
        while ("llm", "n") not in it.woken:
            it.news.clear()
            await it.news.wait()
    assert len(it.api.recorded("llm", f"n-{REVISION}")) == 1


async def test_a_flood_without_a_token_does_not_shut_out_whoever_has_one(tmp_path: Path) -> None:
    async with bench(tmp_path, Limits(failures_rate=0.0, failures_burst=3)) as it:
        codes = [(await it.post(notification(alert()), token="wrong"))[0] for _ in range(6)]
        assert codes == [401, 401, 401, 429, 429, 429]
        assert (await it.post(notification(alert())))[0] == 200


async def test_too_many_at_once_are_asked_to_come_again(tmp_path: Path) -> None:
    async with bench(tmp_path, Limits(rate=0.0, burst=2)) as it:
        assert [(await it.post(notification(alert())))[0] for _ in range(3)] == [200, 200, 503]


async def test_tokens_are_exchanged_without_a_restart_and_none_lets_nobody_in(tmp_path: Path) -> None:
    now = [0.0]
    file = tmp_path / "token"
    tokens = Tokens(file, clock=lambda: now[0])
    assert not tokens.usable()
    assert not tokens.accept("Bearer ")
    for text, good, bad in (
        ("old-token-old-token\nnew-token-new-token\n", ["old", "new"], ["not"]),
        ("new-token-new-token", ["new"], ["old"]),
        ("short\n\n", [], ["new"]),
    ):
        file.unlink(missing_ok=True)
        file.write_text(text)
        now[0] += 2
        assert [t for t in ("old", "new", "not") if tokens.accept(f"Bearer {t}-token-{t}-token")] == good, text
        assert not any(tokens.accept(f"Bearer {t}-token-{t}-token") for t in bad)
    assert not tokens.accept("Bearer short")
    assert not tokens.accept("Bearer ")


async def test_a_bucket_refills() -> None:
    now = [0.0]
    bucket = Bucket(2.0, 4.0, clock=lambda: now[0])
    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]
    now[0] = 1.0
    assert [bucket.take() for _ in range(3)] == [True, True, False]


async def test_tls_with_a_certificate_that_is_exchanged_while_it_runs(tmp_path: Path) -> None:
    """The same context serves the new certificate; without TLS, or with a stranger's, nobody gets through."""

    def certificate(name: str) -> ssl.SSLContext:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", tmp_path / "tls.key"]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-days", "1", *key, "-out", tmp_path / "tls.crt", *names]
        subprocess.run(command, check=True, capture_output=True)
        return ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))

    old = certificate("old")
    server = server_tls(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    api = Revisions()
    api.put("llm", "m", REVISION)
    recorder = Recorder(api, lambda *_: None)  # type: ignore[arg-type]
    made = Receiver(Tokens(tmp_path / "token"), frozenset({"llm"}), recorder.store)
    runner = await made.start("127.0.0.1", 0, server)
    url = f"https://127.0.0.1:{runner.addresses[0][1]}/alerts"

    async def code(trust: ssl.SSLContext) -> int:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=notification(alert()), headers=headers, ssl=trust) as answer,
        ):
            return answer.status

    assert await code(old) == 200
    new = certificate("new")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await code(new)
    read_certificate(server, tmp_path)
    assert await code(new) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await code(old)
    await runner.cleanup()
