"""Pods of others count, once each, and the list is not read at every look."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_operator.handlers import neighbours as module
from ddtree_operator.handlers.kube import Kind
from ddtree_operator.handlers.neighbours import Neighbours
from unit.test_placement_match import pod

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]


def of(namespace: str, deployment: str, gpus: int = 1) -> dict[str, Any]:
    labels = {"ddtree.dev/deployment": deployment} if deployment else None
    return {**pod("a", gpus), "metadata": {"namespace": namespace, "name": f"{deployment}-0", "labels": labels}}


class Kube:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def list(self, kind: Kind, namespace: str = "") -> list[dict[str, Any]]:
        self.asked.append(namespace)
        found = [of("llm", "m"), of("llm", "n"), of("llm", "", 0), of("other", "m")]
        return [p for p in found if namespace in ("", p["metadata"]["namespace"])]


async def test_what_is_seen_and_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    kube = Kube()
    watched = Neighbours(kube, ("llm",), everywhere=False)  # type: ignore[arg-type]
    assert [p["metadata"]["name"] for p in await watched.of("llm", "m")] == ["n-0"]
    await watched.of("llm", "n")
    assert kube.asked == ["llm"]
    clock[0] += module.FRESH
    await watched.of("llm", "n")
    assert kube.asked == ["llm", "llm"]
    everywhere = Neighbours(kube, ("llm",), everywhere=True)  # type: ignore[arg-type]
    seen = {(p["metadata"]["namespace"], p["metadata"]["name"]) for p in await everywhere.of("llm", "m")}
    assert seen == {("llm", "n-0"), ("other", "m-0")}
