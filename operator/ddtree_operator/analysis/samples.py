"""Which samples may be counted at all. A number that makes no sense is an error, never evidence."""

from __future__ import annotations

import math

from ddtree_operator.analysis.types import Sample

# A verify step commits its accepted drafts and one more token, prefill adds one, and a retracted request is prefilled
# again: so counters that explain fewer tokens than were generated (by more than this) miss verify steps.
_UNEXPLAINED_TOKENS = 5

MAX_ERROR = 200  # characters of an error that are kept


def problem(sample: Sample, speculates: bool | None = None) -> str | None:
    """Why this sample cannot be used, in one sentence; None when it can.

    ``speculates`` True: an answer of several tokens without a single verify step is an error.
    """
    if sample.error is not None:
        return sample.error or "the request failed without a message"
    for name in ("completion_tokens", "verify_steps", "accepted_drafts", "proposed_drafts"):
        value = getattr(sample, name)
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name} is {value!r}, not a whole number"
        if value < 0:
            return f"{name} is {value}, below zero"
    if not isinstance(sample.seconds, int | float) or not math.isfinite(sample.seconds) or sample.seconds <= 0:
        return f"seconds is {sample.seconds!r}, not a time above zero"
    if sample.completion_tokens == 0:
        return "the answer has no tokens"
    if sample.verify_steps == 0:
        if sample.accepted_drafts > 0:
            return f"{sample.accepted_drafts} accepted drafts in 0 verify steps"
        if speculates and sample.completion_tokens > 1:
            return "speculation is inactive: the engine reports no verify steps"
        return None
    if sample.proposed_drafts and sample.accepted_drafts > sample.proposed_drafts:
        return f"{sample.accepted_drafts} drafts accepted of {sample.proposed_drafts} proposed"
    explained = sample.verify_steps + sample.accepted_drafts + 1
    if sample.completion_tokens > explained + _UNEXPLAINED_TOKENS:
        return f"the counters explain {explained} tokens, but {sample.completion_tokens} were generated"
    return None


def cut(text: str, limit: int) -> str:
    """``text`` on one line, at most ``limit`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
