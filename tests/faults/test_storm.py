"""Ten thousand notifications over HTTP: forged, repeated, reordered, oversized, truncated, resolved, and true ones."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ddtree_operator.alerts.guards import Tokens
from ddtree_operator.alerts.receiver import Limits, Receiver
from faults.sim import NAME, NS, Sim
from faults.test_crashes import promotion
from unit.alert_bodies import TOKEN, alert, notification

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

COUNT = 10_000
GOAL = 0.050  # seconds: the 99th percentile of an answer


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def draw(rng: random.Random, sim: Sim, hashes: list[str], guilty: str) -> tuple[bytes, str | None, bool]:
    """A body, a token, and whether it truly asks for the rollback of the guilty revision."""
    labels = {"namespace": NS, "ddtreedeployment": NAME, "revision": rng.choice(hashes)}
    began = stamp(sim.now - rng.choice([0, 0, 1, 40, 10_000]))
    one = alert(fingerprint=f"{rng.randrange(6):x}", starts=began, **labels)
    token: str | None = TOKEN
    match rng.randrange(12):
        case 0:
            token = rng.choice([None, "", "x" * 40, TOKEN[:-1]])
        case 1:
            one["status"] = "resolved"
        case 2:
            one["labels"] |= rng.choice([{"namespace": "kube-system"}, {"ddtreedeployment": "../m"}, {"revision": "7"}])
        case 3:
            body = notification(one)
            return body[: rng.randrange(len(body))], token, False
        case 4 if rng.random() < 0.1:
            return notification(one, filler="x" * (1 << 20)), token, False
        case 5:
            return (
                notification(*[one] * rng.randint(2, 30), truncatedAlerts=rng.randrange(50)),
                token,
                _true(one, token, guilty),
            )
        case 6:
            return notification(one, version=rng.choice(["3", 4, None])), token, False
    return notification(one), token, _true(one, token, guilty)


def _true(one: dict[str, Any], token: str | None, guilty: str) -> bool:
    return token == TOKEN and one["status"] == "firing" and one["labels"]["revision"] == guilty


def test_a_storm_ends_in_one_rollback_of_the_right_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    rng = random.Random(11)
    sim = Sim(monkeypatch)
    taken: list[float] = []
    codes: dict[int, int] = {}

    async def storm() -> str:
        await promotion(sim)
        await sim.run(30)
        guilty = sim.serves()
        hashes = [*sim.revisions(), "0123456789"]
        innocent = next(h for h in sim.revisions() if h != guilty)
        receiver = Receiver(
            Tokens(file), frozenset({NS}), sim.recorder.store, Limits(1e6, 1e6, 1e6, 1e6), lambda code, _: None
        )
        runner = await receiver.start("127.0.0.1", 0)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/alerts"
        truly = False
        async with aiohttp.ClientSession() as session:
            for number in range(COUNT):
                among = hashes if number > COUNT // 2 else [h for h in hashes if h != guilty]
                body, token, true = draw(rng, sim, among, guilty)
                truly = truly or true
                headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
                began = time.perf_counter()
                async with session.post(url, data=io.BytesIO(body), headers=headers) as answer:
                    await answer.read()
                    codes[answer.status] = codes.get(answer.status, 0) + 1
                taken.append(time.perf_counter() - began)
                if number == COUNT // 2:
                    assert sim.serves() == guilty  # none of the first half was about it
                if number % 50 == 0:
                    await sim.look()
                    sim.advance(1)
        await runner.cleanup()
        assert truly
        await sim.run(60)
        assert sim.serves() == innocent
        return guilty

    guilty = asyncio.run(storm())
    results = {h: s["result"] for h, s in sim.revisions().items()}
    assert results == {h: "rolledBack" if h == guilty else "promoted" for h in results}
    outcomes = {h: [a["outcome"] for a in s.get("alarms", [])] for h, s in sim.revisions().items()}
    assert outcomes[guilty].count("rolledBack") == 1
    assert all(set(o) <= {"ignored"} for h, o in outcomes.items() if h != guilty)
    assert [e["reason"] for e in sim.server.events].count("Restored") == 1
    assert not sim.outages
    assert len(json.dumps(sim.status)) < 64_000
    assert set(codes) == {200, 400, 401, 403, 413}
    p99 = sorted(taken)[int(len(taken) * 0.99)]
    print(f"{COUNT} notifications, {codes}, p99 {p99 * 1000:.1f} ms")
    assert p99 < GOAL
