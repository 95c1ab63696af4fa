"""Notifications as Alertmanager sends them, and a ControllerRevision store to record them in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from ddtree_operator.api.names import FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, LABEL_REVISION
from ddtree_operator.handlers.kube import ApiError, Kind

Object = dict[str, Any]

TOKEN = "correct-horse-battery-staple"
REVISION = "0123456789"
BEGAN = "2026-11-30T01:00:00.5Z"


def alert(*, status: str = "firing", fingerprint: str = "9f2c", starts: str = BEGAN, **labels: str) -> Object:
    """One alert about revision REVISION of llm/m."""
    named = {"namespace": "llm", "ddtreedeployment": "m", "revision": REVISION, "alertname": "DDTreeAcceptLengthLow"}
    return {
        "status": status,
        "labels": named | labels,
        "annotations": {"summary": "accept length 1.4 instead of 2.5"},
        "startsAt": starts,
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "",
        "fingerprint": fingerprint,
    }


def notification(*alerts: Object, **more: Any) -> bytes:
    """A whole webhook body."""
    body = {"version": "4", "groupKey": '{}:{alertname="x"}', "truncatedAlerts": 0, "status": "firing"}
    return json.dumps(body | {"receiver": "ddtree", "alerts": list(alerts)} | more).encode()


class Revisions:
    """The API server, as far as the recorder uses it: one kind, versions, conflicts, and failures on demand."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.writes = 0
        self.fail: Callable[[str, str], ApiError | None] = lambda verb, name: None

    def put(self, namespace: str, name: str, hash_: str, state: Object | None = None) -> None:
        """A revision as the operator keeps it."""
        labels = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: name, LABEL_REVISION: hash_}
        notes = {"ddtree.dev/state": json.dumps(state or {"result": "promoted", "at": 1.0})}
        meta = {"name": f"{name}-{hash_}", "labels": labels, "annotations": notes, "resourceVersion": "1"}
        self.objects[namespace, f"{name}-{hash_}"] = {"metadata": meta, "revision": 2, "data": {"spec": {}}}

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """As Kube.get."""
        if error := self.fail("get", name):
            raise error
        return copy.deepcopy(self.objects.get((namespace, name)))

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        """As Kube.patch. A failure named "after" takes effect and then fails, like a time-out."""
        error = self.fail("patch", name)
        if error is not None and str(error) != "after":
            raise error
        meta = self.objects[namespace, name]["metadata"]
        if body["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise ApiError(409, "the object has been modified")
        meta["annotations"] |= body["metadata"]["annotations"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)
        self.writes += 1
        if error is not None:
            raise error
        return self.objects[namespace, name]

    def recorded(self, namespace: str = "llm", name: str = f"m-{REVISION}") -> list[Object]:
        """Alerts recorded on a revision."""
        rows: list[Object] = json.loads(
            self.objects[namespace, name]["metadata"]["annotations"].get("ddtree.dev/alerts", "[]")
        )
        return rows
