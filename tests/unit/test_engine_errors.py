"""The one line that says why an engine ended, out of what SGLang leaves behind."""

from __future__ import annotations

import pytest

from ddtree_operator.core.engine_errors import error_line, pods_refused, pull_failure, refusal

pytestmark = pytest.mark.unit

DIED = """Traceback (most recent call last):
  File "sglang/srt/entrypoints/engine.py", line 2027, in _wait_for_scheduler_ready
    data = scheduler_pipe_readers[i].recv()
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError
During handling of the above exception, another exception occurred:
RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). If exit code is -9 (SIGKILL), run dmesg.
"""


def test_a_refusal_wins_over_what_follows_it() -> None:
    log = "noise\nddtree: refused: the mask is not applied; build the image again\n" + DIED
    assert refusal(log) == error_line(log) == "the mask is not applied; build the image again"


def test_the_cpu_plugin_refuses_in_the_same_form() -> None:
    assert refusal("ddtree-cpu: refused: no") == "no"


def test_the_schedulers_own_error_wins_over_the_parent_that_lost_it() -> None:
    log = "OSError: /models/nope does not appear to have a file named config.json\n" + DIED
    assert error_line(log) == "OSError: /models/nope does not appear to have a file named config.json"


def test_without_any_error_the_last_line_stands() -> None:
    assert error_line("starting\nloading weights\n") == "loading weights"
    assert error_line("") == ""


def test_a_line_of_carets_is_never_the_answer() -> None:
    assert "^" not in error_line("ValueError: bad flag\n    ^^^^^^^\n")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            'Back-off pulling image "r:5000/e@sha256:00": ErrImagePull: rpc error: desc = failed to pull '
            'and unpack image "r:5000/e@sha256:00": resolve reference "r:5000/e@sha256:00": r:5000/e: not found',
            "the image r:5000/e@sha256:00 cannot be pulled: not found",
        ),
        (
            'failed to pull and unpack image "r/e": Head "https://r/v2/": dial: connection refused',
            "the image r/e cannot be pulled: connection refused",
        ),
        ('Back-off pulling image "r/e"', "the image r/e cannot be pulled"),
        ("", "the image cannot be pulled"),
    ],
)
def test_an_image_that_is_not_pulled_is_one_sentence(said: str, sentence: str) -> None:
    assert pull_failure(said) == sentence


def test_refused_pods_read_the_same_at_each_attempt() -> None:
    said = 'pods "m-1-{}" is forbidden: exceeded quota: tight, requested: pods=1'
    assert pods_refused(said.format("x")) == pods_refused(said.format("y"))
    assert pods_refused(said) == "pods are refused: exceeded quota: tight, requested: pods=1"
