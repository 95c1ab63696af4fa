"""Pinning: canary and baseline on alike GPUs, chosen once, kept while it holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_operator.api.names import GPU_MEMORY_LABEL, GPU_PRODUCT_LABEL
from ddtree_operator.api.spec import PlacementSpec

from .facts import DRIVER_LABEL, SHARING_LABEL
from .match import Kind, NodeFit, product_wanted

NO_NODE_FITS = "no node fits"
MOST_NODES = 200  # names kept in a status


@dataclass(frozen=True, slots=True)
class Pins:
    """The chosen kind of node, and the nodes of it that are eligible, sorted by name.

    ``also``: further kinds that are as good, only with pin ``none``.
    """

    kind: Kind
    nodes: tuple[str, ...]
    also: tuple[Kind, ...] = ()

    def to_status(self) -> dict[str, Any]:
        """JSON for the CR's status, bounded; ``from_status`` reads it back."""
        out: dict[str, Any] = {"nodes": list(self.nodes[:MOST_NODES]), **_kind_to_json(self.kind)}
        if self.also:
            out["also"] = [f"{kind.product}|{kind.memory or ''}|{kind.driver}" for kind in self.also]
        return out

    @classmethod
    def from_status(cls, value: Any) -> Pins | None:
        """Pins of a status written by ``to_status``; None when it is missing or not understood."""
        if not isinstance(value, Mapping) or not isinstance(value.get("nodes"), list):
            return None
        also = value.get("also")
        parts = [str(v).split("|") for v in also] if isinstance(also, list) else []
        kinds = tuple(Kind(p[0], int(p[1]) if p[1].isdigit() else None, p[2]) for p in parts if len(p) == 3)
        return cls(_kind_from_json(value), tuple(str(n) for n in value["nodes"]), kinds)


def _kind_to_json(kind: Kind) -> dict[str, Any]:
    out = {"product": kind.product, "memoryMiB": kind.memory, "driver": kind.driver}
    return {key: value for key, value in out.items() if value}


def _kind_from_json(value: Mapping[str, Any]) -> Kind:
    memory = value.get("memoryMiB")
    product, driver = (str(value.get(key, "")) for key in ("product", "driver"))
    return Kind(product, memory if isinstance(memory, int) else None, driver)


@dataclass(frozen=True, slots=True)
class Choice:
    """Outcome of ``choose_group``: pins, or None and one sentence why.

    ``missing``: replicas for which there is no room; ``room``: further replicas that the pinned nodes hold now.
    """

    pins: Pins | None
    reason: str = ""
    missing: int = 0
    room: int = 0


def choose_group(
    fits: Iterable[NodeFit], needed: int, *, keep: Pins | Sequence[str] | None = None, pin: str = "product"
) -> Choice:
    """Choose nodes of one kind with room for ``needed`` further replicas (0: just somewhere eligible).

    ``keep`` is the earlier choice (pins, or node names): it stays while nodes of that very kind are eligible and have
    room, and while any exist it is never swapped for another kind; then the choice fails with a reason instead.
    With pin ``none`` all eligible nodes are one group; with ``nodes`` the earlier nodes stay as long as they hold.
    Deterministic: most room first, then the larger memory, then the names.
    """
    eligible = sorted((f for f in fits if f.eligible), key=lambda f: f.name)
    if pin == "none":
        kinds = sorted({f.kind for f in eligible}, key=str) or [Kind("", None, "")]
        pins = Pins(kinds[0], tuple(f.name for f in eligible), tuple(kinds[1:]))
        return _checked(pins, eligible, needed, "nodes that fit")
    groups: dict[Kind, list[NodeFit]] = {}
    for fit in eligible:
        groups.setdefault(fit.kind, []).append(fit)
    kept = _kept_kind(keep, eligible)
    if kept is not None:
        members = groups.get(kept, [])
        if members:
            names = tuple(f.name for f in members)
            earlier = keep.nodes if isinstance(keep, Pins) else tuple(keep or ())
            if pin == "nodes":
                still = tuple(n for n in names if n in earlier)
                names = _enough(still, members, needed) if still else names
            return _checked(Pins(kept, names), members, needed, f"nodes alike ({describe(kept)})")
        if isinstance(keep, Pins) and keep.nodes:
            return Choice(None, f"no node is left that is alike ({describe(kept)}); another kind is not taken", needed)
    if not groups:
        return Choice(None, NO_NODE_FITS, needed)
    room = {kind: sum(f.slots for f in members) for kind, members in groups.items()}
    kind = min(groups, key=lambda k: (min(needed, room[k]) * -1, -room[k], -(k.memory or 0), k.product, k.driver))
    members = groups[kind]
    names = tuple(f.name for f in members)
    if pin == "nodes":
        names = _enough((), members, needed)
    return _checked(Pins(kind, names), members, needed, f"nodes alike ({describe(kind)})")


def still_wanted(pins: Pins, placement: PlacementSpec) -> bool:
    """Whether the pinned kind is one that the placement asks for now: somebody who names another GPU means it."""
    gpu = placement.gpu
    named = not gpu.product or product_wanted(pins.kind.product, gpu.product)
    memory = pins.kind.memory
    return named and (gpu.min_memory_gi_b is None or memory is None or memory >= gpu.min_memory_gi_b * 1024)


def describe(kind: Kind) -> str:
    """``NVIDIA-H200, 140 GiB, driver 570.1``, as far as known."""
    parts = [kind.product or "no GPU product label"]
    if kind.memory is not None:
        parts.append(f"{kind.memory / 1024:.0f} GiB")
    if kind.driver:
        parts.append(f"driver {kind.driver}")
    return ", ".join(parts)


def affinity(placement: PlacementSpec, pins: Pins | None) -> dict[str, Any]:
    """``affinity`` of the engine pods ({} for none): the pinned kind by its labels, or the pinned nodes by name."""
    if pins is None:
        terms = _product_terms(placement)
    elif placement.pin == "nodes":
        # matchFields takes one name each; terms are alternatives. Host name labels may differ from node names.
        terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]} for name in pins.nodes]
    else:
        kinds = (pins.kind, *pins.also)
        terms = [t for kind in kinds for t in _kind_terms(kind)] if all(k.product for k in kinds) else []
        terms = terms or _product_terms(placement)
    if not terms:
        return {}
    if placement.gpu.sharing == "forbid":  # nodes whose product label does not tell
        shared: dict[str, Any] = {"key": SHARING_LABEL, "operator": "NotIn", "values": ["mps", "time-slicing"]}
        for term in terms:
            if "matchExpressions" in term:
                term["matchExpressions"] = [*term["matchExpressions"], shared]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def summary(fits: Sequence[NodeFit], failed: str = "", *, limit: int = 900) -> str:
    """One sentence on all nodes: how many fit, and each other node's reasons, alike ones together; bounded.

    ``failed`` says why no choice could be made, and then comes first.
    """
    if not fits:
        return "the cluster has no nodes"
    fitting = [f.name for f in fits if f.fits] if not failed else []
    if fitting:
        nodes = f"{len(fits)} node{'s' if len(fits) != 1 else ''}"
        out = f"{len(fitting)} of {nodes} fit{'s' if len(fitting) == 1 else ''} ({_names(fitting)})"
    else:
        out = failed or NO_NODE_FITS
    why: dict[tuple[str, ...], list[str]] = {}
    for fit in fits:
        if not fit.fits:
            why.setdefault(fit.reasons, []).append(fit.name)
    parts = [f"{_names(names)}: {', '.join(reasons)}" for reasons, names in why.items()]
    for i, part in enumerate(parts):
        piece = ("; " if i else ": " if not fitting else "; not ") + part
        if len(out) + len(piece) > limit - 40:
            rest = sum(len(names) for names in list(why.values())[i:])
            return (out + f"; and {rest} more nodes for other reasons")[:limit]
        out += piece
    return out


def _names(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _kept_kind(keep: Pins | Sequence[str] | None, eligible: Sequence[NodeFit]) -> Kind | None:
    if isinstance(keep, Pins):
        return keep.kind if keep.nodes else None
    by_name = {f.name: f.kind for f in eligible}
    kinds = [by_name[n] for n in keep or () if n in by_name]
    return max(sorted(set(kinds), key=str), key=kinds.count) if kinds else None


def _enough(first: tuple[str, ...], members: Sequence[NodeFit], needed: int) -> tuple[str, ...]:
    """The given nodes, and as many further ones as the needed replicas take (at least one in all)."""
    chosen = list(first)
    slots = {f.name: f.slots for f in members}
    room = sum(slots[n] for n in chosen)
    for fit in sorted(members, key=lambda f: (-f.slots, f.name)):
        if chosen and room >= needed:
            break
        if fit.name not in chosen:
            chosen.append(fit.name)
            room += fit.slots
    return tuple(sorted(chosen))


def _checked(pins: Pins, members: Sequence[NodeFit], needed: int, what: str) -> Choice:
    if not pins.nodes:
        return Choice(None, NO_NODE_FITS, needed)
    names = set(pins.nodes)
    room = sum(f.slots for f in members if f.name in names)
    if room < needed:
        text = f"{needed} more replica{'s need' if needed != 1 else ' needs'} room, but the {what} have room for {room}"
        return Choice(pins, text, needed - room, room)
    return Choice(pins, room=room)


def _kind_terms(kind: Kind) -> list[dict[str, Any]]:
    if not kind.product:
        return []
    memory = "" if kind.memory is None else str(kind.memory)
    labels = ((GPU_PRODUCT_LABEL, kind.product), (GPU_MEMORY_LABEL, memory), (DRIVER_LABEL, kind.driver))
    # A node without a label is not alike one that has it.
    expressions: list[dict[str, Any]] = [
        {"key": key, "operator": "In", "values": [value]} if value else {"key": key, "operator": "DoesNotExist"}
        for key, value in labels
    ]
    return [{"matchExpressions": expressions}]


def _product_terms(placement: PlacementSpec) -> list[dict[str, Any]]:
    if not placement.gpu.product:
        return []
    values = list(placement.gpu.product)
    return [{"matchExpressions": [{"key": GPU_PRODUCT_LABEL, "operator": "In", "values": values}]}]
