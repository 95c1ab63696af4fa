"""Who may send notifications, and how many."""

from __future__ import annotations

import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

log = logging.getLogger("ddtree.alerts")

SHORTEST = 16  # characters of a token


class Tokens:
    """Bearer tokens from a mounted Secret's file, one a line, so that two are valid while one replaces the other.

    The file is read again when it changes; while it is missing or has no usable line nobody is let in.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._tokens: tuple[bytes, ...] = ()
        self._stamp: tuple[int, int] | None = None
        self._looked = -10.0

    def usable(self) -> bool:
        """Whether there is any token."""
        self._refresh()
        return bool(self._tokens)

    def accept(self, header: str | None) -> bool:
        """Whether an Authorization header has one of the tokens. Takes the same time however wrong it is."""
        self._refresh()
        kind, _, given = (header or "").partition(" ")
        sent = given.strip().encode(errors="replace")
        matches = [hmac.compare_digest(sent, token) for token in self._tokens]
        return kind.lower() == "bearer" and any(matches)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < 1.0:
            return
        self._looked = now
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp == self._stamp:
                return
            lines = [line.strip() for line in self._path.read_bytes().splitlines()]
        except OSError as error:
            if self._stamp is not None or not self._tokens:
                log.error("the token of the alert receiver cannot be read (%s); notifications are refused", error)
            self._stamp, self._tokens = None, ()
            return
        self._stamp = stamp
        self._tokens = tuple(line for line in lines if len(line) >= SHORTEST)
        if not self._tokens:
            log.error("%s has no token of at least %d characters; notifications are refused", self._path, SHORTEST)


class Bucket:
    """A token bucket: ``rate`` a second, ``burst`` at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._at = burst, clock()

    def take(self) -> bool:
        """Take one; False when there is none."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    @property
    def empty(self) -> bool:
        """Whether nothing could be taken now."""
        return self._level + (self._clock() - self._at) * self._rate < 1.0


class Sources:
    """A bucket for each address that failed to authenticate; the longest silent are forgotten."""

    def __init__(
        self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic, most: int = 1000
    ) -> None:
        self._make = partial(Bucket, rate, burst, clock)
        self._most = most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, source: str) -> None:
        """Count a failure."""
        bucket = self._buckets.pop(source, None) or self._make()
        bucket.take()
        self._buckets[source] = bucket
        while len(self._buckets) > self._most:
            self._buckets.popitem(last=False)

    def shut_out(self, source: str) -> bool:
        """Whether an address failed too often of late to be listened to."""
        bucket = self._buckets.get(source)
        return bucket is not None and bucket.empty
