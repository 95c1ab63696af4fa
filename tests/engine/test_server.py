"""The HTTP server as the operator starts it, with the patch series in place, and what it says when it must not
start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ddtree_operator.analysis import Pair
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import ApplyEngines
from ddtree_operator.probe import PairRunner, shipped_prompts
from ddtree_operator.probe.live import LiveTraffic, Wish
from ddtree_operator.rollout.manifests import EngineDefaults, engines
from engine.fleet import TIMEOUT, Fleet, Scenario, environment, greedy, models, python, shadow
from sglang_ddtree import live

pytestmark = pytest.mark.engine
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


def command(*flags: str) -> list[str]:
    folder = models("tiny")
    return [
        python(), "-m", "sglang.launch_server", "--model-path", str(folder / "target"), "--host", "127.0.0.1",
        "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(folder / "drafter"), *flags,
    ]  # fmt: skip


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine looks for the token of live prompts: no file yet."""
    return tmp_path_factory.mktemp("live") / "token"


Served = tuple[str, "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, token: Path) -> Iterator[Served]:
    """An engine: its address, and the process that a pod would have as its first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command("--port", str(port), "--enable-metrics", "--speculative-ddtree-budget", "15"),
            env=environment({"PYTHONPATH": shadow("patches/sglang-0.5.23"), live.TOKEN_ENV: str(token)}),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + TIMEOUT
        while True:
            assert process.poll() is None, Path(log).read_text()[-4000:]
            assert time.monotonic() < deadline, Path(log).read_text()[-4000:]
            try:
                if fetch(f"{url}/health")[0] == 200:
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)  # nothing listens yet
        yield url, process
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(served: Served) -> str:
    """Its address."""
    return served[0]


def test_generate_and_counters(server: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    status, answer = fetch(f"{server}/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200
    assert answer["output_ids"] == greedy("tiny", [PROMPT], 40)[0]
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == 40
    steps, drafts = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    assert 0 < steps < 40
    assert 39 <= steps + drafts <= 39 + 7  # the last step may overshoot
    assert sum(meta["spec_correct_drafts_histogram"]) == steps
    # the series: a tree of depth 7 proposes 7 drafts a step, whatever its nodes
    assert meta["spec_num_proposed_drafts"] == 7 * steps


GREEDY = {"temperature": 0, "max_new_tokens": 8}
FAR = 5_000_000  # no token of any model
# requests that end a stock engine, and what is said of them
DEADLY: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"input_ids": [40, FAR]}, f"token id {FAR} at position 1 of the prompt is not in the model's vocabulary"),
    "below": ({"input_ids": [-1, 40]}, "token id -1 at position 0 of the prompt"),
    "stop": ({"sampling_params": GREEDY | {"stop_token_ids": [FAR], "min_new_tokens": 2}}, f"{FAR} in stop_token_ids"),
    "huge": ({"sampling_params": {"logit_bias": {"5": 1e300}}}, "the bias of token 5 in logit_bias is 1e+300"),
    "best": ({"return_logprob": True, "top_logprobs_num": FAR}, f"top_logprobs_num is {FAR}"),
    "start": ({"return_logprob": True, "logprob_start_len": -7}, "logprob_start_len is -7"),
    # by HTTP, SGLang's parser of requests says it first
    "bias": ({"sampling_params": GREEDY | {"logit_bias": {"5": "x"}}}, "the bias of token 5 in logit_bias is 'x'"),
    "flag": ({"sampling_params": GREEDY | {"skip_special_tokens": "x"}}, "skip_special_tokens is 'x'"),
    "float": ({"sampling_params": GREEDY | {"max_new_tokens": 2.0}}, "max_new_tokens is 2.0"),
}
TYPED = ("bias", "flag", "float")
BATCHES = {
    "one": ({"input_ids": [PROMPT, [40, FAR]]}, f"token id {FAR} at position 1 of the prompt"),
    "empty": ({"input_ids": [PROMPT, []]}, "the prompt is empty"),
}


def test_a_bad_request_gets_400_and_costs_nobody_else_theirs(served: Served) -> None:
    """All of them while another request runs; it and one after them have the right text."""
    url, process = served
    begun = threading.Event()
    with ThreadPoolExecutor() as clients:
        other = clients.submit(stream, url, 800, begun)
        assert begun.wait(TIMEOUT)
        for name, (body, sentence) in (DEADLY | BATCHES).items():
            status, answer = fetch(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": GREEDY} | body)
            assert status == 400, (name, answer)
            assert sentence in answer or name in TYPED, (name, answer)
        body = {"model": "x", "prompt": [40, FAR], "max_tokens": 4, "stream": True}
        assert fetch(f"{url}/v1/completions", body)[0] == 400
        assert not other.done(), "nothing ran beside them"
        assert process.poll() is None
        text = other.result()
    assert len(text) == 800
    _, after = fetch(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 40}})
    assert after["output_ids"] == text[:40] == greedy("tiny", [PROMPT], 40)[0]


def test_text_and_chat(server: str) -> None:
    status, answer = fetch(
        f"{server}/generate", {"text": "Grüße, 世界! 🎉\n", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    )
    assert status == 200
    assert isinstance(answer["text"], str)
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0.7}
    status, answer = fetch(f"{server}/v1/chat/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] >= 1


def prompts(server: str, given: str) -> tuple[int, Any]:
    """The engine's answer to a request for users' prompts."""
    headers = {"content-type": "application/json", live.TOKEN_HEADER: given}
    request = urllib.request.Request(f"{server}{live.PATH}", b'{"longest": 100}', headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_users_prompts_by_opt_in_only(server: str, token: Path) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}

    def user(**body: Any) -> None:
        assert fetch(f"{server}/generate", {**body, "sampling_params": params})[0] == 200
        time.sleep(live.EVERY)  # no more are kept in a second

    word = "a-token-of-some-length"
    assert prompts(server, word)[0] == 404
    token.write_text(word)
    assert prompts(server, "another")[0] == 401
    user(input_ids=[50, 51])  # before anybody asked
    assert prompts(server, word) == (200, {"prompts": [], "skipped": {"long": 0, "other": 0}, "lease": live.LEASE})
    user(input_ids=PROMPT)
    user(input_ids=[60, 61], rid=f"{live.OWN}1")
    user(input_ids=[40] * 101)
    user(text="hi")
    assert fetch(f"{server}/health")[0] == 200
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert fetch(f"{server}/v1/chat/completions", body)[0] == 200
    time.sleep(live.EVERY)
    status, answer = prompts(server, word)
    assert status == 200
    assert answer["skipped"] == {"long": 1, "other": 0}
    first, text, chat = answer["prompts"]
    assert first == PROMPT
    assert text == fetch(f"{server}/tokenize", {"prompt": "hi"})[1]["tokens"]
    assert len(chat) > len(text)  # with the chat template
    assert prompts(server, word)[1]["prompts"] == []
    pairs = asyncio.run(pairs_of_users(server, word, lambda: user(input_ids=PROMPT)))
    assert [(p.baseline.prompt_id, p.baseline.error, p.canary.error) for p in pairs] == [("live-1", None, None)]
    assert set(pairs[0].canary.output_ids) == {0}
    token.unlink()
    assert prompts(server, word)[0] == 404


async def pairs_of_users(server: str, word: str, user: Callable[[], None]) -> list[Pair]:
    """As the operator makes them, with this engine on both sides: counters must agree."""
    async with aiohttp.ClientSession() as session:
        traffic = LiveTraffic(session, [server], Wish(word, 100, wait=True))
        runner = PairRunner(session, [server], [server], shipped_prompts("tiny"), 1, 1, 8, live=traffic)
        assert await runner.run(1) == []
        await asyncio.to_thread(user)
        return await runner.run(1)


def test_logprobs_of_the_greedy_text(server: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    _, answer = fetch(f"{server}/generate", body)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0][1] == token
        assert value == pytest.approx(top[0][0], abs=1e-5)
        assert top[0][0] >= top[1][0]


def test_server_info_and_metrics(server: str) -> None:
    _, info = fetch(f"{server}/server_info")
    assert info["speculative_ddtree_budget"] == 15
    assert info["speculative_num_draft_tokens"] == 16
    _, text = fetch(f"{server}/metrics")
    calls = [line for line in text.splitlines() if line.startswith("sglang:spec_verify_calls_total")]
    assert calls
    assert float(calls[0].split()[-1]) > 0
    ours = {}
    for line in text.splitlines():
        if line.startswith("ddtree:"):
            name, value = line.split("{")[0].split()[0], float(line.split()[-1])
            ours[name] = ours.get(name, 0.0) + value
    assert ours["ddtree:accepted_drafts_count"] > 0
    assert ours["ddtree:tree_nodes_total"] == 15 * ours["ddtree:tree_steps_total"]
    # what the drafter expects and what comes are of one size; far apart would mean a wrong mask or wrong positions
    predicted = ours["ddtree:predicted_drafts_total"] / ours["ddtree:tree_steps_total"]
    assert 0.3 < predicted < 7
    depth, leaves = (
        ours[f"ddtree:tree_{name}_total"] / ours["ddtree:tree_steps_total"] for name in ("depth", "leaves")
    )
    assert 2 < depth <= 7
    assert 1 < leaves < 15
    for name in ("predicted_drafts", "tree_nodes"):
        assert ours[f"ddtree:{name}_by_depth_total"] == pytest.approx(ours[f"ddtree:{name}_total"])
    # every accepted draft once at its depth, and once in SGLang's own count of the step
    assert ours["ddtree:accepted_drafts_by_depth_total"] == ours["ddtree:accepted_drafts_sum"]
    assert ours["ddtree:accepted_drafts_count"] == ours["ddtree:tree_steps_total"]
    assert ours["ddtree:step_seconds_count"] > 0


def stream(url: str, tokens: int, begun: threading.Event) -> list[int]:
    """The tokens of a streamed answer that came to its end; [] of one that was cut off."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": params, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
    ids: list[int] = []
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return ids
            if data:
                ids = json.loads(data)["output_ids"]
                begun.set()
    return []


def pod() -> dict[str, Any]:
    """An engine's pod, as the operator makes it."""
    spec = DDTreeSpec.model_validate({"model": {"path": "/t"}, "drafter": {"path": "/d"}})
    action = ApplyEngines("m-0", "0", baseline=False, replicas=1, image="i", spec={}, grace=30)
    meta = {"name": "m", "namespace": "n", "uid": "u"}
    resource = {"apiVersion": "v1", "kind": "DDTreeDeployment", "metadata": meta}
    made: dict[str, Any] = engines(action, spec, resource, EngineDefaults(), None)["spec"]["template"]["spec"]
    return made


def test_what_is_under_way_ends_when_the_pod_is_deleted(served: Served) -> None:
    """The last one of this engine: it gets what the kubelet would give it."""
    url, process = served
    given = pod()
    deadline = time.monotonic() + given["terminationGracePeriodSeconds"]
    with ThreadPoolExecutor() as clients:
        held = [clients.submit(stream, url, 1200, threading.Event()) for _ in range(2)]
        subprocess.run(given["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], check=True)
        begun = threading.Event()
        held.append(clients.submit(stream, url, 800, begun))
        assert begun.wait(TIMEOUT)
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        late = clients.submit(stream, url, 8, threading.Event())  # of a client that keeps its connection
        while fetch(f"{url}/health")[0] != 503:
            assert process.poll() is None
        whole, again, last = (h.result() for h in held)
        print(f"streams went on for {time.monotonic() - sent:.1f} s after SIGTERM")
        assert process.wait(max(0.1, deadline - time.monotonic())) == 0
        print(f"it ended {time.monotonic() - sent:.1f} s after SIGTERM, {deadline - time.monotonic():.0f} s to spare")
    assert len(whole) == 1200
    assert again == whole
    assert last == whole[:800]
    assert late.result() == whole[:8]


BASE = ("--model-path", "@tiny/target", "--speculative-draft-model-path", "@tiny/drafter", "--speculative-algorithm")
REFUSED = {
    "not a number": (("DDTREE", "--speculative-ddtree-budget", "wide"), "budget must be a whole number from 1 to 255"),
    "backend": (("DDTREE", "--attention-backend", "triton"), "--attention-backend triton has no tree mask"),
    "pipeline": (("DDTREE", "--pp-size", "2"), "does not work with pipeline parallelism"),
    "two sizes": (("DDTREE", "--speculative-num-draft-tokens", "16"), "remove --speculative-num-draft-tokens"),
    "no drafter": (("DDTREE", "--speculative-draft-model-path", "/nowhere"), "the drafter's config at '/nowhere'"),
    "no tree": (("DFLASH", "--speculative-ddtree-budget", "7"), "needs --speculative-algorithm DDTREE"),
}
SCENARIOS = {
    name: Scenario.make(f"refused-{name}", {"flags": (*BASE, *flags)}, []) for name, (flags, _) in REFUSED.items()
}


def bad_requests(algorithm: str, bodies: list[dict[str, Any]]) -> Scenario:
    """An engine of one's own, and a sound request beside bad ones, which come a little later."""
    pair = {"model_path": "@tiny/target", "speculative_draft_model_path": "@tiny/drafter"}
    bad = [
        {
            "ids": body.get("input_ids", PROMPT),
            "params": body.get("sampling_params", GREEDY),
            "more": {k: v for k, v in body.items() if k not in ("input_ids", "sampling_params")},
            "delay": 0.2,
        }
        for body in bodies
    ]
    sound = {"ids": PROMPT, "params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    name = f"bad-requests-{algorithm}"
    return Scenario.make(name, pair | {"speculative_algorithm": algorithm}, [{"requests": [sound, *bad]}])


BAD = bad_requests("DDTREE", [body for body, _ in DEADLY.values()])
STOCK = bad_requests("DFLASH", [DEADLY["token"][0]])


@pytest.mark.parametrize("scenario", [BAD], ids=["python"])
def test_the_same_from_python(fleet: Fleet, scenario: Scenario) -> None:
    outcome = fleet.outcome(scenario)
    assert outcome.answers is not None, outcome.log[-3000:]
    sound, *bad = outcome.answers["rounds"][0]
    assert sound["ids"] == greedy("tiny", [PROMPT], 40)[0]
    for (_, sentence), answer in zip(DEADLY.values(), bad, strict=True):
        assert sentence in answer.get("error", ""), answer


@pytest.mark.parametrize("scenario", [STOCK], ids=["stock"])
def test_without_ddtree_nothing_changes_and_such_a_token_ends_the_engine(fleet: Fleet, scenario: Scenario) -> None:
    """The other side: that request is deadly, and the plugin keeps to engines that ask for DDTREE. If this fails,
    SGLang has mended it."""
    outcome = fleet.outcome(scenario)
    assert outcome.answers is None
    assert "IndexError: index out of range in self" in outcome.log, outcome.log[-3000:]
    assert "Scheduler hit an exception" in outcome.log


@pytest.mark.parametrize(("name", "scenario"), SCENARIOS.items(), ids=SCENARIOS)
def test_refusals_are_one_line_and_a_status(fleet: Fleet, name: str, scenario: Scenario) -> None:
    outcome = fleet.outcome(scenario)
    assert REFUSED[name][1] in outcome.refusal(), outcome.log[-3000:]
    assert outcome.log.count("ddtree: refused: ") == 1
    assert "Traceback" not in outcome.log
    assert outcome.status == 1


def test_a_refusal_by_the_real_command() -> None:
    done = subprocess.run(
        command("--speculative-ddtree-budget", "300"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ddtree: refused: ")]
    assert lines == ["ddtree: refused: --speculative-ddtree-budget must be from 1 to 255, not 300"], done.stderr[-3000:]
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
