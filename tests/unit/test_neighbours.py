"""Pods of others count, once each, and the lists are not read at every look."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ddtree_operator.handlers import shared
from ddtree_operator.handlers.kube import NODE, Kind
from ddtree_operator.handlers.neighbours import Neighbours
from unit.test_placement_match import node, pod

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]


def of(namespace: str, deployment: str, gpus: int = 1) -> dict[str, Any]:
    labels = {"ddtree.dev/deployment": deployment} if deployment else None
    return {**pod("a", gpus), "metadata": {"namespace": namespace, "name": f"{deployment}-0", "labels": labels}}


class Kube:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def list(self, kind: Kind, namespace: str = "") -> list[dict[str, Any]]:
        self.asked.append(f"{kind.plural} {namespace}".strip())
        if kind == NODE:
            return [node("a"), node("b")]
        found = [of("llm", "m"), of("llm", "n", 2), of("llm", ""), of("llm", "", 0), of("other", "m")]
        return [p for p in found if namespace in ("", p["metadata"]["namespace"])]

    async def pages(self, kind: Kind, namespace: str = "") -> AsyncIterator[Sequence[dict[str, Any]]]:
        found = await self.list(kind, namespace)
        yield found[:2]
        yield found[2:]


async def used(neighbours: Neighbours, name: str, own: list[dict[str, Any]]) -> dict[str, int]:
    found = await neighbours.inventory("llm", name, own)
    return {fact.name: taken for fact, taken, _ in found.nodes}


async def test_what_is_seen_and_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: clock[0])
    kube = Kube()
    watched = Neighbours(kube, ("llm",), everywhere=False)  # type: ignore[arg-type]
    assert await used(watched, "m", []) == {"a": 3, "b": 0}  # its own pod has gone since
    assert await used(watched, "m", [of("llm", "m"), pod("b", 4)]) == {"a": 4, "b": 4}
    assert await used(watched, "n", [of("llm", "n", 2)]) == {"a": 4, "b": 0}
    assert kube.asked == ["nodes", "pods llm"]
    clock[0] += shared.FRESH
    await used(watched, "n", [])
    assert kube.asked == ["nodes", "pods llm"] * 2
    everywhere = Neighbours(kube, ("llm",), everywhere=True)  # type: ignore[arg-type]
    assert await used(everywhere, "m", [of("llm", "m")]) == {"a": 5, "b": 0}
