"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddtreectl import __main__, kube
from ddtreectl.verbs import status as status_verb
from unit.ddt_fake import FakeCluster, analyzing

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line against a fake cluster; returns exit code, stdout, stderr."""

    def go(line: str, cluster: FakeCluster | None = None) -> tuple[int, str, str]:
        fake = cluster or FakeCluster(analyzing())

        def connect(namespace: str | None = None, *_: Any, **__: Any) -> FakeCluster:
            fake.namespace = namespace or fake.namespace
            return fake

        monkeypatch.setattr(kube, "connect", connect)
        monkeypatch.setattr(status_verb, "RETRY_SECONDS", 0.0)
        code = __main__.run(line.split())
        out = capsys.readouterr()
        return code, out.out, out.err

    return go
