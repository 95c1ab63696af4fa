"""Greedy generation on one engine, and what it says about its two best next tokens."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

import aiohttp

from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Sample
from ddtree_operator.probe.http import EngineError, UnreachedError, post_json

DEFAULT_TIMEOUT = 120.0  # seconds for one request
OWN = "ddtree-probe-"  # start of our requests' ids, by which an engine tells them from users'


async def generate(
    session: aiohttp.ClientSession,
    base_url: str,
    prompt: Prompt,
    max_tokens: int,
    timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109
) -> Sample:
    """One greedy request. Never raises for what an engine does: a failure is a Sample with ``error`` set."""
    url = f"{base_url.rstrip('/')}/generate"
    what = {"input_ids": list(prompt.ids)} if prompt.live else {"text": prompt.text}
    greedy = {"temperature": 0, "max_new_tokens": max_tokens}
    body = {**what, "rid": f"{OWN}{uuid.uuid4().hex}", "sampling_params": greedy}
    start = time.perf_counter()
    try:
        answer = await post_json(session, url, body, timeout)
        seconds = round(time.perf_counter() - start, 6)  # microseconds: short in a record
        return _sample(prompt.id, answer, seconds, url)
    except EngineError as e:
        unreached = base_url if isinstance(e, UnreachedError) else ""
        return Sample(prompt.id, error=e.brief if prompt.live else str(e), unreached=unreached)


async def tokenize(session: aiohttp.ClientSession, base_url: str, text: str, timeout: float = 30.0) -> list[int]:  # noqa: ASYNC109
    """Token ids of ``text`` as the engine sees it. Raises EngineError."""
    url = f"{base_url.rstrip('/')}/tokenize"
    answer = await post_json(session, url, {"prompt": text}, timeout)
    ids = _ids(answer.get("tokens"), url, "tokens")
    if not ids:
        raise EngineError(f"{url} found no tokens in the prompt")
    return ids


async def top2_gap(
    session: aiohttp.ClientSession,
    base_url: str,
    input_ids: list[int],
    timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109
) -> float:
    """Log-prob of the best next token after ``input_ids`` less that of the second best. Raises EngineError."""
    url = f"{base_url.rstrip('/')}/generate"
    body = {
        "input_ids": input_ids,
        "rid": f"{OWN}{uuid.uuid4().hex}",
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = await post_json(session, url, body, timeout)
    try:
        best, second = (float(entry[0]) for entry in answer["meta_info"]["output_top_logprobs"][0][:2])
    except (KeyError, IndexError, TypeError, ValueError):
        raise EngineError(f"{url} returned no two best tokens in meta_info.output_top_logprobs") from None
    if not (math.isfinite(best) and math.isfinite(second)):
        raise EngineError(f"{url} returned log-probs that are not finite: {best} and {second}")
    return abs(best - second)


def _sample(prompt_id: str, answer: dict[str, Any], seconds: float, url: str) -> Sample:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError(f"the answer of {url} has no meta_info")
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        said = f"{url} aborted the request"
        raise EngineError(f"{said}: {str(reason.get('message', 'no reason given'))[:160]}", said)
    return Sample(
        prompt_id,
        completion_tokens=_count(meta, "completion_tokens", url, required=True),
        verify_steps=_count(meta, "spec_verify_ct", url),
        accepted_drafts=_count(meta, "spec_num_correct_drafts", url),
        proposed_drafts=_count(meta, "spec_num_proposed_drafts", url),
        seconds=seconds,
        output_ids=tuple(_ids(answer.get("output_ids", []), url, "output_ids")),
    )


def _count(meta: dict[str, Any], name: str, url: str, required: bool = False) -> int:
    """A whole number of meta_info. SGLang leaves speculative counts out when there were no verify steps."""
    value = meta.get(name)
    if value is None:
        if required:
            raise EngineError(f"the answer of {url} has no meta_info.{name}")
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EngineError(f"meta_info.{name} of {url} is {str(value)[:40]!r}, not a count")
    return value


def _ids(value: object, url: str, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise EngineError(f"{name} of {url} is not a list of token ids")
    return value
