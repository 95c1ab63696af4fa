"""Ask a Prometheus server; the answer is judged in ``analysis.prometheus``."""

from __future__ import annotations

import time
from urllib.parse import urlencode

import aiohttp

from ddtree_operator.analysis.prometheus import Reading, active, read
from ddtree_operator.api.spec import PrometheusCheck
from ddtree_operator.core.units import seconds
from ddtree_operator.probe.http import EngineError, get_text


async def reading(session: aiohttp.ClientSession, check: PrometheusCheck) -> Reading:
    """One reading of a check: its activity query first, when it has one."""
    max_age = seconds(check.max_age)
    if check.activity:
        lively = active(await query(session, check.address, check.activity, max_age))
        if lively.error is not None:
            return lively
    return await query(session, check.address, check.query, max_age)


async def query(
    session: aiohttp.ClientSession,
    address: str,
    promql: str,
    max_age: float,
    timeout: float = 15.0,  # noqa: ASYNC109
) -> Reading:
    """One instant query that leaves samples older than ``max_age`` seconds out.

    Never raises for what the server does: a failure is a Reading with ``error`` set.
    """
    now = time.time()
    asked = {"query": promql, "time": f"{now:.3f}", "lookback_delta": f"{max_age:.0f}s"}
    url = f"{address.rstrip('/')}/api/v1/query?{urlencode(asked)}"
    try:
        return read(await get_text(session, url, timeout), now, max_age)
    except EngineError as e:
        return Reading(error=str(e).replace(url, f"{address}/api/v1/query"))
