"""The one line that says why an engine ended, out of what SGLang leaves behind."""

from __future__ import annotations

import pytest

from ddtree_operator.core.engine_errors import error_line, refusal

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
