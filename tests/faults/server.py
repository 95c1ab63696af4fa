"""An API server in memory, under the operator's own client: versions, merge patches, selectors, owners, and faults.

It stands where the network begins (``Kube``'s connection), so that all of the operator above it is real.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

Object = dict[str, Any]
NAMES = {"deployments": "Deployment", "pods": "Pod", "services": "Service", "controllerrevisions": "ControllerRevision"}


class Crash(BaseException):
    """The operator's process ends here."""


class BrokenError(Exception):
    """The connection ends without an answer."""


class Answer:
    """What the client gets."""

    def __init__(self, status: int, body: Object) -> None:
        self.status, self.reason, self._body = status, str(status), body

    async def read(self) -> bytes:
        """The body."""
        return json.dumps(self._body).encode()


def merge(base: Any, patch: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    out = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge(out.get(key), value)
    return out


def json_patch(obj: Object, operations: list[Object]) -> Object:
    """JSON patch, as far as the operator uses it. Raises ValueError for a test that fails."""
    out = copy.deepcopy(obj)
    for op in operations:
        *way, last = [x.replace("~1", "/").replace("~0", "~") for x in op["path"].split("/")[1:]]
        at: Any = out
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        value = copy.deepcopy(op.get("value"))
        index: Any = last
        if isinstance(at, list):
            index = len(at) if last == "-" else int(last)
            if op["op"] == "add":
                at.insert(index, value)
                continue
        if op["op"] == "test":
            if at[index] != value:
                raise ValueError(f"testing value {op['path']} failed")
        elif op["op"] == "remove":
            del at[index]
        else:
            at[index] = value
    return out


class Server:
    """Objects by (plural, namespace, name). Events are counted and not kept.

    ``fault`` is asked before each write with its number (from 1) and may return: None, "crash" (after the write),
    "409", "429", "500", "lost" (no answer, not written) or "late" (no answer, but written).
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = 100
        self.writes = 0
        self.log: list[str] = []
        self.events: list[Object] = []
        self.fault: Callable[[int], str | None] = lambda number: None
        self.stale: Callable[[], int] = lambda: 0  # how many versions reads are behind
        self._history: list[dict[tuple[str, str, str], Object]] = []
        self.watcher: Callable[[], None] = lambda: None
        self.told: Callable[[str, str, Object], None] = lambda plural, kind, obj: None  # each change, as a watch has it

    # the client's interface ----------------------------------------------------------------------------------------

    async def param_serialize(self, method: str, path: str, **more: Any) -> tuple[Any, ...]:
        """As kubernetes.aio's ApiClient."""
        return method, path, {}, more.get("body"), dict(more.get("query_params") or [])

    async def call_api(self, method: str, path: str, **more: Any) -> Answer:
        """As kubernetes.aio's ApiClient; ``post_params`` carries the query here."""
        body = json.loads(more["body"]) if isinstance(more["body"], str) else more["body"]
        plural, namespace, name, sub = self._place(path)
        if method == "GET":
            return self._read(plural, namespace, name, sub, more["post_params"])
        if plural == "events":  # best effort, by design: they take no part in crashes
            self.events.append(body)
            return Answer(201, body)
        self.writes += 1
        fault = self.fault(self.writes)
        if fault in {"409", "422", "429", "500"}:
            return Answer(int(fault), {"message": f"injected {fault}"})
        if fault == "lost":
            raise BrokenError("lost")
        answer = self._write(method, plural, namespace, name, sub, body)
        self.log.append(f"{method} {plural}/{name or body['metadata']['name']} {answer.status}")
        self.watcher()
        if fault == "late":
            raise BrokenError("late")
        if fault == "crash":
            raise Crash
        return answer

    @staticmethod
    def _place(path: str) -> tuple[str, str, str, str]:
        parts = [unquote(x) for x in path.strip("/").split("/")]
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        plural, name, sub = (*parts, "", "")[:3]
        return plural, namespace, name, sub

    def _read(self, plural: str, namespace: str, name: str, sub: str, query: dict[str, str]) -> Answer:
        if sub == "log":
            return Answer(200, {})
        behind = self.stale()
        objects = self._history[-1 - behind] if behind and len(self._history) > behind else self.objects
        if name:
            found = objects.get((plural, namespace, name))
            return Answer(200, found) if found is not None else Answer(404, {"message": f"{name} not found"})
        items = [o for (p, ns, _), o in sorted(objects.items()) if p == plural and namespace in ("", ns)]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            key, _, value = term.partition("=")
            items = [o for o in items if o["metadata"].get("labels", {}).get(key) == value]
        return Answer(200, {"items": items, "metadata": {}})

    # writes --------------------------------------------------------------------------------------------------------

    def _write(self, method: str, plural: str, namespace: str, name: str, sub: str, body: Object) -> Answer:
        key = (plural, namespace, name or (body or {}).get("metadata", {}).get("name", ""))
        live = self.objects.get(key)
        if method == "POST":
            if live is not None:
                return Answer(409, {"message": f"{key[2]} already exists"})
            return Answer(201, self.put(plural, copy.deepcopy(body)))
        if live is None:
            return Answer(404, {"message": f"{name} not found"})
        if method == "DELETE":
            self.remove(key)
            return Answer(200, {})
        if isinstance(body, list):
            try:
                return Answer(200, self.put(plural, json_patch(live, body)))
            except (ValueError, KeyError, IndexError) as error:
                return Answer(422, {"message": f"the server rejected our request: {error}"})
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != live["metadata"]["resourceVersion"]:
            return Answer(409, {"message": "the object has been modified"})
        change = {"status": body.get("status")} if sub == "status" else {k: v for k, v in body.items() if k != "status"}
        return Answer(200, self.put(plural, merge(live, change)))

    def put(self, plural: str, obj: Object) -> Object:
        """Store an object; what does not change keeps its version."""
        meta = obj["metadata"]
        key = (plural, meta.get("namespace", ""), meta["name"])
        live = self.objects.get(key)
        same = live is not None and {**live, "metadata": {**live["metadata"], "resourceVersion": ""}} == {
            **obj,
            "metadata": {**meta, "resourceVersion": ""},
        }
        if same and live is not None:
            return live
        self.version += 1
        meta.setdefault("uid", f"uid-{self.version}")
        generation = live["metadata"].get("generation", 0) if live else 0
        changed = live is None or live.get("spec") != obj.get("spec")
        obj = {**obj, "metadata": {**meta, "resourceVersion": str(self.version), "generation": generation + changed}}
        self._remember()
        self.objects[key] = obj
        self.told(plural, "MODIFIED" if live else "ADDED", obj)
        return obj

    def remove(self, key: tuple[str, str, str]) -> None:
        """Delete an object and what it owns."""
        self._remember()
        gone = self.objects.pop(key)
        uid = gone["metadata"]["uid"]
        self.version += 1
        meta = {**gone["metadata"], "resourceVersion": str(self.version)}
        self.told(key[0], "DELETED", {**gone, "metadata": meta})
        for other, obj in list(self.objects.items()):
            if any(o.get("uid") == uid for o in obj["metadata"].get("ownerReferences", [])) and other in self.objects:
                self.remove(other)

    def _remember(self) -> None:
        self._history.append(dict(self.objects))
        del self._history[:-40]
