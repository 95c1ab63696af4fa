"""Independent references of the DDTree kernels: a real heap, Python loops, numpy. Slow and plain on purpose."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Tree:
    """Nodes in order, root included."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[np.float32]
    ranks: list[int]


def heap_tree(logp: F32, ids: NDArray[np.int64], root: int, budget: int, *, spine: bool | None = None) -> Tree:
    """Best-first search with a heap over [depth, K] log-probabilities, best first.

    Order: highest score first, equal scores by the lower parent index; a budget that holds the whole chain takes
    the chain first. Scores are float32 sums from the root down. Candidates of probability 0 are not candidates.
    """
    depth, k = logp.shape
    logp = np.minimum(np.where(np.isnan(logp), np.float32(-np.inf), logp), np.float32(0))
    tree = Tree([root], [-1], [0], [np.float32(0)], [0])
    heap: list[tuple[float, int, int]] = []  # (-score, parent, rank)

    def offer(parent: int, rank: int) -> None:
        level = tree.depths[parent]
        if level < depth and rank < k:
            score = np.float32(tree.scores[parent] + logp[level, rank])
            if score > -np.inf:
                heapq.heappush(heap, (-float(score), parent, rank))

    def take(parent: int, rank: int) -> None:
        level = tree.depths[parent]
        tree.tokens.append(int(ids[level, rank]))
        tree.parents.append(parent)
        tree.depths.append(level + 1)
        tree.scores.append(np.float32(tree.scores[parent] + logp[level, rank]))
        tree.ranks.append(rank)

    offer(0, 0)
    if budget >= depth if spine is None else spine:
        for node in range(min(depth, budget)):
            if not heap or heap[-1][1:] != (node, 0):
                break
            heap.clear()
            take(node, 0)
            offer(node + 1, 0)
        chain = len(tree.tokens)
        heap.clear()
        for node in range(chain):
            offer(node, 1 if node < chain - 1 else 0)
    while heap and len(tree.tokens) <= budget:
        _, parent, rank = heapq.heappop(heap)
        take(parent, rank)
        offer(parent, rank + 1)
        offer(len(tree.tokens) - 1, 0)
    return tree


def ancestors(parents: list[int], width: int) -> NDArray[np.bool_]:
    """[width, width]: column is the row's node or one of its ancestors. Padding sees itself alone."""
    mask = np.eye(width, dtype=bool)
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            mask[node] |= mask[parents[node]]
    return mask


def walk(tokens: list[int], parents: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Accepted path (root included) and the tokens it yields (bonus included)."""
    path, text = [0], [target[0]]
    while True:
        match = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == text[-1]]
        if not match:
            return path, text
        path.append(match[0])
        text.append(target[match[0]])


def random_tables(rng: np.random.Generator, depth: int, vocab: int, k: int) -> tuple[F32, NDArray[np.int64]]:
    """Log-probabilities [depth, k] best first and their token ids; a third of the draws full of exact ties."""
    logits = rng.normal(size=(depth, vocab)) * rng.choice([0.2, 1.0, 3.0, 8.0])
    style = rng.random()
    if style < 0.3:
        logits = np.round(logits * 2) / 2
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    if 0.2 < style < 0.45:
        logp = np.minimum(np.round(logp * 4) / 4, 0)  # sums are exact: ties between different paths
    if style > 0.97:
        logp[:, vocab // 2 :] = -np.inf
    ids = np.ascontiguousarray(np.argsort(-logp, axis=1, kind="stable")[:, :k])
    return np.take_along_axis(logp, ids, 1).astype(np.float32), ids
