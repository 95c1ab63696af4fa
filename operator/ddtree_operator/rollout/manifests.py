"""Builders of what runs: engine Deployments and the Service. They return plain manifests and read nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ddtree_operator.api.names import (
    ENGINE_CONTAINER,
    ENGINE_PORT,
    ENGINE_PORT_NAME,
    FIELD_MANAGER,
    GPU_RESOURCE,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    LIVE_SECRET_SUFFIX,
    LIVE_TOKEN_ENV,
    LIVE_TOKEN_FOLDER,
    LIVE_TOKEN_KEY,
)
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.actions import ApplyEngines
from ddtree_operator.rollout.engine_args import engine_args
from ddtree_operator.rollout.merge import merge

# An engine whose node does not answer gets no requests; after this many seconds another is started elsewhere. The
# cluster's own default, 300, is long for a set that lacks an engine; a kubelet that is only restarted takes less.
MOVES_AFTER = 60
_NODE_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
ANNOTATION_SWITCHED_AT = "ddtree.dev/switched-at"

LEAVE = 5  # seconds before SIGTERM, in which endpoints and proxies forget the pod
# Seconds that SGLang may take to end once its last request is answered: it looks every 5 s, and gives its schedulers
# 15 s to release their memory. Killed meanwhile, they may leave GPU memory taken.
RELEASE = 20


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """What an installation adds to every engine: flags, environment, pod template, pull secrets."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    pod_template: dict[str, Any] = field(default_factory=dict)


def owner_reference(resource: dict[str, Any]) -> dict[str, Any]:
    """Owner reference to the DDTreeDeployment: deleting it takes every child along, with or without the operator."""
    return {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "name": resource["metadata"]["name"],
        "uid": resource["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }


def labels(deployment: str, *, role: str, revision: str = "", pool: str = "") -> dict[str, str]:
    """Labels of a child object."""
    out = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: deployment, LABEL_ROLE: role}
    if revision:
        out[LABEL_REVISION] = revision
    if pool:
        out[LABEL_POOL] = pool
    return out


def engines(
    action: ApplyEngines,
    spec: DDTreeSpec,
    resource: dict[str, Any],
    defaults: EngineDefaults,
    affinity: dict[str, Any] | None,
) -> dict[str, Any]:
    """The Deployment of one engine set. ``spec`` is the revision's spec with the speculation this set runs."""
    meta = resource["metadata"]
    own = labels(
        meta["name"],
        role="baseline" if action.baseline else "engine",
        revision=action.revision,
        pool="measured" if action.baseline else "serving",
    )
    template = merge(_pod(spec, own, action, defaults, affinity, meta["name"]), defaults.pod_template)
    template = merge(template, spec.engine.pod_template)
    template["metadata"]["labels"].update(own)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": action.name,
            "namespace": meta["namespace"],
            "labels": own,
            "ownerReferences": [owner_reference(resource)],
        },
        "spec": {
            "replicas": action.replicas,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": 3600,
            # Two sets of GPUs are rarely free: a changed template replaces pods one by one, within what there is.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": own},
            "template": template,
        },
    }


def _pod(
    spec: DDTreeSpec,
    own: dict[str, str],
    action: ApplyEngines,
    defaults: EngineDefaults,
    affinity: dict[str, Any] | None,
    name: str,
) -> dict[str, Any]:
    token = {LIVE_TOKEN_ENV: f"{LIVE_TOKEN_FOLDER}/{LIVE_TOKEN_KEY}"}
    container: dict[str, Any] = {
        "name": ENGINE_CONTAINER,
        "image": action.image,
        "command": ["python3", "-m", "sglang.launch_server"],
        "args": engine_args(spec, defaults.args),
        "env": [{"name": k, "value": v} for k, v in sorted((token | defaults.env).items())],
        "ports": [{"containerPort": ENGINE_PORT, "name": ENGINE_PORT_NAME}],
        # SGLang's /health takes a second by design, hence the timeouts.
        "startupProbe": _probe(period=3, timeout=5, failures=600),
        "readinessProbe": _probe(period=5, timeout=5, failures=2),
        "livenessProbe": _probe(period=20, timeout=15, failures=6),
        # A refusal or a crash reaches the status in the engine's own words.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "live-prompts", "mountPath": LIVE_TOKEN_FOLDER, "readOnly": True},
        ],
    }
    if spec.placement.gpu.per_replica:
        container["resources"] = {"limits": {GPU_RESOURCE: str(spec.placement.gpu.per_replica)}}
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": LEAVE + math.ceil(action.grace) + RELEASE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            # Mostly there is none. A mount, since it appears and goes while the engine runs (analysis.prompts).
            {
                "name": "live-prompts",
                "secret": {"secretName": f"{name}{LIVE_SECRET_SUFFIX}", "optional": True, "defaultMode": 0o440},
            },
        ],
    }
    if spec.placement.node_selector:
        pod["nodeSelector"] = spec.placement.node_selector
    tolerations = [*spec.placement.tolerations]
    if spec.placement.gpu.per_replica:  # the taint that keeps everything else off GPU nodes (placement counts on it)
        tolerations.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    pod["tolerations"] = [*tolerations, *_moves(spec.placement.tolerations)]
    if affinity:
        pod["affinity"] = affinity
    return {"metadata": {"labels": dict(own)}, "spec": pod}


def _moves(own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How long an engine stays on a node that does not answer, unless the user's tolerations say so."""
    executes = [t for t in own if t.get("effect") in (None, "", "NoExecute")]
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": MOVES_AFTER}
        for key in _NODE_TAINTS
        if not any(t.get("key") in (None, "", key) for t in executes)
    ]


def _probe(*, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": ENGINE_PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def canary_name(deployment: str) -> str:
    """Name of the Service that an HTTPRoute names for the canary."""
    return f"{deployment}-canary"


def canary_service(resource: dict[str, Any], selector: dict[str, str], notes: dict[str, str]) -> dict[str, Any]:
    """The canary's Service: beside the one that clients use, with the same port."""
    made = service(resource, selector, "")
    made["metadata"]["name"] = canary_name(resource["metadata"]["name"])
    made["metadata"]["annotations"] = notes
    return made


def service(resource: dict[str, Any], selector: dict[str, str], switched_at: str) -> dict[str, Any]:
    """The Service that clients use: named like the resource, pointed by its selector."""
    meta = resource["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": labels(meta["name"], role="engine"),
            "annotations": {ANNOTATION_SWITCHED_AT: switched_at},
            "ownerReferences": [owner_reference(resource)],
        },
        "spec": {
            "selector": selector,
            "ports": [{"name": ENGINE_PORT_NAME, "port": ENGINE_PORT, "targetPort": ENGINE_PORT_NAME}],
        },
    }
