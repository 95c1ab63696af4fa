"""The definition of the tree: a heap in plain Python and numpy. Everything faster is tested against it.

The drafter gives, for each of ``L`` positions, candidates in falling order of log-probability. A node is a sequence
of ranks (r1 … rd), one a position; its score is the sum of their log-probabilities, in float32, added from the root
down. The tree is the ``budget`` nodes of highest score. A node never scores above its parent or above its sibling of
the rank before, so a heap that holds, for the root and every chosen node, just its next unused child yields them in
order; a chosen node's parent is chosen before it. Of equal scores the child of the node chosen earlier comes first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class Nodes:
    """Nodes in the order they were chosen; entry 0 is the root (parent -1, depth 0, rank -1, score 0)."""

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    scores: list[float]


def log_probabilities(vals: npt.ArrayLike, lse: npt.ArrayLike | None = None) -> npt.NDArray[np.float32]:
    """[L, K] float32, at most 0; NaN becomes -inf. ``lse`` [L] is subtracted if given."""
    lp = np.asarray(vals, dtype=np.float32)
    if lse is not None:
        lp = lp - np.asarray(lse, dtype=np.float32)[:, None]
    return np.minimum(np.where(np.isnan(lp), np.float32(-np.inf), lp), np.float32(0))


def build(lp: npt.NDArray[np.float32], budget: int, spine: bool = False) -> Nodes:
    """Choose up to ``budget`` nodes from ``lp`` [L, K] (rows falling). Candidates of probability 0 are never chosen, so
    there may be fewer. With ``spine`` the first choice of every position comes first, whatever its score."""
    positions, candidates = lp.shape
    # float32 sums in Python: numpy's scalar addition rounds like the kernel's
    table = [[np.float32(x) for x in row] for row in lp]
    nodes = Nodes([-1], [0], [-1], [0.0])
    exact = [np.float32(0)]
    heap: list[tuple[float, int, int]] = []  # (-score, parent, rank)

    def offer(parent: int, rank: int) -> None:
        depth = nodes.depths[parent]
        if depth < positions and rank < candidates:
            score = exact[parent] + table[depth][rank]
            if score > -np.inf:
                heapq.heappush(heap, (-float(score), parent, rank))

    def take(parent: int, rank: int) -> None:
        depth = nodes.depths[parent]
        exact.append(exact[parent] + table[depth][rank])
        nodes.parents.append(parent)
        nodes.depths.append(depth + 1)
        nodes.ranks.append(rank)
        nodes.scores.append(float(exact[-1]))

    if spine:
        for depth in range(min(positions, budget)):
            if exact[depth] + table[depth][0] == -np.inf:
                break
            take(depth, 0)
        for parent in range(len(exact)):
            offer(parent, 1 if parent + 1 < len(exact) else 0)
    else:
        offer(0, 0)
    while heap and len(exact) <= budget:
        _, parent, rank = heapq.heappop(heap)
        take(parent, rank)
        offer(parent, rank + 1)
        offer(len(exact) - 1, 0)
    return nodes


def ancestors(parents: list[int]) -> npt.NDArray[np.bool_]:
    """[n, n]: row's node sees the column's node (itself and its ancestors)."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def walk(tokens: list[int], parents: list[int], target: list[int]) -> tuple[list[int], int]:
    """Path from the root along the target's tokens (``target[i]``: the target's token after node i), and the token
    after its last node."""
    path = [0]
    while True:
        wanted = target[path[-1]]
        child = next((i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == wanted), None)
        if child is None:
            return path, wanted
        path.append(child)
