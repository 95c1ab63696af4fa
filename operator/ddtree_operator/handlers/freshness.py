"""Whether the watches still live: what a list shows must have come by watch, too, sooner or later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ddtree_operator.api.names import LABEL_DEPLOYMENT


class Freshness:
    """Compares the versions that lists show with those that the watch delivered.

    A watch may end without a word while its connection stays open; the process looks well and sees nothing. Silence
    alone proves nothing, since nothing may have changed. A change that a list shows and the watch does not, does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._delivered: dict[str, tuple[str, float]] = {}  # uid -> resourceVersion, and when
        self._behind: dict[str, tuple[float, str]] = {}  # uid -> since when, and which version the watch still owes

    def delivered(self, obj: dict[str, Any], *, deleted: bool = False) -> None:
        """The watch delivered this object."""
        meta = obj["metadata"]
        if deleted:
            self._delivered.pop(meta["uid"], None)
            self._behind.pop(meta["uid"], None)
            return
        version = meta.get("resourceVersion", "")
        if not self._has(meta["uid"], version):  # one that comes twice, or late, takes nothing back
            self._delivered[meta["uid"]] = (version, self._clock())
        _, owed = self._behind.get(meta["uid"], (0.0, version))
        if self._has(meta["uid"], owed):
            self._behind.pop(meta["uid"], None)

    def listed(self, objects: Iterable[dict[str, Any]], began: float | None = None) -> None:
        """A complete list shows these objects. ``began``: when it was asked for, by the clock; None for just now.

        What was delivered after that may be missing from it though it is there, and stays known.
        """
        now = self._clock()
        began = now if began is None else began
        present = {o["metadata"]["uid"]: o["metadata"].get("resourceVersion", "") for o in objects}
        self._delivered = {u: d for u, d in self._delivered.items() if u in present or d[1] >= began}
        late = {u: version for u, version in present.items() if not self._has(u, version)}
        self._behind = {u: (self._behind.get(u, (now, ""))[0], version) for u, version in late.items()}

    def _has(self, uid: str, version: str) -> bool:
        """Whether the watch is at that version of an object or past it."""
        return uid in self._delivered and _reached(self._delivered[uid][0], version)

    def unlist(self) -> None:
        """Nobody lists any more: what lists have shown counts no longer."""
        self._behind = {}

    @property
    def empty(self) -> bool:
        """Whether nothing is known."""
        return not self._delivered and not self._behind

    @property
    def lag(self) -> float:
        """Seconds for which the watch has been behind the lists; 0 while it is not."""
        return self._clock() - min(since for since, _ in self._behind.values()) if self._behind else 0.0


class Children:
    """The same for the watches of Deployments, pods and records: each look at a resource lists its own.

    So this costs no request. It knows what looks know: a replica on standby looks at nothing, and judges nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str, str], Freshness] = {}  # plural, namespace, resource

    def delivered(self, plural: str, obj: dict[str, Any], *, deleted: bool = False) -> None:
        """The watch of a kind delivered this object, which has the label of its resource."""
        meta = obj["metadata"]
        key = (plural, meta.get("namespace", ""), meta["labels"][LABEL_DEPLOYMENT])
        self._of(key).delivered(obj, deleted=deleted)
        self._tidy(key)

    def listed(
        self, plural: str, namespace: str, name: str, objects: Iterable[dict[str, Any]], began: float | None = None
    ) -> None:
        """A complete list of a resource's objects of a kind, by the same label."""
        key = (plural, namespace, name)
        self._of(key).listed(objects, began)
        self._tidy(key)

    def unlist(self) -> None:
        """This replica looks at nothing any more."""
        for fresh in self._known.values():
            fresh.unlist()

    def forget(self, namespace: str, name: str) -> None:
        """A resource is gone, and nobody will list what it leaves behind."""
        for key in [k for k in self._known if k[1:] == (namespace, name)]:
            self._known[key].unlist()
            self._tidy(key)

    @property
    def lag(self) -> tuple[float, str]:
        """Seconds for which the slowest of them has been behind, and which it is; (0, "") while none is."""
        return max(((f.lag, key[0]) for key, f in self._known.items() if f.lag > 0), default=(0.0, ""))

    def _of(self, key: tuple[str, str, str]) -> Freshness:
        return self._known.setdefault(key, Freshness(self._clock))

    def _tidy(self, key: tuple[str, str, str]) -> None:
        if self._known[key].empty:
            del self._known[key]


def _reached(delivered: str, listed: str) -> bool:
    """Whether one version is the other or a later one."""
    try:
        return int(delivered) >= int(listed)
    except ValueError:
        return delivered == listed
