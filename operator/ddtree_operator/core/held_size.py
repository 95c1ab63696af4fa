"""A set keeps its size when ``replicas`` is taken out of the manifest that is applied.

kubectl apply then lets the field fall back to its default, 1, whoever had set it meanwhile, an autoscaler or a person.
Engines take minutes to start: an omission must not end all but one of them. Nobody chose that 1, and this can be seen:
the field belongs to the manager that applied, whose manifest does not have it.
"""

from __future__ import annotations

import json
from typing import Any

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import Emit
from ddtree_operator.core.facts import Observed

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
DEFAULT: int = DDTreeSpec.model_fields["replicas"].default


def left_out(resource: dict[str, Any]) -> bool:
    """Whether ``spec.replicas`` is its default because the manifest applied last leaves it out, and nobody set it."""
    meta = resource["metadata"]
    if (resource.get("spec") or {}).get("replicas") != DEFAULT:
        return False
    try:
        applied = json.loads((meta.get("annotations") or {}).get(LAST_APPLIED, ""))
        if "replicas" in applied["spec"]:
            return False
    except (ValueError, TypeError, KeyError):
        return False
    owners = [e for e in meta.get("managedFields") or [] if "f:replicas" in _fields(e, "f:spec")]
    return bool(owners) and all(
        f"f:{LAST_APPLIED}" in _fields(e, "f:metadata", "f:annotations") and not e.get("subresource") for e in owners
    )


def held_size(resource: dict[str, Any], seen: Observed, status: dict[str, Any]) -> int | None:
    """The size to keep, larger than the spec's; None where the spec holds. ``status`` is the resource's own."""
    if not left_out(resource):
        return None
    pointed = (seen.service_selector or {}).get(LABEL_REVISION, "")
    engines = next((s.replicas for s in seen.sets if s.revision == pointed and not s.baseline), 0)
    size = int(status.get("heldReplicas") or status.get("replicas") or engines)
    return size if size > DEFAULT else None


def told(decided: dict[str, Any], size: int) -> dict[str, Any]:
    """The status with what is held in it."""
    message, words = str(decided.get("message", "")), _words(size)
    if decided.get("phase") == "Stable" and words not in message:  # it may be the status of the look before
        message = f"{message}; {words}"
    return decided | {"heldReplicas": size, "message": message}


def event(size: int) -> Emit:
    """The Event that says so."""
    return Emit("Warning", "ReplicasLeftOut", _words(size))


def _words(size: int) -> str:
    return (
        f"the manifest applied last has no replicas any more, which made them {DEFAULT}: {size} are kept until "
        "somebody sets them (kubectl scale, an autoscaler, the manifest)"
    )


def _fields(entry: dict[str, Any], *path: str) -> dict[str, Any]:
    """A level of a managedFields entry; {} where there is none."""
    node: Any = entry.get("fieldsV1") or {}
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}
