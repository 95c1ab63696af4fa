"""The simulated engine over real sockets: it speaks as SGLang does, and plays its script."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from simengine.process import SimEngine
from simengine.wheel import build

pytestmark = pytest.mark.unit

SIM = Path(__file__).parents[1] / "simengine"


def call(url: str, body: object = None, timeout: float = 60) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def generate(engine: SimEngine, text: str = "hello", n: int = 32, **more) -> dict:
    status, answer = call(
        engine.url + "/generate", {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": n}, **more}
    )
    assert status == 200, answer
    return json.loads(answer)


def test_endpoints_speak_sglang():
    with SimEngine("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "24") as engine:
        assert call(engine.url + "/health")[0] == 200
        answer = generate(engine)
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"])
        assert meta["completion_tokens"] <= meta["spec_verify_ct"] + meta["spec_num_correct_drafts"] + 1
        info = json.loads(call(engine.url + "/server_info")[1])
        assert "--speculative-algorithm DDTREE" in info["launch_command"]
        assert info["speculative_num_draft_tokens"] == 25
        assert info["simulated"] is True
        text = call(engine.url + "/metrics")[1]
        assert f'sglang:spec_verify_calls_total{{model_name="sim/model"}} {float(meta["spec_verify_ct"])}' in text
        assert call(engine.url + "/nothing")[0] == 404
        assert call(engine.url + "/generate", {"sampling_params": {}})[0] == 400
        assert engine.stop() == 0


def test_two_engines_agree_and_accept_length_is_played():
    with SimEngine() as chain, SimEngine("--speculative-algorithm", "DDTREE") as tree:
        totals = {chain: [0, 0], tree: [0, 0]}
        for i in range(20):
            answers = {e: generate(e, f"prompt {i}", 64) for e in totals}
            assert answers[chain]["output_ids"] == answers[tree]["output_ids"]
            assert answers[chain]["text"] == answers[tree]["text"]
            for e, answer in answers.items():
                totals[e][0] += answer["meta_info"]["spec_num_correct_drafts"]
                totals[e][1] += answer["meta_info"]["spec_verify_ct"]
        lengths = [d / s + 1 for d, s in totals.values()]
        assert lengths[0] == pytest.approx(2.11, rel=0.12)
        assert lengths[1] == pytest.approx(2.65, rel=0.12)


def test_ids_continue_the_text():
    with SimEngine("--speculative-algorithm", "NONE") as engine:
        whole = generate(engine, n=20)
        assert "spec_verify_ct" not in whole["meta_info"]
        ids = json.loads(call(engine.url + "/tokenize", {"prompt": "hello"})[1])["tokens"]
        body = {
            "input_ids": ids + whole["output_ids"][:7],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        step = json.loads(call(engine.url + "/generate", body)[1])
        assert step["output_ids"] == whole["output_ids"][7:8]
        (best, second) = step["meta_info"]["output_top_logprobs"][0]
        assert best[0] >= second[0]


def test_metrics_need_the_flag():
    command = ["--model-path", "m"]
    from simengine.process import _HERE

    code = "import sys; from sglang.sim.script import parse; print(parse(sys.argv[1:])[0].enable_metrics)"
    out = subprocess.run(
        [sys.executable, "-c", code, *command],
        env={"PYTHONPATH": str(_HERE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["--sim-refuse", "page size must be 1"], {}, "exit 1: ddtree: refused: page size must be 1"),
        ([], {"SIM_CRASH_AT_START": "out of memory"}, "RuntimeError: out of memory"),
        (["--model-path", "/no/such/model"], {}, "/no/such/model"),
        (["--model-path", "acme/missing-model"], {}, "acme/missing-model is not a local folder"),
        (["--speculative-draft-model-path", "/no/drafter"], {}, "/no/drafter"),
    ],
)
def test_start_errors(flags, env, says):
    with pytest.raises(RuntimeError) as e:
        SimEngine(*flags, env=env)
    assert says in str(e.value)
    assert str(e.value).startswith("exit 1")


def test_faults_differ_after_the_first_token():
    with SimEngine() as good, SimEngine("--sim-fault-every", "10") as bad:
        a, b = generate(good, "a fault", 30)["output_ids"], generate(bad, "a fault", 30)["output_ids"]
        assert a[:9] == b[:9]
        assert a[9] != b[9]
        assert generate(good, "a fault", 1)["output_ids"] == generate(bad, "a fault", 1)["output_ids"]


def test_misfit_drafter():
    with SimEngine("--speculative-draft-model-path", "sim/drafter-misfit") as engine:
        meta = generate(engine, n=64)["meta_info"]
        assert meta["spec_num_correct_drafts"] / meta["spec_verify_ct"] < 0.2


def test_broken_answers_on_schedule():
    with SimEngine("--sim-html-every", "2", "--sim-error-every", "3") as engine:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
        answers = [call(engine.url + "/generate", body) for _ in range(3)]
        assert answers[0][0] == 200
        assert answers[1][1].startswith("<html>")
        assert answers[2][0] == 500


def test_crash_after_some_requests():
    with SimEngine("--sim-crash-after", "2") as engine:
        generate(engine)
        generate(engine)
        with pytest.raises(OSError):
            call(engine.url + "/generate", {"text": "x", "sampling_params": {}})
        assert engine.wait() == 1


def test_sigterm_drains():
    with SimEngine("--sim-step-delay", "0.05") as engine:
        result: list[dict] = []
        thread = threading.Thread(target=lambda: result.append(generate(engine, "slow", 64)))
        thread.start()
        deadline = time.monotonic() + 30
        while 'num_running_reqs{model_name="sim/model"} 1.0' not in call(engine.url + "/metrics")[1]:
            assert time.monotonic() < deadline
        assert engine.stop() == 0
        thread.join(30)
        assert result
        assert len(result[0]["output_ids"]) > 1


def test_wheel_is_reproducible_and_runs(tmp_path):
    path, digest = build(tmp_path / "a")
    again, same = build(tmp_path / "b")
    assert path.name == "sglang-0.5.23-py3-none-any.whl"
    assert digest == same == hashlib.sha256(again.read_bytes()).hexdigest()
    out = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "/nope"],
        env={"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.returncode == 1
    assert "/nope" in out.stderr


def test_profile_can_be_patched(tmp_path):
    import shutil

    shutil.copytree(SIM / "sglang", tmp_path / "sglang")
    profile = tmp_path / "sglang" / "srt" / "sim_profile.py"
    profile.write_text(profile.read_text().replace('MASK = "tree"', 'MASK = "causal"'))
    flags = ["--model-path", "m", "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "d"]
    out = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *flags],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.returncode == 1
    assert out.stderr.startswith("ddtree: refused: self-check failed")


def test_a_streamed_answer_is_the_same_text_and_is_finished_after_sigterm():
    with SimEngine("--sim-stream-delay", "30") as engine:
        whole = generate(engine, "a story", 40)
        body = {"text": "a story", "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
        request = urllib.request.Request(engine.url + "/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            engine.process.send_signal(signal.SIGTERM)
            while call(engine.url + "/health")[0] != 503:
                time.sleep(0.01)
            assert call(engine.url + "/sim", {"stream_delay": 0.0001})[0] == 200
            events = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n\n") if line]
        assert events[-1] == b"[DONE]"
        last = json.loads(events[-2])
        assert (last["text"], last["meta_info"]["completion_tokens"]) == (whole["text"], 40)
        assert len(events) > 5
        assert engine.wait() == 0
