"""Background runs by key, such as analyses and watches: how they are dropped and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Run(Protocol):
    """Something under way; ``task`` is None while it rests."""

    task: asyncio.Task[None] | None


KeyT = TypeVar("KeyT", bound=tuple[Hashable, ...])  # begins with namespace and name
RunT = TypeVar("RunT", bound=Run)


class Runs(Generic[KeyT, RunT]):
    """What runs, by key."""

    def __init__(self) -> None:
        self._running: dict[KeyT, RunT] = {}

    def forget(self, namespace: str, name: str, *, keep: KeyT | None = None) -> None:
        """Stop and drop the runs of a resource, all but ``keep``."""
        for key in [k for k in self._running if k[:2] == (namespace, name) and k != keep]:
            task = self._running.pop(key).task
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop everything."""
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
