"""Revisions as ControllerRevisions: what the operator remembers outlives its status and itself."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.core.facts import Progress, Revision
from ddtree_operator.rollout.manifests import labels, owner_reference

ANNOTATION_STATE = "ddtree.dev/state"


def to_object(revision: Revision, resource: dict[str, Any]) -> dict[str, Any]:
    """The ControllerRevision of a revision. ``data`` never changes; what became of it stands in one annotation."""
    meta = resource["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": object_name(meta["name"], revision.hash),
            "namespace": meta["namespace"],
            "labels": labels(meta["name"], role="record", revision=revision.hash),
            "annotations": {ANNOTATION_STATE: _state(revision)},
            "ownerReferences": [owner_reference(resource)],
        },
        "revision": revision.number,
        "data": {"spec": revision.spec},
    }


def object_name(deployment: str, hash_: str) -> str:
    """Name of the ControllerRevision."""
    return f"{deployment}-{hash_}"


def state_patch(revision: Revision, version: str) -> dict[str, Any]:
    """Merge patch that brings a ControllerRevision's state up to date, from the version that was read: what was
    decided on older facts must not overwrite newer ones.
    """
    return {"metadata": {"resourceVersion": version, "annotations": {ANNOTATION_STATE: _state(revision)}}}


def _state(revision: Revision) -> str:
    state = asdict(revision)
    for key in ("hash", "number", "spec"):
        del state[key]
    return json.dumps({k: v for k, v in state.items() if v}, sort_keys=True)


def _known(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """What this version of the operator knows of a state; a newer one may have written more."""
    names = {f.name for f in fields(kind)}
    return {k: v for k, v in state.items() if k in names and k not in {"hash", "number", "spec"}}


def from_object(obj: dict[str, Any]) -> Revision | None:
    """The revision, or None for an object that is not one of ours. A damaged state counts as a fresh one."""
    meta = obj.get("metadata", {})
    hash_ = meta.get("labels", {}).get(LABEL_REVISION, "")
    spec = (obj.get("data") or {}).get("spec")
    if not hash_ or not isinstance(spec, dict):
        return None
    try:
        state = _known(Revision, json.loads(meta.get("annotations", {}).get(ANNOTATION_STATE, "{}")))
        progress = Progress(**_known(Progress, state.pop("progress"))) if state.get("progress") else None
        for name in ("alarms", "log"):
            state[name] = tuple(x for x in state.get(name, ()) if isinstance(x, dict))
        return Revision(hash=hash_, number=int(obj.get("revision", 0)), spec=spec, progress=progress, **state)
    except (TypeError, ValueError, AttributeError):
        return Revision(hash=hash_, number=int(obj.get("revision", 0)), spec=spec)
