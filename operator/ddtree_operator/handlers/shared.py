"""What many looks need alike and nobody changes from here: read once for all of them, and again after some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

FRESH = 10.0  # seconds for which an answer holds

T = TypeVar("T")


class Shared(Generic[T]):
    """The answer of ``read``, at most FRESH seconds old. Looks that come meanwhile wait for the one that reads.

    An error goes to the look that read; the next one tries again.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._answer: tuple[float, T] | None = None  # when it was asked for, and what it is
        self._lock = asyncio.Lock()

    async def get(self) -> T:
        """The answer."""
        async with self._lock:
            if self._answer is None or time.monotonic() - self._answer[0] >= FRESH:
                began = time.monotonic()
                self._answer = (began, await self._read())
            return self._answer[1]
