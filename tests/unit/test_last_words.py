"""What a crashed engine said last: from its log, and from the kubelet's excerpt where the log is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_operator.core.facts import EngineSet, PodFact
from ddtree_operator.handlers.kube import Kube
from ddtree_operator.handlers.observe import Observer

pytestmark = pytest.mark.unit

GONE = "unable to retrieve container logs for containerd://6a7033cfc0d9"


class Api:
    """An API server that answers each question about a log with the next text."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def param_serialize(self, method: str, path: str, **_: Any) -> tuple[Any, ...]:
        return method, path, {}, None, []

    async def call_api(self, *_: Any, **__: Any) -> Any:
        text = self.texts.pop(0)

        async def read() -> bytes:
            return text.encode()

        return SimpleNamespace(status=200, read=read)


def last_words(observer: Observer) -> str:
    crashed = PodFact("p", exit_code=1, exit_message="RuntimeError: the excerpt", restarts=3)
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"name": "engine", "state": {"waiting": {}}}]}}
    work = observer._with_last_words((EngineSet("m", "r", pods=(crashed,)),), [pod], "llm")
    return asyncio.run(work)[0].pods[0].exit_message


def test_a_log_that_the_kubelet_has_lost_is_no_log() -> None:
    observer = Observer.__new__(Observer)
    api: Any = Api(GONE, "Traceback\nRuntimeError: no kernel image\n")
    observer._kube, observer._last_words = Kube(api), {}
    assert last_words(observer) == "RuntimeError: the excerpt"
    assert last_words(observer).endswith("RuntimeError: no kernel image\n")  # asked again
    assert last_words(observer).endswith("RuntimeError: no kernel image\n")  # kept: a third question has no answer
