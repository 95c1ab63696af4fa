"""Whether the watch still lives: what a list shows must have come by watch, too, sooner or later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class Freshness:
    """Compares the versions that lists show with those that the watch delivered.

    A watch may end without a word while its connection stays open; the process looks well and sees nothing. Silence
    alone proves nothing, since nothing may have changed. A change that a list shows and the watch does not, does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delivered: dict[str, str] = {}  # uid -> resourceVersion
        self._behind: dict[str, float] = {}  # uid -> since when a list shows what the watch has not delivered

    def delivered(self, obj: dict[str, Any], *, deleted: bool = False) -> None:
        """The watch delivered this object."""
        meta = obj["metadata"]
        if deleted:
            self._delivered.pop(meta["uid"], None)
            self._behind.pop(meta["uid"], None)
            return
        version = meta.get("resourceVersion", "")
        if not _reached(self._delivered.get(meta["uid"]), version):  # one that comes twice, or late, takes nothing back
            self._delivered[meta["uid"]] = version

    def listed(self, objects: Iterable[dict[str, Any]]) -> None:
        """A complete list shows these objects."""
        now = self._clock()
        present = {o["metadata"]["uid"]: o["metadata"].get("resourceVersion", "") for o in objects}
        self._delivered = {u: v for u, v in self._delivered.items() if u in present}
        late = {u for u, version in present.items() if not _reached(self._delivered.get(u), version)}
        self._behind = {u: self._behind.get(u, now) for u in late}

    @property
    def lag(self) -> float:
        """Seconds for which the watch has been behind the lists; 0 while it is not."""
        return self._clock() - min(self._behind.values()) if self._behind else 0.0


def _reached(delivered: str | None, listed: str) -> bool:
    """Whether the watch is at the listed version or past it."""
    if delivered is None:
        return False
    try:
        return int(delivered) >= int(listed)
    except ValueError:
        return delivered == listed
