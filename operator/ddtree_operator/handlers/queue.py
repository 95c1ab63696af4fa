"""A work queue like a controller's: each key at most once in line, one worker per key, errors back off.

What a person changed goes before everything else: with many resources on their way the line is long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

log = logging.getLogger("ddtree.queue")

Key = tuple[str, str]  # namespace, name
WORKERS = 16  # a look mostly waits: a list that has to be the newest takes about 0.1 s


class Queue:
    """Runs ``work(key)`` for every key that was added. ``work`` returns seconds until it wants the key again."""

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = WORKERS,
        first_retry: float = 0.5,
        last_retry: float = 30.0,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._work = work
        self._waited = waited  # told how long each key was in line
        self._since: dict[Key, float] = {}
        self._closing = False
        self._workers = workers
        self._first, self._last = first_retry, last_retry
        self._urgent: deque[Key] = deque()  # taken first
        self._line: deque[Key] = deque()  # may name keys that were taken from the urgent ones meanwhile
        self._some = asyncio.Semaphore(0)  # as many as keys wait
        self._waiting: set[Key] = set()
        self._hurried: set[Key] = set()  # added as urgent while they were busy
        self._looked: dict[Key, float] = {}  # when each key's last look ended
        self._busy: set[Key] = set()
        self._dirty: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()  # while closing: set when nothing is under way

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Put a key in line; once is enough. An urgent one goes before those that are not."""
        if key in self._busy:
            self._dirty.add(key)
            if urgent:
                self._hurried.add(key)
        elif not self._closing:
            if key not in self._waiting:
                self._waiting.add(key)
                self._since[key] = time.monotonic()
                (self._urgent if urgent else self._line).append(key)
                self._some.release()
            elif urgent and key not in self._urgent:
                self._urgent.append(key)

    def add_unless_looked(self, key: Key, seconds: float) -> None:
        """Put a key in line unless its last look ended less than so many seconds ago."""
        if time.monotonic() - self._looked.get(key, -seconds) >= seconds:
            self.add(key)

    async def _next(self) -> Key:
        """The next key in line."""
        await self._some.acquire()
        while True:
            key = (self._urgent or self._line).popleft()
            if key in self._waiting:  # else it was taken before, from the other line
                self._waiting.discard(key)
                return key

    def add_later(self, key: Key, seconds: float) -> None:
        """Put a key in line after a while; the earliest of several wishes counts."""
        loop = asyncio.get_running_loop()
        old = self._timers.get(key)
        if old is not None and not old.cancelled():
            if old.when() <= loop.time() + seconds and old.when() > loop.time():
                return
            old.cancel()
        self._timers[key] = loop.call_later(seconds, self.add, key)

    @property
    def depth(self) -> int:
        """Keys in line."""
        return len(self._waiting)

    def start(self) -> None:
        """Start the workers."""
        self._tasks = [asyncio.create_task(self._loop(), name=f"worker {i}") for i in range(self._workers)]

    async def stop(self, grace: float = 0.0) -> None:
        """Stop the workers; work that is not done after ``grace`` seconds is cancelled."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        if self._busy:
            self._idle.clear()
        else:
            self._idle.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _loop(self) -> None:
        while True:
            key = await self._next()
            self._waited(time.monotonic() - self._since.pop(key, time.monotonic()))
            if self._closing:
                continue
            self._busy.add(key)
            try:
                again = await self._work(key)
                self._failures.pop(key, None)
                self._looked.pop(key, None)
                if again is not None:
                    self._looked[key] = time.monotonic()
                    self.add_later(key, again)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failures = self._failures[key] = self._failures.get(key, 0) + 1
                delay = min(self._last, self._first * 2 ** (failures - 1))
                log.warning("%s/%s: %s (again in %.1f s)", *key, error or type(error).__name__, delay)
                self.add_later(key, delay)
            finally:
                self._busy.discard(key)
                if not self._busy:
                    self._idle.set()
                if key in self._dirty:
                    self._dirty.discard(key)
                    self.add(key, urgent=key in self._hurried)
                    self._hurried.discard(key)
