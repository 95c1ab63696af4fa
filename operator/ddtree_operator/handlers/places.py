"""Where a revision's engines go: placement's answer as the core's fact, and as affinity for the pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_operator.api.names import NODES_SHOWN
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core.facts import PlacementFact
from ddtree_operator.placement.match import Inventory, NodeFit, match
from ddtree_operator.placement.needs import ImageNeeds
from ddtree_operator.placement.pin import Choice, Pins, affinity, choose_group, still_wanted, summary


def place(
    nodes: Inventory,
    spec: DDTreeSpec,
    *,
    keep: dict[str, Any],
    needed: int,
    needs: ImageNeeds | None = None,
) -> PlacementFact:
    """Whether ``needed`` further engines have room on alike nodes, and on which.

    ``keep`` is the earlier choice; ``needs`` is what the image asks of GPUs, None when it is not known.
    """
    fits = match(nodes, spec.placement, needs)
    rows = tuple(
        {"name": f.name, "fits": f.fits, "reason": ", ".join(f.reasons), "free": f.free, "product": f.product}
        for f in _telling(fits)[:NODES_SHOWN]
    )
    if spec.placement.gpu.per_replica == 0 and spec.placement.pin == "none":
        return PlacementFact(True, "pinning is off", nodes=rows)
    earlier = Pins.from_status(keep)
    if earlier is not None and not still_wanted(earlier, spec.placement):
        earlier = None
    choice = choose_group(fits, needed, keep=earlier, pin=spec.placement.pin)
    room = choice.room if choice.pins and spec.placement.gpu.per_replica else None
    if choice.pins is None:
        return PlacementFact(False, summary(fits, choice.reason), {}, rows)
    pins = choice.pins.to_status()
    if earlier is not None and earlier.kind == choice.pins.kind and spec.placement.pin == "product":
        pins = keep  # nodes of that kind come and go; the pin is the kind
    if choice.reason:
        return PlacementFact(False, summary(fits, _lacking(choice, spec) + choice.reason), pins, rows, room)
    return PlacementFact(True, summary(fits), pins, rows, room)


def _telling(fits: Sequence[NodeFit]) -> Sequence[NodeFit]:
    """In a fleet of more nodes than the status holds: some that fit, one of each set of reasons, then the others."""
    if len(fits) <= NODES_SHOWN:
        return fits
    ranks: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    fitting = 0
    for fit in fits:
        if fit.fits:
            fitting += 1
            ranks[fit.name] = 0 if fitting <= NODES_SHOWN // 2 else 2
        else:
            ranks[fit.name] = 3 if fit.reasons in seen else 1
            seen.add(fit.reasons)
    return sorted(fits, key=lambda fit: (ranks[fit.name], fit.name))


def _lacking(choice: Choice, spec: DDTreeSpec) -> str:
    """How many GPUs are missing on nodes of the chosen kind; "" when none is asked for."""
    count = choice.missing * spec.placement.gpu.per_replica
    return f"{count} GPU{'s are' if count != 1 else ' is'} missing: " if count else ""


def affinity_of(spec: DDTreeSpec, pins: dict[str, Any]) -> dict[str, Any]:
    """Affinity of the engine pods."""
    return affinity(spec.placement, Pins.from_status(pins))
