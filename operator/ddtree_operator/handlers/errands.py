"""Questions to others who may be slow, asked beside the work: no look waits for long, and none is asked twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

ENTRIES = 500
OLD = 10.0  # seconds after which an answer that nobody fetched is asked for anew

T = TypeVar("T")


class StillOutError(Exception):
    """No answer yet, and none before; it comes to who asks again with the same key."""


@dataclass(slots=True)
class _Errand:
    task: asyncio.Future[Any]
    done_at: float | None = None


class Errands:
    """A few workers look at all resources; a registry that takes its time must not hold one of them each."""

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._out: dict[Hashable, _Errand] = {}
        self._failed: dict[Hashable, Exception] = {}

    async def of(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """What ``ask`` returns or raises, when it is there within the patience.

        Else the error of the time before, so that who waits hears the same until there is an answer; the first time
        StillOutError.
        """
        errand = self._out.get(key)
        if errand is None or (errand.done_at is not None and time.monotonic() - errand.done_at > OLD):
            errand = self._send(key, ask)
        await asyncio.wait({errand.task}, timeout=self._patience)
        if not errand.task.done():
            if key in self._failed:
                raise self._failed[key]
            raise StillOutError
        self._out.pop(key, None)
        try:
            answer: T = errand.task.result()
        except Exception as error:
            self._failed[key] = error
            raise
        self._failed.pop(key, None)
        return answer

    def _send(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> _Errand:
        if len(self._out) + len(self._failed) > ENTRIES:
            self._out = {k: e for k, e in self._out.items() if not e.task.done()}
            self._failed.clear()
        errand = self._out[key] = _Errand(asyncio.ensure_future(ask()))

        def note(task: asyncio.Future[T]) -> None:
            errand.done_at = time.monotonic()
            with contextlib.suppress(asyncio.CancelledError):
                task.exception()  # perhaps nobody comes back for it

        errand.task.add_done_callback(note)
        return errand
