"""A cluster in memory for the command line, and resources in the states it shows."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from ddtreectl.exits import CliError, Exit

Object = dict[str, Any]
IMAGE = "registry.example/ddtree/engine@sha256:" + "ab12cd34ef56" + "0" * 52


class FakeCluster:
    """Implements ddtreectl.kube.Cluster. ``script`` is what a watch shows next: objects, or errors to raise."""

    def __init__(self, *objects: Object, namespace: str = "llm", script: list[Any] | None = None) -> None:
        self.objects = {o["metadata"]["name"]: o for o in objects}
        self.namespace, self.user = namespace, "alice"
        self.script = script or []
        self.patches: list[tuple[str, str, str, bool]] = []
        self.record_maps: list[Object] = []
        self.jobs: dict[str, tuple[Object, list[Object]]] = {}  # name -> Job and its pods
        self.job_script: dict[str, list[tuple[Object, list[Object]]]] = {}  # what each next look at a Job shows
        self.logs: dict[str, list[str]] = {}  # pod -> lines

    def all(self, everywhere: bool = False) -> list[Object]:
        return [deepcopy(o) for o in self.objects.values()]

    def get(self, name: str) -> Object:
        if name not in self.objects:
            raise CliError(f'no DDTreeDeployment "{name}" in namespace "{self.namespace}"', Exit.NOT_FOUND)
        return deepcopy(self.objects[name])

    def annotate(self, name: str, key: str, value: str, dry_run: bool = False) -> Object:
        self.patches.append((name, key, value, dry_run))
        return self.get(name)

    def changes(self, name: str, seconds: float) -> Iterator[Object]:
        yield self.get(name)
        while self.script:
            step = self.script.pop(0)
            if isinstance(step, Exception):
                raise step
            self.objects[name] = step
            yield deepcopy(step)

    def records(self, name: str) -> list[Object]:
        return self.record_maps

    def builds(self, name: str) -> list[Object]:
        return [job for job, _ in self.jobs.values()]

    def job(self, job: str) -> tuple[Object | None, list[Object]]:
        steps = self.job_script.get(job)
        if steps:
            self.jobs[job] = steps.pop(0)
        return self.jobs.get(job, (None, []))

    def log(self, pod: str, follow: bool) -> Iterator[str]:
        yield from self.logs[pod]

    def versions(self) -> dict[str, Any]:
        return {"kubernetes": "v1.36.3", "api": ["ddtree.dev/v1alpha1"]}


def resource(name: str = "qwen3-8b", *, generation: int = 3, observed: int | None = 3, **status: Any) -> Object:
    status = {"observedGeneration": observed, **status} if observed is not None else status
    return {
        "apiVersion": "ddtree.dev/v1alpha1",
        "kind": "DDTreeDeployment",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "generation": generation,
            "creationTimestamp": "2026-11-29T10:00:00Z",
            "resourceVersion": "1",
        },
        "spec": {"replicas": 4, "model": {"path": "Qwen/Qwen3-8B"}},
        "status": status,
    }


STABLE = {"revision": "3f2a1b9c0d", "algorithm": "DFLASH", "acceptLength": "2.11", "image": IMAGE}
CANARY = {
    "revision": "8c1d2e3f40",
    "algorithm": "DDTREE/64",
    "image": IMAGE,
    "stepIndex": 2,
    "stepCount": 7,
    "startedAt": "2026-11-29T11:48:00Z",
}
HISTORY = [
    {
        "revision": "3f2a1b9c0d",
        "number": 1,
        "result": "promoted",
        "at": "2026-11-28T12:00:00Z",
        "algorithm": "DFLASH",
        "acceptLength": "2.11",
        "throughput": "41.20",
        "by": "operator",
        "reason": "every step passed",
        "image": IMAGE,
    },
    {
        "revision": "77aa88bb99",
        "number": 2,
        "result": "rolledBack",
        "at": "2026-11-29T09:00:00Z",
        "algorithm": "DDTREE/128",
        "by": "operator",
        "reason": "analysis failed: parity: 3 of 40 outputs differ",
    },
    {"revision": "8c1d2e3f40", "number": 3, "result": "inProgress", "algorithm": "DDTREE/64"},
]
METRICS = [
    {
        "metric": "acceptLength",
        "outcome": "pass",
        "baseline": 2.11,
        "canary": 2.65,
        "estimate": 0.256,
        "low": 0.201,
        "high": 0.31,
        "threshold": -0.03,
        "pairs": 34,
        "reason": "2.65 against 2.11",
    },
    {
        "metric": "throughput",
        "outcome": "notYet",
        "baseline": 41.2,
        "canary": 44.0,
        "estimate": 0.068,
        "low": -0.08,
        "threshold": -0.05,
        "pairs": 34,
    },
    {
        "metric": "parity",
        "outcome": "pass",
        "baseline": 34,
        "canary": 34,
        "estimate": 0,
        "low": 0,
        "high": 0,
        "threshold": 0,
        "pairs": 34,
    },
    {"metric": "prometheus/ttft", "outcome": "pass", "canary": 0.31, "high": 0.8},
]


def analyzing(**more: Any) -> Object:
    status = {
        "phase": "Analyzing",
        "message": "throughput: not yet told from -5.0%",
        "revision": "8c1d2e3f40",
        "stable": STABLE,
        "canary": CANARY,
        "baseline": {"revision": "3f2a1b9c0d", "kind": "stable"},
        "step": "3/7 analysis",
        "weight": 0,
        "acceptLength": "2.11",
        "replicas": 4,
        "readyReplicas": 4,
        "analysis": {"outcome": "notYet", "pairs": 34, "errors": 1, "reason": "not yet", "metrics": METRICS},
        "history": HISTORY,
        "blocked": [{"revision": "77aa88bb99", "reason": "parity", "at": "2026-11-29T09:00:00Z"}],
    }
    return resource(**{**status, **more})


def stable(**more: Any) -> Object:
    serving = {**STABLE, "revision": "8c1d2e3f40", "algorithm": "DDTREE/64", "acceptLength": "2.65"}
    status = {
        "phase": "Stable",
        "message": "4/4 engines ready",
        "revision": "8c1d2e3f40",
        "stable": serving,
        "acceptLength": "2.65",
        "readyReplicas": 4,
        "history": [*HISTORY[:2], {**HISTORY[2], "result": "promoted", "at": "2026-11-29T12:00:00Z"}],
    }
    return resource(**{**status, **more})


def rolled_back(**more: Any) -> Object:
    status = {
        "phase": "RolledBack",
        "message": "analysis failed: parity: 3 of 40 outputs differ",
        "revision": "8c1d2e3f40",
        "stable": STABLE,
        "acceptLength": "2.11",
        "readyReplicas": 4,
        "history": [*HISTORY[:2], {**HISTORY[2], "result": "rolledBack", "reason": "analysis failed: parity"}],
        "blocked": [{"revision": "8c1d2e3f40", "reason": "analysis failed: parity", "at": "2026-11-29T12:00:00Z"}],
    }
    return resource(**{**status, **more})
