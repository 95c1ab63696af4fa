"""What a node says about itself: GPUs, their kind, and whether it takes pods. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_operator.api.names import GPU_MEMORY_LABEL, GPU_PRODUCT_LABEL, GPU_RESOURCE

DRIVER_LABEL = "nvidia.com/cuda.driver-version.full"
SHARING_LABEL = "nvidia.com/gpu.sharing-strategy"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
MIG_STRATEGY_LABEL = "nvidia.com/mig.strategy"
SHARED_RESOURCE = f"{GPU_RESOURCE}.shared"
MIG_RESOURCE = re.compile(r"nvidia\.com/mig-(.+)")


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint that keeps pods away (effects NoSchedule and NoExecute; PreferNoSchedule does not)."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, reduced to what placement looks at. Memory is MiB of one GPU, None when not labelled."""

    name: str
    ready: bool
    cordoned: bool
    deleting: bool
    taints: tuple[Taint, ...]
    labels: Mapping[str, str]
    gpus: int  # allocatable nvidia.com/gpu
    product: str
    memory: int | None
    driver: str
    compute: tuple[int, int] | None  # compute capability, such as (9, 0)
    cuda: tuple[int, int] | None  # newest CUDA the driver serves
    sharing: str  # "", time-slicing, mps
    mig: str  # "", single, mixed, invalid
    other: tuple[str, ...]  # GPU resources under another name, such as nvidia.com/mig-1g.18gb
    problems: tuple[str, ...]  # labels that make no sense, as sentences

    @classmethod
    def from_object(cls, node: Mapping[str, Any]) -> NodeFacts:
        """Read a v1 Node. Whatever is missing or odd becomes a problem or an empty field, never an error."""
        metadata, spec, status = (node.get(k) or {} for k in ("metadata", "spec", "status"))
        labels = {str(k): str(v) for k, v in (metadata.get("labels") or {}).items()}
        allocatable = status.get("allocatable") or {}
        problems: list[str] = []
        conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or []}
        product = labels.get(GPU_PRODUCT_LABEL, "")
        return cls(
            name=str(metadata.get("name", "")),
            ready=conditions.get("Ready") == "True",
            cordoned=bool(spec.get("unschedulable")),
            deleting=metadata.get("deletionTimestamp") is not None,
            taints=tuple(
                Taint(str(t.get("key", "")), str(t.get("value") or ""), str(t.get("effect", "")))
                for t in spec.get("taints") or []
                if t.get("effect") in ("NoSchedule", "NoExecute")
            ),
            labels=labels,
            gpus=_count(allocatable.get(GPU_RESOURCE, 0)),
            product=product,
            memory=_number(labels, GPU_MEMORY_LABEL, problems),
            driver=labels.get(DRIVER_LABEL, ""),
            compute=_pair(labels, "nvidia.com/gpu.compute", problems),
            cuda=_pair(labels, "nvidia.com/cuda.runtime-version", problems)
            or _pair(labels, "nvidia.com/cuda.runtime", problems),
            sharing=_sharing(labels, product, allocatable, problems),
            mig=_mig(labels, product, allocatable),
            other=tuple(sorted(k for k in allocatable if _is_other(k) and _count(allocatable[k]) > 0)),
            problems=tuple(problems),
        )


def gpu_usage(pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Node name → nvidia.com/gpu taken by its pods. Finished pods take none; unscheduled ones have no node."""
    used: dict[str, int] = {}
    for pod in pods:
        spec = pod.get("spec") or {}
        node = spec.get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        taken = pod_gpus(spec)
        if taken:
            used[node] = used.get(node, 0) + taken
    return used


def pod_gpus(spec: Mapping[str, Any]) -> int:
    """nvidia.com/gpu a pod takes: the sum over its containers, or the most that its start needs at once."""
    running = sum(_request(c) for c in spec.get("containers") or [])
    sidecars = peak = 0
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            sidecars += _request(container)
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + _request(container))
    return max(running + sidecars, peak)


def _request(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        if GPU_RESOURCE in (resources.get(kind) or {}):
            return _count(resources[kind][GPU_RESOURCE])
    return 0


def _count(value: Any) -> int:
    text = str(value).strip()
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"\d+k", text):
        return int(text[:-1]) * 1000
    return 0


def _number(labels: Mapping[str, str], key: str, problems: list[str]) -> int | None:
    text = labels.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        problems.append(f"label {key} is {text[:40]!r}, not a number")
        return None
    return int(text)


def _pair(labels: Mapping[str, str], prefix: str, problems: list[str]) -> tuple[int, int] | None:
    major, minor = (_number(labels, f"{prefix}.{part}", problems) for part in ("major", "minor"))
    return None if major is None else (major, minor or 0)


def _sharing(labels: Mapping[str, str], product: str, allocatable: Mapping[str, Any], problems: list[str]) -> str:
    strategy = labels.get(SHARING_LABEL, "none")
    if strategy in ("time-slicing", "mps"):
        return strategy
    replicas = _number(labels, REPLICAS_LABEL, problems)
    if product.endswith("-SHARED") or (replicas or 0) > 1 or _count(allocatable.get(SHARED_RESOURCE, 0)):
        return "time-slicing"
    if strategy not in ("none", ""):
        problems.append(f"label {SHARING_LABEL} is {strategy[:40]!r}, which is not known")
    return ""


def _mig(labels: Mapping[str, str], product: str, allocatable: Mapping[str, Any]) -> str:
    if "MIG-INVALID" in product:
        return "invalid"
    if re.search(r"-MIG-\d+g\.", product):
        return "single"
    slices = [k for k in allocatable if MIG_RESOURCE.fullmatch(k) and _count(allocatable[k]) > 0]
    if slices or (labels.get(MIG_STRATEGY_LABEL) == "mixed" and any(k.startswith("nvidia.com/mig-") for k in labels)):
        return "mixed"
    return ""


def _is_other(resource: str) -> bool:
    return resource == SHARED_RESOURCE or MIG_RESOURCE.fullmatch(resource) is not None
