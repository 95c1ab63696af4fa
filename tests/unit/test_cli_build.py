"""``build logs``: lines, progress, retries, and an exit code that a script may rely on."""

from __future__ import annotations

import io
from typing import Any

import pytest

from ddtreectl import __main__, kube
from ddtreectl.progress import Progress
from ddtreectl.verbs import logs as verb
from unit.ddt_fake import FakeCluster, resource

pytestmark = pytest.mark.unit

LOG = [
    "#1 [internal] load build definition from Dockerfile",
    "#5 [wheels 1/2] ADD --checksum=sha256:00 [http://w/sglang.whl, /wheels/sglang.whl]",
    "#9 [engine 4/7] RUN --network=none python3 -B /ddtree/finish.py",
    "#9 DONE 3.1s",
    "#12 exporting to image",
]


def job(name: str = "ddtree-build-1", condition: str = "") -> dict[str, Any]:
    found = [{"type": condition, "status": "True", "reason": "PodFailurePolicy"}] if condition else []
    return {"metadata": {"name": name}, "status": {"conditions": found, "succeeded": int(condition == "Complete")}}


def pod(name: str, code: int | None = None, message: str = "", phase: str = "Running") -> dict[str, Any]:
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "message": message}}
    return {
        "metadata": {"name": name, "creationTimestamp": name},
        "status": {"phase": phase, "containerStatuses": [{"name": "build", "state": state}]},
    }


def building(**build: Any) -> FakeCluster:
    return FakeCluster(resource(phase="Building", build=build) if build else resource(phase="Stable"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def go(line: str, cluster: FakeCluster) -> tuple[int, str, str]:
        monkeypatch.setattr(kube, "connect", lambda *_, **__: cluster)
        monkeypatch.setattr(verb, "POLL_SECONDS", 0.0)
        code = __main__.run(line.split())
        told = capsys.readouterr()
        return code, told.out, told.err

    return go


def test_the_log_so_far_of_the_job_that_the_status_names(run: Any) -> None:
    cluster = building(job="shared")  # of another resource with the same recipe
    cluster.jobs = {"shared": (job("shared"), [pod("a", 11), pod("b")])}
    cluster.logs = {"a": ["old"], "b": LOG}
    assert run("build logs qwen3-8b", cluster) == (0, "\n".join(LOG) + "\n", "")


def test_following_goes_on_through_a_retry_and_ends_with_the_build(run: Any) -> None:
    cluster = building(job="j")
    first, second = (
        pod("a", 11, "error: dial tcp 10.0.0.1:1234: connection refused"),
        pod("b", 0, "digest: sha256:" + "1" * 64),
    )
    cluster.job_script = {
        "j": [
            (job("j"), []),
            (job("j"), [pod("a", phase="Pending")]),
            (job("j"), [pod("a")]),
            (job("j"), [first]),
            (job("j"), [first, pod("b")]),
            (job("j", "Complete"), [first, second]),
        ]
    }
    cluster.logs = {"a": ["one"], "b": LOG}
    code, out, err = run("build logs qwen3-8b -f", cluster)
    assert (code, out) == (0, "one\n" + "\n".join(LOG) + "\n")
    assert err == f"built sha256:{'1' * 64}\n"


def test_a_failed_build_is_one_sentence_and_exit_code_1(run: Any) -> None:
    cluster = building(job="j")
    failed = pod("a", 10, "ddtree-build: error: import sglang fails in this image: no module", "Failed")
    cluster.job_script = {"j": [(job("j", "Failed"), [failed])] * 3}
    cluster.logs = {"a": ["line"]}
    code, out, err = run("build logs qwen3-8b --follow", cluster)
    assert (code, out) == (1, "line\n")
    assert err == "error: import sglang fails in this image: no module\n"


def test_without_a_job_there_are_the_lines_that_the_status_keeps(run: Any) -> None:
    code, out, err = run("build logs qwen3-8b", building(job="gone", log=["a", "b"]))
    assert (code, out) == (0, "a\nb\n")
    assert "the Job is gone" in err
    code, _, err = run("build logs qwen3-8b", building())
    assert code == 4
    assert "no build of qwen3-8b is known here" in err


def test_progress_says_the_step_and_how_long_it_takes() -> None:
    progress = Progress()
    assert progress.text(0, 80) == "0:00  starting"
    changed = [progress.feed(line) for line in LOG[:3]]
    assert changed == [False, True, True]
    assert progress.text(65, 80) == "1:05  engine 4/7: RUN --network=none python3 -B /ddtree/finish.py"
    assert progress.text(65, 20) == "1:05  engine 4/7: R…"
    assert not progress.feed(LOG[3])
    progress.feed(LOG[4])
    assert progress.text(70, 80) == "1:10  exporting to image"
    progress.feed("#12 ERROR: failed to push r/x: 500")
    assert progress.text(71, 80) == "1:11  failed: failed to push r/x: 500"


def test_the_line_is_written_over_and_leaves_nothing() -> None:
    stream = io.StringIO()
    line = verb._Line(stream)
    line.show("one")
    line.show("two")
    line.clear()
    line.clear()
    assert stream.getvalue() == "\r\033[K\033[36mone\033[0m\r\033[K\033[36mtwo\033[0m\r\033[K"
    verb._Line(None).show("nothing")
