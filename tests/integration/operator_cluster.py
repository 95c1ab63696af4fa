"""The operator as users get it: installed by the chart from its own image, in a real cluster, with simulated engines.

What is here: starting it, writing resources whose engines play a script, waiting for what becomes of them, and reading
objects and watches without a process per look.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_operator.api import names
from integration.ddt_api import ROOT, Api

Object = dict[str, Any]

RELEASE = "ddtree-it"
SYSTEM = "ddtree-it"
BUILDER = "ddtree-it-build"
NOWHERE = "10.88.0.1:5999"  # nothing listens there
ALERTS_IP = "10.96.200.202"
LIVE_NAME = "live"  # the resource whose users' prompts the operator may read
ALERTS_TOKEN = "only-for-these-tests-0123456789"
NAMESPACES = (
    "op-alerts",
    "op-story",
    "op-commands",
    "op-inputs",
    "op-quota",
    "op-killed",
    "op-deleted",
    "op-live",
    "op-way-back",
    "op-swap",
    "op-replicas",
    "op-gateway",
    "op-slow",
    "op-nodes",
)
PATIENCE = 240.0  # seconds; the machine may be busy
CHART = ROOT / "charts/ddtree-operator"
DDTREES = f"/apis/{names.GROUP}/{names.VERSION}"

# Enough for a verdict on acceptance; throughput of engines that only sleep says little, so its margin is wide.
QUICK: Object = {"maxTokens": 12, "minPairs": 6, "throughput": {"nonInferiority": "60%"}}


@dataclass
class Installed:
    """A cluster with the operator in it."""

    env: dict[str, str]
    images: dict[str, str]
    wheel: dict[str, str]  # url and sha256 of the simulated engine's wheel
    reader: Reader

    @property
    def registry(self) -> str:
        """The registry as pods know it."""
        return self.env["DDTREE_REGISTRY"]

    def api(self, namespace: str) -> Api:
        """kubectl and ddtreectl in a namespace."""
        return Api(self.env, namespace)

    def spec(self, algorithm: str = "DFLASH", *, sim: Object | None = None, **more: Any) -> Object:
        """A spec whose engines play ``sim`` (SIM_ variables without the prefix); ``more`` is laid over it."""
        speculative: Object = {"algorithm": algorithm} | ({"budget": 16} if algorithm == "DDTREE" else {})
        engine: Object = {"image": self.images["simengine"], "speculative": speculative}
        if sim:
            env = [{"name": f"SIM_{k}", "value": str(v)} for k, v in sorted(sim.items())]
            engine["podTemplate"] = {"spec": {"containers": [{"name": "engine", "env": env}]}}
        base: Object = {
            "model": {"path": "sim/model"},
            "drafter": {"path": "sim/drafter"},
            "engine": engine,
            "placement": {"gpu": {"perReplica": 0}, "pin": "none"},
            "canary": {"analysis": QUICK},
            "traffic": {"drain": "3s"},
        }
        return laid_over(base, more)

    def built(self, algorithm: str = "DFLASH", *, series: str = "plain", **more: Any) -> Object:
        """A spec whose engine image is built in the cluster, from the simulated engine's wheel and a series."""
        spec = self.spec(algorithm, **more)
        spec["engine"].pop("image")
        build = {"sglangWheel": self.wheel, "series": {"configMapRef": series}}
        spec["engine"]["build"] = laid_over(build, spec["engine"].get("build") or {})
        return spec

    def apply(self, namespace: str, name: str, spec: Object) -> None:
        """kubectl apply; must be accepted."""
        done = self.api(namespace).apply(spec, name=name, dry=False)
        assert done.returncode == 0, done.stderr

    def get(self, namespace: str, name: str) -> Object:
        """The resource."""
        found = self.reader.get(f"{DDTREES}/namespaces/{namespace}/{names.PLURAL}/{name}")
        assert found is not None, f"{namespace}/{name} is gone"
        return found

    def status(self, namespace: str, name: str) -> Object:
        """Its status; {} while the operator has not looked at the spec as it stands."""
        found = self.get(namespace, name)
        status: Object = found.get("status") or {}
        return status if status.get("observedGeneration") == found["metadata"]["generation"] else {}

    def children(self, namespace: str, kind: str, labels: str = "", prefix: str = "/api/v1") -> list[Object]:
        """Objects of a kind in a namespace."""
        query = {"labelSelector": labels} if labels else {}
        found = self.reader.get(f"{prefix}/namespaces/{namespace}/{kind}", query)
        return list((found or {}).get("items", []))

    def engines(self, namespace: str, name: str) -> list[Object]:
        """Deployments of engines of one resource."""
        return self.children(namespace, "deployments", f"{names.LABEL_DEPLOYMENT}={name}", "/apis/apps/v1")

    def events(self, namespace: str, name: str, reason: str = "") -> list[Object]:
        """Events on one resource, oldest first."""
        mine = [e for e in self.children(namespace, "events") if e["involvedObject"].get("name") == name]
        mine = [e for e in mine if e["involvedObject"].get("kind") == names.KIND]
        return [e for e in mine if reason in ("", e["reason"])]

    def until(self, look: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        """First true answer of ``look``. What failed is told with the operator's last words."""
        began = time.monotonic()
        while True:
            found = look()
            if found:
                print(f"{time.monotonic() - began:.1f} s until {what}")  # for docs/failure-modes.md
                return found
            if time.monotonic() > began + seconds:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.last_words()}")
            time.sleep(0.2)

    def reaches(self, namespace: str, name: str, *phases: str, saying: str = "", seconds: float = PATIENCE) -> Object:
        """The status once the resource is in one of these phases, with ``saying`` in its message."""
        seen: Object = {}

        def look() -> Object | None:
            nonlocal seen
            seen = self.status(namespace, name)
            return seen if seen.get("phase") in phases and saying in seen.get("message", "") else None

        try:
            return dict(self.until(look, f"{namespace}/{name} reaches {' or '.join(phases)} {saying!r}", seconds))
        except AssertionError as error:
            raise AssertionError(f"{error}\nit is {seen.get('phase')}: {seen.get('message')}") from None

    def last_words(self) -> str:
        """The end of the operator's log."""
        return self.api(SYSTEM).kubectl("logs", "deployment/ddtree-it", "--tail=40", check=False).stdout

    def kill_operator(self) -> None:
        """End the operator's pod as fast as Kubernetes does (SIGKILL 2 s after SIGTERM) and wait for the next one."""
        api = self.api(SYSTEM)
        selector = "app.kubernetes.io/instance=" + RELEASE + ",app.kubernetes.io/name=ddtree-operator"
        old = {p["metadata"]["uid"] for p in self.children(SYSTEM, "pods", selector)}
        began = time.monotonic()
        api.kubectl("delete", "pod", "-l", selector, "--grace-period=0", "--force", "--wait=false")

        def replaced() -> bool:
            pods = [p for p in self.children(SYSTEM, "pods", selector) if p["metadata"]["uid"] not in old]
            return any(c["status"] == "True" for p in pods for c in conditions(p) if c["type"] == "Ready")

        self.until(replaced, "a new operator pod is ready")
        print(f"operator killed: the next one was ready after {time.monotonic() - began:.1f} s")


def processes(pod: str) -> list[int]:
    """Processes on this machine of an operator's pod, by its name; [] when the cluster is elsewhere."""
    mark, found = f"\0POD_NAME={pod}\0".encode(), []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def conditions(obj: Object) -> list[Object]:
    """Conditions in an object's status."""
    return list(obj.get("status", {}).get("conditions") or [])


def condition(status: Object, kind: str) -> Object:
    """One condition of a resource's status; {} without it."""
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def laid_over(base: Object, over: Object) -> Object:
    """``over`` merged into ``base``: mappings by key, everything else replaced."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = laid_over(out[key], value) if both else value
    return out


class Reader:
    """GETs and watches by the kubeconfig, without a process for each."""

    def __init__(self, kubeconfig: str) -> None:
        from kubernetes import config

        self._client = config.new_client_from_config(kubeconfig)

    def _ask(self, path: str, query: dict[str, str], timeout: float) -> Any:
        verb, url, headers, _, _ = self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        return self._client.call_api(verb, url, header_params=headers, _request_timeout=timeout)

    def get(self, path: str, query: dict[str, str] | None = None) -> Object | None:
        """The object, or None when there is none."""
        answer = self._ask(path, query or {}, 30)
        data = json.loads(answer.read())
        if answer.status == 404:
            return None
        assert answer.status < 300, f"{path}: {data.get('message')}"
        return dict(data)

    def watch(self, path: str, seconds: int, version: str) -> Iterator[tuple[str, Object]]:
        """(type, object) of every change after ``version``, for so many seconds."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        answer = self._ask(path, query, seconds + 30)
        try:
            for line in answer.response:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            answer.response.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.rest_client.pool_manager.clear()


@dataclass
class Recording:
    """Every change of some collections of a namespace, in the order of etcd."""

    changes: list[tuple[int, str, str, Object]] = field(default_factory=list)  # version, collection, type, object
    heard: dict[int, float] = field(default_factory=dict)  # version -> epoch seconds at which it was heard of

    def of(self, collection: str) -> list[tuple[int, str, Object]]:
        """Changes of one collection: version, type, object."""
        mine = [(v, t, o) for v, c, t, o in self.changes if c == collection]
        return sorted(mine, key=lambda x: x[0])

    def pods_at(self, version: int) -> dict[str, Object]:
        """Pods by name as they were at that version."""
        pods: dict[str, Object] = {}
        for at, kind, pod in self.of("pods"):
            if at > version:
                break
            if kind == "DELETED":
                pods.pop(pod["metadata"]["name"], None)
            else:
                pods[pod["metadata"]["name"]] = pod
        return pods


@contextmanager
def recording(reader: Reader, namespace: str) -> Iterator[Recording]:
    """Record pods, Services and Deployments of a namespace while the block runs."""
    made = Recording()
    over = threading.Event()
    lock = threading.Lock()
    collections = {"pods": "/api/v1", "services": "/api/v1", "deployments": "/apis/apps/v1"}

    def record(collection: str, prefix: str) -> None:
        def note(kind: str, obj: Object) -> str:
            version = str(obj["metadata"]["resourceVersion"])
            with lock:
                made.changes.append((int(version), collection, kind, obj))
                made.heard.setdefault(int(version), time.time())
            return version

        path = f"{prefix}/namespaces/{namespace}/{collection}"
        listed = reader.get(path) or {}
        version = listed["metadata"]["resourceVersion"]
        for obj in listed["items"]:
            note("ADDED", obj)
        while not over.is_set():
            for kind, obj in reader.watch(path, 2, version):
                version = note(kind, obj)

    threads = [threading.Thread(target=record, args=item, daemon=True) for item in collections.items()]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
