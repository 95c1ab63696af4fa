"""What a slow registry is asked about the image that serves: nobody waits for it, and its answer counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.build.config import BuildConfig
from ddtree_operator.core.facts import Revision, WayBack
from ddtree_operator.handlers.errands import Errands
from ddtree_operator.handlers.keeping import Keeping

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]

IMAGE = "registry.example/team/engine@sha256:" + "1" * 64
RESOURCE: dict[str, Any] = {"metadata": {"name": "m", "namespace": "ns", "uid": "u" * 12}}
SPEC = DDTreeSpec.model_validate({"model": {"path": "/m"}, "drafter": {"path": "/d"}})
OLD, NEW = Revision("old", 1, {}, image=IMAGE), Revision("new", 2, {})


class Registry:
    """Answers when told to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.errands = Errands(0.01)

    async def registry(self, secret: str, namespace: str) -> Registry:
        return self

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def lacks(self, image: str) -> str:
        return await asyncio.shield(self.answer)


async def test_a_late_answer_is_waited_for_in_words() -> None:
    slow = Registry()
    keeping = Keeping(slow, BuildConfig(push_repository="registry.example/team/engine"))  # type: ignore[arg-type]
    told = WayBack("away", "the registry registry.example has not answered yet")
    assert await keeping.way_back(SPEC, RESOURCE, OLD, NEW) == told
    slow.answer.set_result("")
    assert await keeping.way_back(SPEC, RESOURCE, OLD, NEW) == WayBack("there")
