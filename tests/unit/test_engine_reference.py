"""The definition of the tree, against an enumeration of all nodes."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang_ddtree/src"))
from sglang_ddtree import reference

pytestmark = pytest.mark.unit


def random_lp(rng: np.random.Generator, positions: int, candidates: int, ties: bool) -> np.ndarray:
    logits = rng.normal(size=(positions, candidates)) * rng.choice([0.2, 1.0, 4.0])
    if ties:
        logits = np.round(logits * 2) / 2
    lp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    if ties:
        lp = np.round(lp * 4) / 4  # sums of these are exact in float32: real ties
    return reference.log_probabilities(-np.sort(-lp, axis=1))


def everything(lp: np.ndarray) -> dict[tuple[int, ...], np.float32]:
    """All rank sequences with their float32 score, added from the root down."""
    out: dict[tuple[int, ...], np.float32] = {}
    for depth in range(1, lp.shape[0] + 1):
        for ranks in itertools.product(range(lp.shape[1]), repeat=depth):
            above = out.get(ranks[:-1], np.float32(0))
            out[ranks] = above + lp[depth - 1, ranks[-1]]
    return out


def sequences(nodes: reference.Nodes) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for parent, rank in zip(nodes.parents[1:], nodes.ranks[1:], strict=True):
        out.append((*out[parent], rank))
    return out[1:]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_tree_is_the_best_nodes(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    positions, candidates = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    budget = int(rng.integers(1, 40))
    lp = random_lp(rng, positions, candidates, ties)
    nodes = reference.build(lp, budget)
    scores = everything(lp)
    best = sorted(scores.values(), reverse=True)[:budget]
    assert [np.float32(s) for s in nodes.scores[1:]] == best
    chosen = sequences(nodes)
    assert len(set(chosen)) == len(chosen) == min(budget, len(scores))
    for node, ranks in enumerate(chosen, 1):
        assert nodes.parents[node] < node
        assert nodes.depths[node] == len(ranks)
        assert np.float32(nodes.scores[node]) == scores[ranks]


def test_of_equal_scores_the_older_parent_wins() -> None:
    lp = np.full((3, 2), -1.0, dtype=np.float32)
    nodes = reference.build(lp, 6)
    assert nodes.parents == [-1, 0, 0, 1, 1, 2, 2]
    assert nodes.ranks[1:] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_the_spine_is_always_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lp = random_lp(rng, 7, 12, ties=seed % 2 == 0)
    for budget in (7, 9, 20):
        nodes = reference.build(lp, budget, spine=True)
        chosen = sequences(nodes)
        assert chosen[:7] == [(0,) * depth for depth in range(1, 8)]
        # the rest is the best of what is left
        left = sorted((s for r, s in everything(lp[:3]).items()), reverse=True)
        assert len(chosen) == budget
        rest = [np.float32(s) for s in nodes.scores[8:]]
        assert rest == sorted(rest, reverse=True)
        assert not rest or rest[0] <= left[0]
        assert len(set(chosen)) == len(chosen)


def test_candidates_of_probability_zero_are_never_chosen() -> None:
    lp = np.array([[0.0, -np.inf], [-0.5, -1.0]], dtype=np.float32)
    nodes = reference.build(lp, 10)
    assert sequences(nodes) == [(0,), (0, 0), (0, 1)]
    assert reference.build(np.full((2, 2), -np.inf, dtype=np.float32), 4, spine=True).parents == [-1]


def test_not_a_number_is_probability_zero() -> None:
    lp = reference.log_probabilities([[0.1, float("nan")]])
    assert lp.tolist() == [[0.0, -np.inf]]


def test_ancestors_and_walk() -> None:
    parents = [-1, 0, 0, 1, 1, 3]
    seen = reference.ancestors(parents)
    assert np.flatnonzero(seen[5]).tolist() == [0, 1, 3, 5]
    tokens = [9, 1, 2, 3, 4, 5]
    target = [1, 3, 0, 7, 0, 0]
    assert reference.walk(tokens, parents, target) == ([0, 1, 3], 7)
    rng = random.Random(0)
    for _ in range(50):
        target = [rng.randrange(1, 6) for _ in tokens]
        path, bonus = reference.walk(tokens, parents, target)
        assert [parents[n] for n in path[1:]] == path[:-1]
        assert [tokens[n] for n in path[1:]] == [target[n] for n in path[:-1]]
        assert bonus == target[path[-1]]
