"""Watches that go on after any answer.

kopf lists and watches anew after 410 and when a connection ends, and gives a watch up for good at every other answer
(403 while rights are exchanged, an error inside the stream, 410 as an HTTP status). What it watched is then only seen
by resync.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from kopf._cogs.clients import errors, watching

log = logging.getLogger("ddtree.watching")

FIRST, LAST = 1.0, 30.0  # seconds until a watch begins again: the first time, and at most

_once = watching.infinite_watch


async def _lasting(**how: Any) -> AsyncIterator[Any]:
    """Everything that kopf's own watch yields, begun again when it fails."""
    delay = FIRST
    while True:
        try:
            async for event in _once(**how):
                delay = FIRST
                yield event
            return
        except (errors.APIError, watching.WatchingError, aiohttp.ClientError, ValueError) as error:
            what, space = how["resource"].plural, how["namespace"]
            log.warning("the watch of %s in %s ended (%s), and begins again in %.0f s", what, space, error, delay)
        await asyncio.sleep(delay)
        delay = min(LAST, 2 * delay)


def install() -> None:
    """Have kopf's watches last."""
    watching.infinite_watch = _lasting
