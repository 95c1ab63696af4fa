"""Records of analyses: one owned ConfigMap per analysis, from which the verdict can be computed again."""

from __future__ import annotations

import base64
from typing import Any

from ddtree_operator.analysis import record
from ddtree_operator.analysis.types import Verdict
from ddtree_operator.core.units import epoch, iso
from ddtree_operator.handlers.analyses import Kept, Key, Running
from ddtree_operator.handlers.kube import CONFIG_MAP, ApiError, Kube, Object
from ddtree_operator.handlers.read import belongs
from ddtree_operator.rollout.manifests import labels, owner_reference

FILE = "pairs.jsonl.gz"
ANNOTATION_STARTED = "ddtree.dev/started-at"


def object_name(name: str, revision: str, attempt: int, step: int) -> str:
    """Name of the record's ConfigMap."""
    return f"{name}-{revision}-a{attempt}-s{step}"


def to_object(key: Key, run: Running, verdict: Verdict, resource: Object) -> Object:
    """The record of a verdict as a ConfigMap."""
    meta = resource["metadata"]
    notes = {"namespace": key[0], "name": key[1], "revision": key[2], "attempt": str(key[3]), "step": str(key[4])}
    checks = tuple(m for m in verdict.metrics if m.metric.startswith("prometheus/"))
    kept = record.Record(run.policy, tuple(run.pairs), verdict, checks=checks, seed=run.seed, notes=notes)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": object_name(key[1], key[2], key[3], key[4]),
            "namespace": meta["namespace"],
            "labels": labels(meta["name"], role="record", revision=key[2]),
            "annotations": {ANNOTATION_STARTED: iso(run.started_at)},
            "ownerReferences": [owner_reference(resource)],
        },
        "binaryData": {FILE: base64.b64encode(record.dump(kept)).decode()},
        "data": {"outcome": str(verdict.outcome), "reason": verdict.reason},
    }


async def save(kube: Kube, key: Key, run: Running, verdict: Verdict, resource: Object) -> str:
    """Write the record of a verdict; returns its digest. What belongs to another is left alone: ApiError, 409."""
    obj = to_object(key, run, verdict, resource)
    name = obj["metadata"]["name"]
    if await kube.create(obj) is None:
        live = await kube.get(CONFIG_MAP, key[0], name)
        if live is None or not belongs(live, resource["metadata"]["uid"]):
            # An earlier resource's goes with it, and would take with it what is written there.
            raise ApiError(409, f"ConfigMap {name} exists and does not belong to this resource; delete it")
        body: dict[str, Any] = {"binaryData": obj["binaryData"], "data": obj["data"]}
        await kube.patch(CONFIG_MAP, key[0], name, body)
    return record.digest(base64.b64decode(obj["binaryData"][FILE]))


async def load(kube: Kube, key: Key, uid: str) -> Kept | None:
    """What an earlier run of this analysis left, for the resource with this ``uid``; None when there is no usable
    record: one that an earlier resource of the same name owns speaks of other engines.
    """
    obj = await kube.get(CONFIG_MAP, key[0], object_name(key[1], key[2], key[3], key[4]))
    if obj is None or not belongs(obj, uid):
        return None
    try:
        data = base64.b64decode(obj["binaryData"][FILE])
        kept, digest = record.load(data), record.digest(data)
    except (KeyError, ValueError):
        return None
    return Kept(kept, digest, epoch(obj["metadata"].get("annotations", {}).get(ANNOTATION_STARTED)))
