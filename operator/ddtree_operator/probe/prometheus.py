"""Ask a Prometheus server; the answer is judged in ``analysis.prometheus``."""

from __future__ import annotations

import time
from urllib.parse import urlencode

import aiohttp

from ddtree_operator.analysis.prometheus import Reading, read
from ddtree_operator.probe.http import EngineError, get_text


async def query(session: aiohttp.ClientSession, address: str, promql: str, timeout: float = 15.0) -> Reading:  # noqa: ASYNC109
    """One instant query. Never raises for what the server does: a failure is a Reading with ``error`` set."""
    now = time.time()
    url = f"{address.rstrip('/')}/api/v1/query?{urlencode({'query': promql, 'time': f'{now:.3f}'})}"
    try:
        return read(await get_text(session, url, timeout), now)
    except EngineError as e:
        return Reading(error=str(e).replace(url, f"{address}/api/v1/query"))
