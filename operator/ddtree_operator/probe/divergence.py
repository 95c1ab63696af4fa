"""Ask both engines about the position where their outputs part."""

from __future__ import annotations

import aiohttp

from ddtree_operator.analysis.parity import first_difference
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Divergence, Pair
from ddtree_operator.probe.generate import DEFAULT_TIMEOUT, tokenize, top2_gap
from ddtree_operator.probe.http import EngineError

ATTEMPTS = 3  # a connection may break; what an engine says is asked for only once


async def explain_divergence(
    session: aiohttp.ClientSession,
    baseline_url: str,
    canary_url: str,
    prompt: Prompt,
    pair: Pair,
    timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109
) -> Divergence | None:
    """Top-2 gaps of both engines where the outputs of ``pair`` first differ; None when they do not.

    The question (prompt and common output as ids, one token, log-probs) runs through ordinary prefill, so it does
    not depend on the speculative path that is being judged.
    """
    position = first_difference(pair.baseline.output_ids, pair.canary.output_ids)
    if position is None:
        return None
    common = list(pair.baseline.output_ids[:position])
    baseline, error_b = await _gap(session, baseline_url, prompt, common, timeout)
    canary, error_c = await _gap(session, canary_url, prompt, common, timeout)
    return Divergence(position, baseline, canary, error_c or error_b)


async def _gap(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    common: list[int],
    timeout: float,  # noqa: ASYNC109
) -> tuple[float | None, str | None]:
    error = None
    for _ in range(ATTEMPTS):
        try:
            ids = list(prompt.ids) if prompt.live else await tokenize(session, url, prompt.text, timeout)
            return await top2_gap(session, url, ids + common, timeout), None
        except EngineError as e:
            error = e.brief if prompt.live else str(e)
    return None, error
