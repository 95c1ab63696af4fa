"""``sgl_kernel.speculative``: what NGRAM needs (``kernels/ops/speculative/reconstruct_tree.py:50``)."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    bs: int,
    nodes: int,
) -> None:
    """Positions, first children and next siblings of ``bs`` trees of ``nodes`` nodes, from their ancestor masks (flat
    bool). A node's parent is its last strict ancestor; -1 marks none. Writes the four output tensors in place."""
    mask = tree_mask.view(bs, nodes, nodes).bool()
    order = torch.arange(nodes)
    ancestors = mask & (order[:, None] > order[None, :])
    positions.view(bs, nodes).copy_(ancestors.sum(-1) + verified_seq_len[:, None])
    retrive_index.copy_(torch.arange(bs * nodes).view(bs, nodes))
    parent = torch.where(ancestors, order, -1).amax(-1)
    # same[b, i, j]: node j comes after i and has i as parent / has the parent of i
    children = parent[:, None, :] == order[None, :, None]
    siblings = (
        (parent[:, None, :] == parent[:, :, None]) & (order[None, :] > order[:, None]) & (parent >= 0)[:, :, None]
    )
    for out, candidates in ((retrive_next_token, children), (retrive_next_sibling, siblings)):
        first = torch.where(candidates, order, nodes).amin(-1)
        out.copy_(torch.where(first < nodes, first, -1).view(bs, nodes))
