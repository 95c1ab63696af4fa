"""A work queue like a controller's: each key at most once in line, one look at a key at a time, errors back off.

What a person changed goes before everything else: with many resources on their way the line is long. It has places of
its own, too, since a place that is taken stays taken for as long as a look waits for the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context

log = logging.getLogger("ddtree.queue")

Key = tuple[str, str]  # namespace, name
WORKERS = 16  # a look mostly waits: a list that has to be the newest takes about 0.1 s
RESERVED = 8  # of them, for urgent keys: sixteen looks at once slow each other down to a second and more


class Queue:
    """Runs ``work(key)`` for every key that was added. ``work`` returns seconds until it wants the key again.

    At most ``workers`` at a time: of keys that are not urgent ``reserved`` fewer, of urgent ones one fewer, so that
    neither kind ever waits for the other to run out of keys. A single worker serves both, urgent ones first.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        workers: int = WORKERS,
        reserved: int = RESERVED,
        first_retry: float = 0.5,
        last_retry: float = 30.0,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._work = work
        self._waited = waited  # told how long each key was in line
        self._workers = workers
        self._places = {False: max(1, workers - reserved), True: max(1, workers - 1)}  # urgent -> at most so many
        self._first, self._last = first_retry, last_retry
        self._lines: dict[bool, dict[Key, float]] = {True: {}, False: {}}  # urgent -> keys, and since when they wait
        self._busy: dict[Key, bool] = {}  # looked at now -> whether as urgent
        self._dirty: dict[Key, bool] = {}  # added while they were busy -> whether as urgent
        self._looked: dict[Key, float] = {}  # when each key's last look ended
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False
        self._closing = False
        self._idle = asyncio.Event()  # while closing: set when nothing is under way

    def add(self, key: Key, *, urgent: bool = False) -> None:
        """Put a key in line; once is enough. An urgent one goes before those that are not."""
        if key in self._busy:
            self._dirty[key] = urgent or self._dirty.get(key, False)
        elif not self._closing:
            if urgent:
                since = self._lines[False].pop(key, time.monotonic())
                self._lines[True].setdefault(key, since)
            elif key not in self._lines[True]:
                self._lines[False].setdefault(key, time.monotonic())
            self._fill()

    def add_unless_looked(self, key: Key, seconds: float) -> None:
        """Put a key in line unless its last look ended less than so many seconds ago."""
        if time.monotonic() - self._looked.get(key, -seconds) >= seconds:
            self.add(key)

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
        return sum(map(len, self._lines.values()))

    def start(self) -> None:
        """Begin to work."""
        self._context = copy_context()  # looks begin wherever a key is added, and are not about what happens there
        self._open = True
        self._fill()

    async def stop(self, grace: float = 0.0) -> None:
        """Begin nothing more; work that is not done after ``grace`` seconds is cancelled."""
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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fill(self) -> None:
        """Begin as many looks as there are places for."""
        while self._open and not self._closing and (urgent := self._next()) is not None:
            line = self._lines[urgent]
            key = next(iter(line))
            self._waited(time.monotonic() - line.pop(key))
            self._busy[key] = urgent
            task = asyncio.create_task(self._look(key), name="look at {}/{}".format(*key), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> bool | None:
        """Which line's turn it is: that of urgent keys (True) or the other; None when there is no key or no place."""
        if len(self._busy) < self._workers:
            for urgent in (True, False):
                if self._lines[urgent] and list(self._busy.values()).count(urgent) < self._places[urgent]:
                    return urgent
        return None

    async def _look(self, key: Key) -> None:
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
            del self._busy[key]
            if not self._busy:
                self._idle.set()
            if key in self._dirty:
                self.add(key, urgent=self._dirty.pop(key))
            self._fill()
