"""From Kubernetes objects to the core's facts. Pure: objects in, facts out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from ddtree_operator.api.actions import ActionRequest
from ddtree_operator.api.names import (
    ANNOTATION_ACTION,
    ENGINE_CONTAINER,
    ENGINE_PORT,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_ROLE,
)
from ddtree_operator.core.engine_errors import NOT_PULLED, pods_refused, pull_failure
from ddtree_operator.core.facts import EngineSet, PodFact
from ddtree_operator.core.units import clip, epoch
from ddtree_operator.rollout.manifests import ANNOTATION_SWITCHED_AT

Object = dict[str, Any]

# Waiting reasons that are part of a normal start.
_CALM = {"ContainerCreating", "PodInitializing"}


def engine_sets(
    deployments: list[Object], pods: list[Object], lost: Mapping[str, str] = MappingProxyType({})
) -> tuple[EngineSet, ...]:
    """Engine sets with their pods. ``lost``: nodes that do not report, and what to say of each."""
    out = []
    for deployment in deployments:
        meta = deployment["metadata"]
        own = deployment["spec"]["selector"]["matchLabels"]
        if meta.get("labels", {}).get(LABEL_ROLE) not in {"engine", "baseline"} or meta.get("deletionTimestamp"):
            continue
        mine = [p for p in pods if own.items() <= p["metadata"].get("labels", {}).items()]
        out.append(
            EngineSet(
                name=meta["name"],
                revision=meta["labels"].get(LABEL_REVISION, ""),
                baseline=meta["labels"][LABEL_ROLE] == "baseline",
                replicas=int(deployment["spec"].get("replicas", 1)),
                pods=tuple(sorted((pod_fact(p, lost) for p in mine), key=lambda p: p.name)),
                failure=_failure(deployment),
                image=_image(deployment),
            )
        )
    return tuple(sorted(out, key=lambda s: s.name))


def engines_behind(selector: dict[str, str], deployments: list[Object], pods: list[Object]) -> int:
    """How many ready engines, of sets that are there, a Service with this selector reaches."""
    reached = [p for p in pods if selector and selector.items() <= p["metadata"].get("labels", {}).items()]
    return sum(len(engines.ready) for engines in engine_sets(deployments, reached))


def _image(deployment: Object) -> str:
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return next((str(c.get("image", "")) for c in containers if c["name"] == ENGINE_CONTAINER), "")


def _failure(deployment: Object) -> str:
    for c in deployment.get("status", {}).get("conditions", []):
        if c.get("type") == "ReplicaFailure" and c.get("status") == "True":
            return clip(pods_refused(str(c.get("message", "pods cannot be created"))), 400)
    return ""


def pod_fact(pod: Object, lost: Mapping[str, str] = MappingProxyType({})) -> PodFact:
    """What matters of a pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    conditions = {c.get("type"): c for c in status.get("conditions", [])}
    container: Object = next((c for c in status.get("containerStatuses", []) if c.get("name") == ENGINE_CONTAINER), {})
    waiting = container.get("state", {}).get("waiting") or {}
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        reason, message = scheduled.get("reason", "Unschedulable"), scheduled.get("message", "")
    if reason in _CALM:
        message = ""
    if reason in NOT_PULLED:
        message = pull_failure(str(message))
    restarts = int(container.get("restartCount", 0))
    exit_message = str(ended.get("message", ""))
    if ended and not exit_message:
        exit_message = "error: " + _ended(ended) if ended.get("exitCode") else ""
    return PodFact(
        name=meta["name"],
        ip=status.get("podIP", ""),
        node=pod.get("spec", {}).get("nodeName", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in meta,
        restarts=restarts,
        waiting=reason,
        message=clip(str(message), 400),
        exit_message=exit_message[-4000:],
        exit_code=ended.get("exitCode"),
        lost=lost.get(pod.get("spec", {}).get("nodeName", ""), ""),
    )


def is_silent(pod: Object) -> bool:
    """True when the pod counts as not ready though the kubelet called its engine ready: so it is when the kubelet has
    not been heard of for a while, and when a readiness gate is closed.
    """
    status = pod.get("status", {})
    unready = any(c.get("type") == "Ready" and c.get("status") != "True" for c in status.get("conditions", []))
    statuses = status.get("containerStatuses", [])
    return unready and any(c.get("name") == ENGINE_CONTAINER and c.get("ready") for c in statuses)


def silence(name: str, node: Object | None) -> str:
    """What is wrong with a node that does not report; "" while it does."""
    if node is None:
        return f"node {name} is gone"
    conditions = node.get("status", {}).get("conditions", [])
    ready: Object = next((c for c in conditions if c.get("type") == "Ready"), {})
    if ready.get("status") != "Unknown":
        return ""
    return f"node {name} does not answer, and counts as lost since {ready.get('lastTransitionTime', '')}"


def addresses(sets: tuple[EngineSet, ...]) -> frozenset[str]:
    """Base URLs of all engines that are there, ready or not."""
    pods = (p for s in sets for p in s.pods if p.ip and not p.deleting and not p.lost)
    return frozenset(f"http://{p.ip}:{ENGINE_PORT}" for p in pods)


def is_running(pod: Object) -> bool:
    """True when the engine container runs or waits, so that its last exit is in the previous log."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    state: Object = next((c.get("state", {}) for c in statuses if c.get("name") == ENGINE_CONTAINER), {})
    return "terminated" not in state


def _ended(ended: Object) -> str:
    if ended.get("reason") == "OOMKilled":
        return "the engine ran out of memory (OOMKilled); raise its memory limit or lower --mem-fraction-static"
    return f"the engine ended with exit code {ended.get('exitCode')} and left no message"


def belongs(obj: Object, uid: str) -> bool:
    """Whether an object is the resource's own. What carries its labels without an owner counts, as left by an orphaning
    deletion; what an earlier resource of the same name owns does not.
    """
    meta = obj["metadata"]
    owners = meta.get("ownerReferences") or []
    if not owners:
        return bool(meta.get("labels", {}).get(LABEL_MANAGED_BY) == FIELD_MANAGER)
    return any(o.get("uid") == uid for o in owners)


def service_facts(service: Object | None, name: str, uid: str) -> tuple[dict[str, str] | None, float, str]:
    """Selector, time of the last switch, and what is wrong with a Service that is not ours."""
    if service is None:
        return None, 0.0, ""
    meta = service["metadata"]
    if not belongs(service, uid):
        return None, 0.0, f"Service {name} exists and does not belong to this resource; rename one of them"
    at = epoch(meta.get("annotations", {}).get(ANNOTATION_SWITCHED_AT))
    return dict(service["spec"].get("selector") or {}), at, ""


def request_of(resource: Object) -> tuple[ActionRequest | None, str]:
    """The command in the annotation, and a sentence when it cannot be read."""
    text = resource["metadata"].get("annotations", {}).get(ANNOTATION_ACTION)
    if not text:
        return None, ""
    try:
        return ActionRequest.model_validate(json.loads(text)), ""
    except (ValueError, ValidationError):
        return None, f"annotation {ANNOTATION_ACTION} is not a request; use ddtreectl rollout to write it"
