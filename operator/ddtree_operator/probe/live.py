"""Users' prompts, sampled from the engines that serve them, by opt-in. In memory only, each sent once, then forgotten.

The engine's half is ``sglang_ddtree/live.py``; what is promised to users: docs/decisions/011-live-prompts.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from ddtree_operator.analysis.parity import first_difference
from ddtree_operator.analysis.prompts import Prompt
from ddtree_operator.analysis.types import Pair
from ddtree_operator.api.names import LIVE_PREFIX
from ddtree_operator.probe.http import EngineError, post_json

PATH = "/ddtree/prompts"
TOKEN_HEADER = "x-ddtree-token"
TIMEOUT = 15.0  # seconds
KEPT = 64  # prompts that wait here to be sent


@dataclass(frozen=True, slots=True)
class Wish:
    """What the resource asks for. ``wait``: send nothing while there are no users' prompts, else the prompt set."""

    token: str
    longest: int  # tokens
    wait: bool

    def __repr__(self) -> str:
        return f"Wish(longest={self.longest}, wait={self.wait})"  # without the token


class LiveTraffic:
    """Prompts of users, newest last. ``start``: numbers given before. ``problem``: why an engine gives none, or ""."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], wish: Wish, start: int = 0) -> None:
        self.urls = list(urls)
        self.wish = wish
        self.problem = ""
        self.skipped = {"long": 0, "other": 0}
        self._session = session
        self._number = start
        self._waiting: deque[tuple[int, ...]] = deque(maxlen=KEPT)

    async def draw(self, n: int) -> list[Prompt]:
        """At most ``n`` prompts, none of them twice; the engines are asked for more when too few wait here."""
        if len(self._waiting) < n:
            await self._ask()
        return [self._next() for _ in range(min(n, len(self._waiting)))]

    def _next(self) -> Prompt:
        self._number += 1
        return Prompt(f"{LIVE_PREFIX}{self._number}", "live", "", self._waiting.popleft())

    async def _ask(self) -> None:
        problems = []
        for url in self.urls:
            where = f"{url.rstrip('/')}{PATH}"
            try:
                headers = {TOKEN_HEADER: self.wish.token}
                answer = await post_json(self._session, where, {"longest": self.wish.longest}, TIMEOUT, headers)
                self._waiting.extend(_prompts(answer, where, self.wish.longest))
                for kind, count in _skipped(answer).items():
                    self.skipped[kind] += count
            except EngineError as error:
                problems.append(_said(where, error))
        self.problem = problems[0] if problems else ""


def _said(where: str, error: EngineError) -> str:
    if "answered 404" in error.brief:
        return (
            f"{where} answered 404: the engine was started without live prompts, its Secret is missing, "
            "or its image is not built by this operator"
        )
    if "answered 401" in error.brief:
        return f"{where} answered 401: the engine has another token; a changed Secret reaches it within two minutes"
    return error.brief


def _prompts(answer: Mapping[str, Any], where: str, longest: int) -> list[tuple[int, ...]]:
    given = answer.get("prompts")
    if not isinstance(given, list) or not all(isinstance(p, list) for p in given):
        raise EngineError(f"{where} gave no list of prompts")
    good = [tuple(p) for p in given if p and len(p) <= longest]
    if not all(type(i) is int and i >= 0 for p in good for i in p):
        raise EngineError(f"{where} gave prompts that are no token ids")
    return good


def _skipped(answer: Mapping[str, Any]) -> dict[str, int]:
    said = answer.get("skipped")
    said = said if isinstance(said, Mapping) else {}
    return {kind: said[kind] for kind in ("long", "other") if type(said.get(kind)) is int}


def without_text(pair: Pair) -> Pair:
    """The pair with stand-ins for its outputs: as long, equal and different at the same place, and nothing more.

    What decides stays the same; what the model answered to a user does not even reach the analysis.
    """
    a, b = pair.baseline.output_ids, pair.canary.output_ids
    common = first_difference(a, b)
    common = len(a) if common is None else common
    return replace(
        pair,
        baseline=replace(pair.baseline, output_ids=_stand_in(len(a), common, 1), top2_gaps=()),
        canary=replace(pair.canary, output_ids=_stand_in(len(b), common, 2), top2_gaps=()),
    )


def _stand_in(length: int, common: int, rest: int) -> tuple[int, ...]:
    return (0,) * common + (rest,) * (length - common)
