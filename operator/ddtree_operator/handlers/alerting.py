"""Alerts recorded on the ControllerRevision that they name, from where every replica and every restart reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ddtree_operator.alerts import ledger
from ddtree_operator.alerts.notification import Alert
from ddtree_operator.alerts.receiver import Result, StoreError, Target
from ddtree_operator.api.names import FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY
from ddtree_operator.handlers import memory
from ddtree_operator.handlers.kube import REVISION, ApiError, Kube

PATIENCE = 6.0  # seconds for one revision; Alertmanager waits for the answer
PAUSES = (0.05, 0.2, 0.5, 1.0)  # between attempts


class Recorder:
    """Writes alerts. Of two replicas that get the same notification one records it, the other sees that it is there."""

    def __init__(self, kube: Kube, wake: Callable[[str, str], None]) -> None:
        self._kube = kube
        self._wake = wake

    async def store(self, target: Target, alerts: Sequence[Alert]) -> list[tuple[Result, str]]:
        """Record firing alerts about one revision. Raises StoreError when the API server does not take them."""
        last: ApiError | None = None
        try:
            async with asyncio.timeout(PATIENCE):
                for pause in (*PAUSES, None):
                    try:
                        return await self._once(target, alerts)
                    except ApiError as error:
                        last = error
                    if pause is not None:
                        await asyncio.sleep(pause)
        except TimeoutError:
            pass
        raise StoreError(str(last or f"no answer within {PATIENCE:g} s"))

    async def _once(self, target: Target, alerts: Sequence[Alert]) -> list[tuple[Result, str]]:
        namespace, name, hash_ = target
        record = memory.object_name(name, hash_)
        obj = await self._kube.get(REVISION, namespace, record)
        labels = obj["metadata"].get("labels", {}) if obj else {}
        revision = memory.from_object(obj) if obj else None
        ours = labels.get(LABEL_MANAGED_BY) == FIELD_MANAGER and labels.get(LABEL_DEPLOYMENT) == name
        if obj is None or revision is None or not ours or revision.hash != hash_:
            return [(Result.IGNORED, f"{namespace}/{name} has no revision {hash_}")] * len(alerts)
        if revision.blocked:
            return [(Result.IGNORED, f"revision {hash_} is {revision.result} already")] * len(alerts)
        known = ledger.read(obj["metadata"].get("annotations", {}).get(ledger.ANNOTATION_ALERTS), hash_)
        seen = {f.id for f in known} | {str(x.get("id")) for x in revision.alarms}
        text = ledger.add(known, [a for a in alerts if a.id not in seen], time.time())
        if text is not None:
            # With the version that was read: of two writers one has to look again.
            version = {"resourceVersion": obj["metadata"]["resourceVersion"]}
            body = {"metadata": {**version, "annotations": {ledger.ANNOTATION_ALERTS: text}}}
            await self._kube.patch(REVISION, namespace, record, body)
            self._wake(namespace, name)
        return [(Result.DUPLICATE if a.id in seen else Result.RECORDED, "") for a in alerts]
