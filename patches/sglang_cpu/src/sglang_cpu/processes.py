"""Scheduler and detokenizer as forks of the server.

SGLang spawns them (``srt/entrypoints/engine.py:1995``), since CUDA does not survive a fork: each then imports torch,
Transformers and SGLang anew, ten seconds of a core apiece. On a CPU a fork shares what is imported. It is safe only
while the process has a single thread: locks held by another thread would stay locked in the child. Where there are
more, as in a test that has run torch, spawning stays.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any


def single_threaded() -> bool:
    """Whether this process has one thread, native ones counted."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir()) == 1
    except OSError:
        return False


def wrap_set_envs_and_config(original: Any) -> Any:
    """Choose the start method after SGLang has chosen its own. ``SGLANG_CPU_SPAWN=1`` keeps SGLang's."""

    def set_envs_and_config(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if single_threaded() and os.environ.get("SGLANG_CPU_SPAWN", "0") != "1":
            multiprocessing.set_start_method("fork", force=True)
        return out

    return set_envs_and_config
