"""Which nodes fit a placement, and why each of the others does not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddtree_operator.api.names import GPU_MEMORY_LABEL, GPU_PRODUCT_LABEL, GPU_RESOURCE
from ddtree_operator.api.spec import PlacementSpec

from .facts import NodeFacts, Taint, gpu_usage
from .needs import ImageNeeds

UNCOUNTED = 1000  # slots of a node for replicas that take no GPU


class Kind(NamedTuple):
    """What makes nodes alike: product, memory of one GPU (MiB, None unknown), driver."""

    product: str
    memory: int | None
    driver: str


class NodeFit(NamedTuple):
    """One node against one placement.

    ``eligible``: it is of the right kind and takes pods, whether or not GPUs are free. ``fits``: eligible, and at
    least one replica's GPUs are free now. ``reasons`` are short phrases, empty when it fits. ``slots`` is how many
    more replicas its free GPUs hold (UNCOUNTED for replicas that take no GPU: the scheduler decides).
    """

    name: str
    fits: bool
    reasons: tuple[str, ...]
    free: int
    product: str
    memory: int | None
    eligible: bool
    slots: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes with the GPUs their pods take: read once, matched against many placements."""

    nodes: tuple[tuple[NodeFacts, int, int], ...]  # facts, used GPUs, index into classes; sorted by name
    classes: tuple[NodeFacts, ...]  # one of each set of nodes that differ in nothing but name, labels and use

    @classmethod
    def from_objects(cls, nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> Inventory:
        """From v1 Nodes and Pods (all pods of the cluster that may hold GPUs)."""
        return cls.from_facts([NodeFacts.from_object(node) for node in nodes], gpu_usage(pods))

    @classmethod
    def from_facts(cls, facts: Iterable[NodeFacts], used: Mapping[str, int]) -> Inventory:
        """From facts, and node name → GPUs taken."""
        classes: dict[Any, int] = {}
        kept: list[NodeFacts] = []
        rows = []
        for fact in sorted(facts, key=lambda f: f.name):
            key = (
                fact.ready, fact.cordoned, fact.deleting, fact.taints, fact.gpus, fact.product, fact.memory,
                fact.driver, fact.compute, fact.cuda, fact.sharing, fact.mig, fact.other, fact.problems,
            )  # fmt: skip
            index = classes.setdefault(key, len(kept))
            if index == len(kept):
                kept.append(fact)
            rows.append((fact, used.get(fact.name, 0), index))
        return cls(tuple(rows), tuple(kept))

    def taken(self, used: Mapping[str, int]) -> Inventory:
        """The same nodes with other use: node name → GPUs taken."""
        rows = tuple((fact, used.get(fact.name, 0), index) for fact, _, index in self.nodes)
        return Inventory(rows, self.classes)


def match(
    inventory: Inventory,
    placement: PlacementSpec,
    needs: ImageNeeds | None = None,
) -> list[NodeFit]:
    """Hold every node against ``placement``; sorted by name.

    ``needs`` is what the image asks of the GPUs, None when that is not known.
    """
    per_replica = placement.gpu.per_replica
    selector = tuple(placement.node_selector.items())
    judged = [
        (tuple(_class_reasons(fact, placement, needs)), Kind(fact.product, fact.memory, fact.driver))
        for fact in inventory.classes
    ]
    fits: list[NodeFit] = []
    full: dict[tuple[int, int], tuple[str, ...]] = {}
    for fact, used, index in inventory.nodes:
        reasons, kind = judged[index]
        if selector:
            labels = fact.labels
            wrong = tuple(_selector_reason(labels, k, v) for k, v in selector if labels.get(k) != v)
            reasons = reasons + wrong if wrong else reasons
        free = max(0, fact.gpus - used)
        eligible = not reasons
        slots = free // per_replica if per_replica else UNCOUNTED
        if eligible and not slots:
            key = (free, fact.gpus)
            if key not in full:
                full[key] = (f"{free} of {fact.gpus} GPUs free, {per_replica} needed",)
            reasons = full[key]
        fits.append(NodeFit(fact.name, not reasons, reasons, free, kind[0], kind[1], eligible, slots, kind))
    return fits


def _selector_reason(labels: Mapping[str, str], key: str, value: str) -> str:
    return f"label {key} is {labels[key]!r}, not {value!r}" if key in labels else f"no label {key}={value}"


def _class_reasons(node: NodeFacts, placement: PlacementSpec, needs: ImageNeeds | None) -> list[str]:
    reasons: list[str] = []
    if node.deleting:
        reasons.append("is being deleted")
    if not node.ready:
        reasons.append("not Ready")
    if node.cordoned:
        reasons.append("cordoned")
    # What the node controller adds itself says the same as "not Ready" and "cordoned".
    taints = [t for t in node.taints if not t.key.startswith("node.kubernetes.io/")]
    tolerations = list(placement.tolerations)
    if placement.gpu.per_replica:
        # Engine pods that take GPUs carry this one: the taint only keeps other pods away from GPU nodes.
        tolerations.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    reasons += [f"taint {taint} is not tolerated" for taint in taints if not tolerated(taint, tolerations)]
    reasons += _gpu_reasons(node, placement)
    # Of a node that is the wrong one anyway, nobody wants to hear what else would be wrong.
    if needs is not None and takes_gpus(placement) and not reasons:
        reasons += needs.reasons(node)
    return reasons


def _gpu_reasons(node: NodeFacts, placement: PlacementSpec) -> list[str]:
    gpu = placement.gpu
    if gpu.per_replica == 0 and not gpu.product and gpu.min_memory_gi_b is None:
        return []
    reasons: list[str] = []
    if node.mig == "invalid":
        return ["its MIG layout is invalid (product label says MIG-INVALID)"]
    if gpu.per_replica and node.gpus < gpu.per_replica:
        if node.other:
            return [f"offers {', '.join(node.other[:3])} instead of {GPU_RESOURCE}"]
        if node.gpus == 0:
            return [f"has no {GPU_RESOURCE}"]
        reasons.append(f"has {node.gpus} GPUs, {gpu.per_replica} needed")
    if node.mig and gpu.mig == "forbid":
        reasons.append(f"MIG slices ({node.mig}) and placement.gpu.mig is forbid")
    if node.sharing and gpu.sharing == "forbid":
        reasons.append(f"GPUs are shared ({node.sharing}) and placement.gpu.sharing is forbid")
    if gpu.product and not product_wanted(node.product, gpu.product):
        wanted = " or ".join(gpu.product[:3])
        reasons.append(f"product {node.product}, not {wanted}" if node.product else f"no label {GPU_PRODUCT_LABEL}")
    if gpu.min_memory_gi_b is not None:
        if node.memory is None and GPU_MEMORY_LABEL not in node.labels:
            reasons.append(f"no label {GPU_MEMORY_LABEL}")
        elif node.memory is not None and node.memory < gpu.min_memory_gi_b * 1024:
            reasons.append(f"{node.memory / 1024:.1f} GiB of GPU memory, {gpu.min_memory_gi_b} needed")
    return [*reasons, *node.problems]


def takes_gpus(placement: PlacementSpec) -> bool:
    """Whether engines run on GPUs: counted ones, or claimed ones of a product that is named."""
    return bool(placement.gpu.per_replica or placement.gpu.product)


def product_wanted(product: str, wanted: Sequence[str]) -> bool:
    """Whether a product label names a wanted card; sharing and MIG, which add to it, have switches of their own."""
    plain = product.removesuffix("-SHARED")
    return product in wanted or plain in wanted or plain.split("-MIG-")[0] in wanted


def tolerated(taint: Taint, tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the pod's tolerations covers the taint (Kubernetes' rules)."""
    for t in tolerations:
        if t.get("effect") not in (None, "", taint.effect):
            continue
        operator, key = t.get("operator") or "Equal", t.get("key") or ""
        if operator == "Exists" and key in ("", taint.key):
            return True
        if operator == "Equal" and key == taint.key and str(t.get("value") or "") == taint.value:
            return True
    return False
