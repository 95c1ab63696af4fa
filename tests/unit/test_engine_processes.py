"""When the CPU engine forks its processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "patches/sglang_cpu/src/sglang_cpu"
sys.path.insert(0, str(SOURCE.parent))
from sglang_cpu import processes  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.fixture
def method() -> Iterator[None]:
    """The start method is global: put it back."""
    before = multiprocessing.get_start_method()
    yield
    multiprocessing.set_start_method(before, force=True)


def sglangs_choice() -> str:
    multiprocessing.set_start_method("spawn", force=True)
    return "set"


def chosen() -> str:
    assert processes.wrap_set_envs_and_config(sglangs_choice)() == "set"
    return multiprocessing.get_start_method()


@pytest.mark.usefixtures("method")
def test_forks_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "single_threaded", lambda: True)
    assert chosen() == "fork"


@pytest.mark.usefixtures("method")
def test_spawns_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "single_threaded", lambda: True)
    monkeypatch.setenv("SGLANG_CPU_SPAWN", "1")
    assert chosen() == "spawn"


@pytest.mark.usefixtures("method")
def test_spawns_beside_another_thread() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not processes.single_threaded()
        assert chosen() == "spawn"
    finally:
        done.set()
        other.join()


def test_a_bare_interpreter_has_one_thread() -> None:
    code = f"import runpy; print(runpy.run_path({str(SOURCE / 'processes.py')!r})['single_threaded']())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"
