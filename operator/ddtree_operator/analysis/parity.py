"""Greedy outputs token by token: equal, a tie that both engines admit, or a bug."""

from __future__ import annotations

import math
from enum import StrEnum

from ddtree_operator.analysis.types import Pair


class Parity(StrEnum):
    """How one pair's outputs compare."""

    EQUAL = "equal"
    TIE = "tie"  # they differ where both engines see two tokens as good as equal
    BUG = "bug"
    UNRESOLVED = "unresolved"  # they differ, and an engine could not be asked about it
    UNKNOWN = "unknown"  # one of them returned no token ids


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """First position where the outputs differ; the length of the shorter one when it is a prefix; None when equal."""
    if a == b:
        return None
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def compare(pair: Pair, tie_gap: float) -> Parity:
    """Classify one pair; ``tie_gap`` is the largest top-2 log-prob gap that counts as a tie.

    A statement about another position than the one where the outputs differ explains nothing.
    """
    a, b = pair.baseline.output_ids, pair.canary.output_ids
    if not a or not b:
        return Parity.UNKNOWN
    position = first_difference(a, b)
    if position is None:
        return Parity.EQUAL
    said = pair.divergence
    if said is not None and said.position == position:
        gaps = (said.baseline_gap, said.canary_gap)
    else:
        gaps = (_at(pair.baseline.top2_gaps, position), _at(pair.canary.top2_gaps, position))
    known = [g for g in gaps if g is not None]
    if any(math.isnan(g) or g < 0 or g > tie_gap for g in known):
        return Parity.BUG  # one clear gap is enough
    if len(known) == 2:
        return Parity.TIE
    return Parity.UNRESOLVED if said is not None and said.error else Parity.BUG


def _at(gaps: tuple[float, ...], position: int) -> float | None:
    return gaps[position] if position < len(gaps) else None
