"""The server in memory over HTTP, as far as kopf lists and watches it, with watches that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from faults.server import Object, Server

KINDS = {
    "/api/v1": [("pods", "Pod"), ("namespaces", "Namespace")],
    "/apis/apiextensions.k8s.io/v1": [("customresourcedefinitions", "CustomResourceDefinition")],
    "/apis/apps/v1": [("deployments", "Deployment"), ("controllerrevisions", "ControllerRevision")],
    "/apis/batch/v1": [("jobs", "Job")],
    "/apis/ddtree.dev/v1alpha1": [("ddtreedeployments", "DDTreeDeployment")],
}
WATCHED = {"pods", "deployments", "controllerrevisions", "jobs", "ddtreedeployments"}
FAULTS = ("none", "closed", "doubled", "reordered", "gone", "refused", "broken", "stalled", "silent")
PACE = 0.05  # seconds for which a watch gathers what it sends


def discovery(path: str) -> Object | None:
    """What the API server has, as clients ask before they watch; None for any other path."""
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = [x.removeprefix("/apis/").split("/") for x in KINDS if x.startswith("/apis/")]
        told = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in versions]
        return {"groups": [{"name": g, "versions": [v], "preferredVersion": v} for g, v in told]}
    if path in KINDS:
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        some = [
            {"name": p, "singularName": "", "namespaced": p in WATCHED, "kind": k, "verbs": verbs}
            for p, k in KINDS[path]
        ]
        return {"groupVersion": path.removeprefix("/apis/").removeprefix("/api/"), "resources": some}
    return None


class Door:
    """Answers lists and watches. ``fault`` is one of FAULTS and may change at any time:

    closed: a stream ends after each event; doubled: each event twice, then an old one again; reordered: shuffled;
    gone: 410, in turns inside the stream and as the answer; refused: 403; broken: an error inside the stream;
    stalled: streams that were open before stand, and nothing comes; silent: so do all. ``faults`` counts what was done
    to streams. Of kinds in ``mute`` nothing comes, whatever the fault.
    """

    def __init__(self, server: Server, seed: int = 0) -> None:
        self.fault = "none"
        self._open = self._stalled = 0  # streams that were opened; those of them that stall
        self.faults = 0
        self.mute: set[str] = set()
        self.closed = False  # ends every stream
        self._server = server
        self._events: list[tuple[int, str, str, Object]] = []  # version, plural, type, object
        self._rng = random.Random(seed)
        server.told = self._note

    def stall(self) -> None:
        """Let every stream that is open say nothing more."""
        self.fault, self._stalled = "stalled", self._open
        self.faults += self._open

    def _note(self, plural: str, kind: str, obj: Object) -> None:
        self._events.append((int(obj["metadata"]["resourceVersion"]), plural, kind, obj))

    async def start(self) -> tuple[web.AppRunner, str]:
        """Listen on loopback; the runner's ``cleanup`` ends it."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        found = discovery(request.path)
        if found is not None:
            return web.json_response(found)
        if self.fault == "refused":
            self.faults += 1
            return self._status(403, "Forbidden")
        plural = request.path.rsplit("/", 1)[-1]
        if request.query.get("watch") != "true":
            items = [o for (p, _, _), o in sorted(self._server.objects.items()) if p == plural]
            return web.json_response({"items": items, "metadata": {"resourceVersion": str(self._server.version)}})
        if self.fault == "gone" and self._rng.random() < 0.5:
            self.faults += 1
            return self._status(410, "Expired")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with suppress(ConnectionError):
            async for line in self._stream(plural, int(request.query["resourceVersion"])):
                await response.write(json.dumps(line).encode() + b"\n")
        return response

    @staticmethod
    def _status(code: int, reason: str) -> web.Response:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        return web.json_response({**body, "message": f"injected {code}"}, status=code)

    async def _stream(self, plural: str, since: int) -> AsyncIterator[Object]:
        quiet, self._open = 0, self._open + 1
        number = self._open
        while not self.closed:
            await asyncio.sleep(PACE)
            fault = self.fault
            if fault == "stalled" and number <= self._stalled:
                continue
            if fault == "silent" or plural in self.mute:
                continue
            if fault == "refused":
                return
            new = [e for e in self._events if e[1] == plural and e[0] > since]
            quiet = 0 if new else quiet + 1
            if fault in {"gone", "broken"} and (new or quiet > 10):  # what came meanwhile is lost to the stream
                self.faults += 1
                code = 410 if fault == "gone" else 500
                yield {"type": "ERROR", "object": {"kind": "Status", "code": code, "reason": "Injected"}}
                return
            since = max([since, *(e[0] for e in new)])
            sent = [{"type": kind, "object": obj} for _, _, kind, obj in new]
            if fault == "doubled":
                older = [e for e in self._events if e[1] == plural and e[2] != "DELETED"]
                again = [{"type": k, "object": o} for _, _, k, o in self._rng.sample(older, min(1, len(older)))]
                sent = [x for one in sent for x in (one, one)] + again * bool(sent)
            elif fault == "reordered":
                self._rng.shuffle(sent)
            elif fault == "closed":
                sent = sent[:1]
            self.faults += len(new) if fault in {"doubled", "reordered", "closed"} else 0
            for one in sent:
                yield one
            if fault == "closed" and sent:
                return
