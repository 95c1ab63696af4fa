"""Trees of a batch as tensors, in plain torch: the same on a CPU and on a GPU without Triton.

Layout (the Triton kernels in ``kernels/`` write the same): ``width`` = budget + 1 nodes a request, node 0 the root, a
node's parent always before it. Nodes past the count are padding: token 0, parent -1, depth 0, score -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ddtree import reference
from sglang_ddtree.config import Config


@dataclass(frozen=True)
class Tree:
    """tokens int64, parents int32 (-1: root and padding), depths int32, positions int64, scores float32: [bs, width].
    counts int32 [bs]: nodes in use, root included. stats float32 [bs, 4]: deepest node, leaves, sum of the nodes'
    probabilities (the accepted drafts the drafter expects), nodes at the last candidate rank."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    stats: torch.Tensor


@dataclass(frozen=True)
class Opening:
    """What a step begins from. table integer [requests, tokens]: the KV slot of every token; rows, lens, roots integer
    [bs]: the requests' rows of it, their prefixes' lengths, their last tokens. ``window`` slots are wanted, and a
    drafter's ``block`` filled up with ``mask_id``."""

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    roots: torch.Tensor
    window: int
    block: int
    mask_id: int


class Opened(NamedTuple):
    """int64: the slots after every prefix [bs, window]; the drafter's ids (the root, then mask tokens) and positions
    [bs, block]."""

    slots: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class Accepted:
    """Result of the walk; ``steps`` columns. accept_index int32 [bs, steps]: ``row * width + node`` of the path, root
    first, then -1. accept_len int32 [bs]: accepted drafts. commit_lens int32 [bs] = accept_len + 1. bonus int64 [bs]:
    the target's token after the path. out_tokens int64 [bs, steps]: accepted drafts, bonus, zeros. new_seq_lens
    [bs]."""

    accept_index: torch.Tensor
    accept_len: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor
    out_tokens: torch.Tensor
    new_seq_lens: torch.Tensor


def drafted(hidden: torch.Tensor, config: Config) -> torch.Tensor:
    """The drafter's hidden states [bs * block, H] of the positions that a node can have: [bs * depth, H]. The root is
    known, and no node is deeper than the budget allows, so the rest needs no head."""
    blocks = hidden.view(-1, config.block, hidden.shape[-1])
    return blocks[:, 1 : 1 + config.depth].reshape(-1, hidden.shape[-1])


def build_tree(
    vals: torch.Tensor,
    ids: torch.Tensor,
    lse: torch.Tensor | None,
    root: torch.Tensor,
    prefix_lens: torch.Tensor,
    width: int,
    spine: bool,
) -> Tree:
    """One tree a request from its candidates: vals and ids [bs, L, K] (best first), lse [bs, L] or None (then vals are
    log-probabilities), root and prefix_lens [bs]. Runs the reference heap a request: right for a CPU, where it costs a
    fraction of a millisecond."""
    batch, _, candidates = vals.shape
    parents = torch.full((batch, width), -1, dtype=torch.int32)
    depths = torch.zeros((batch, width), dtype=torch.int32)
    ranks = torch.zeros((batch, width), dtype=torch.int64)
    scores = torch.full((batch, width), float("-inf"), dtype=torch.float32)
    counts, stats = torch.zeros(batch, dtype=torch.int32), torch.zeros((batch, 4), dtype=torch.float32)
    table = vals.float().cpu().numpy()
    norm = None if lse is None else lse.float().cpu().numpy()
    for row in range(batch):
        lp = reference.log_probabilities(table[row], None if norm is None else norm[row])
        nodes = reference.build(lp, width - 1, spine)
        n = len(nodes.parents)
        parents[row, :n] = torch.tensor(nodes.parents, dtype=torch.int32)
        depths[row, :n] = torch.tensor(nodes.depths, dtype=torch.int32)
        ranks[row, 1:n] = torch.tensor(nodes.ranks[1:])
        scores[row, :n] = torch.tensor(nodes.scores)
        counts[row] = n
        stats[row] = torch.tensor(
            [
                max(nodes.depths),
                n - 1 - len(set(nodes.parents[1:]) - {0}),
                sum(float(s) for s in torch.tensor(nodes.scores[1:]).exp()),
                sum(rank == candidates - 1 for rank in nodes.ranks),
            ]
        )
    device = ids.device
    parents, depths, ranks = parents.to(device), depths.to(device), ranks.to(device)
    level = (depths.long() - 1).clamp_min(0)
    tokens = ids.long().flatten(1).gather(1, level * candidates + ranks) * (depths > 0)
    tokens[:, 0] = root
    positions = prefix_lens.long()[:, None] + depths
    return Tree(tokens, parents, depths, positions, scores.to(device), counts.to(device), stats.to(device))


def ancestor_mask(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """bool [bs, width, width]: the row's node sees the column's (itself and its ancestors). ``depth``: deepest node."""
    batch, width = parents.shape
    seen = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    at = torch.arange(width, device=parents.device).repeat(batch, 1)
    long = parents.long()
    for _ in range(depth):
        up = long.gather(1, at)
        at = torch.where(up >= 0, up, at)  # the root stays at itself, which it sees anyway
        seen.scatter_(2, at[:, :, None], True)
    return seen


def full_mask(parents: torch.Tensor, prefix_lens: torch.Tensor, depth: int) -> torch.Tensor:
    """SGLang's FULL_MASK, flat bool: request after request, ``width`` rows of prefix (all seen) and tree cells."""
    seen = ancestor_mask(parents, depth)
    rows = []
    for row, length in zip(seen, prefix_lens.tolist(), strict=True):
        rows.append(torch.cat([row.new_ones(row.shape[0], length), row], dim=1).view(-1))
    return torch.cat(rows)


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every node, int64 [bs, width], -1 where there is none (grammar masks want
    these)."""
    width = parents.shape[1]
    order = torch.arange(width, device=parents.device)
    child = parents[:, None, :] == order[None, :, None]
    sibling = (parents[:, None, :] == parents[:, :, None]) & (order > order[:, None]) & (parents >= 0)[:, :, None]
    first = [torch.where(m, order, width).amin(-1) for m in (child, sibling)]
    next_token, next_sibling = (torch.where(f < width, f, -1) for f in first)
    return next_token, next_sibling


def walk(
    tokens: torch.Tensor, parents: torch.Tensor, target: torch.Tensor, prefix_lens: torch.Tensor, steps: int
) -> Accepted:
    """Follow the target's tokens from the root. tokens, parents, target [bs, width]. A node's children carry distinct
    tokens, so at most one matches."""
    batch, width = tokens.shape
    device = tokens.device
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    going = torch.ones(batch, dtype=torch.bool, device=device)
    path = torch.full((batch, steps), -1, dtype=torch.int64, device=device)
    path[:, 0] = rows * width
    text = torch.zeros((batch, steps), dtype=torch.int64, device=device)
    length = torch.zeros(batch, dtype=torch.int32, device=device)
    wanted = target[rows, node].long()
    text[:, 0] = wanted
    for step in range(1, steps):
        hit = (parents == node[:, None]) & (tokens == wanted[:, None])
        going = going & hit.any(-1)
        node = torch.where(going, hit.int().argmax(-1), node)
        wanted = torch.where(going, target[rows, node].long(), wanted)
        length += going
        path[:, step] = torch.where(going, rows * width + node, -1)
        text[:, step] = torch.where(going, wanted, 0)
    commit = length + 1
    return Accepted(path.int(), length, commit, wanted, text, prefix_lens + commit.to(prefix_lens.dtype))
