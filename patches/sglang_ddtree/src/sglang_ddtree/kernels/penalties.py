# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Frequency, presence and repetition penalties of every node, in one launch.

Only scores that change are read and written: those of tokens that stand in a request's output or in its tree. Else it
reads a request's counts, once: 4 bytes a token of the vocabulary. Plain torch reads and writes all rows, with a
repetition penalty some five times. Two kinds of programs share the work, and no score has two of them:

- one for a tile of the vocabulary: tokens of the output that are not in the tree, alike for all nodes;
- one for a node: the tokens of the tree, whose counts hang on the node's path.

Equal to ``penalties.weigh`` to the bit (IEEE division, no fused multiply-add), but for the sign of a zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 512
_NODES = 8  # rows a program takes at once, of its tile


@triton.jit
def _weighed(score, count, frequency, presence, repetition):
    score = score - (frequency * count.to(tl.float32) + presence)
    return tl.where(score < 0, score * repetition, tl.div_rn(score, repetition))


@triton.jit(do_not_specialize=["Q", "D", "tiles", "step"])
def _weigh_kernel(
    logits, counts, slots, frequency, presence, repetition, tokens, parents, V, Q, D, tiles, step,
    TILE: tl.constexpr, NODES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    f = tl.load(frequency + b * step)
    p = tl.load(presence + b * step)
    r = tl.load(repetition + b * step)
    if (f != 0) | (p != 0) | (r != 1):
        output = counts + tl.load(slots + b).to(tl.int64) * V
        if part < tiles:
            col = part * TILE + tl.arange(0, TILE)
            alike = tl.load(output + col, mask=col < V, other=0)
            if tl.max(alike, 0) > 0:
                for m in range(0, Q):
                    alike = tl.where(col == tl.load(tokens + b * Q + m), 0, alike)
                for first in range(0, Q, NODES):
                    row = first + tl.arange(0, NODES)
                    cells = logits + (b * Q + row)[:, None] * V + col[None, :]
                    mine = (row < Q)[:, None] & (alike > 0)[None, :]
                    scores = tl.load(cells, mask=mine, other=0.0)
                    tl.store(cells, _weighed(scores, alike[None, :], f, p, r), mask=mine)
        else:
            node = part - tiles
            lane = tl.arange(0, S)
            token = tl.load(tokens + b * Q + lane, mask=lane < Q, other=0)
            count = tl.load(output + token, mask=lane < Q, other=0)
            at = logits + (b * Q + node) * V + token
            score = tl.load(at, mask=lane < Q, other=0.0)
            up = tl.load(parents + b * Q + node)
            for _ in range(0, D):  # from the node up; the root is in the output
                draft = tl.load(tokens + b * Q + node)
                count += tl.where((up >= 0) & (token == draft), 1, 0)
                node = tl.where(up >= 0, up, node)
                up = tl.load(parents + b * Q + node)
            # a token may be in the tree more than once: all of its lanes have read it before one writes, all the same
            tl.debug_barrier()
            tl.store(at, _weighed(score, count, f, p, r), mask=(lane < Q) & (count > 0))


def weigh(
    logits: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
) -> None:
    """In place. logits float32 [bs * width, vocab]; counts int32 [any, vocab] of the outputs, roots included, those of
    the batch in rows ``slots`` [bs]; frequency, presence, repetition float32 [bs] of one stride; tokens int64, parents
    integer [bs, width]. All but those three contiguous."""
    batch, width = tokens.shape
    vocab = logits.shape[1]
    tiles = triton.cdiv(vocab, _TILE)
    if batch:
        _weigh_kernel[(batch, tiles + width)](
            logits, counts, slots, frequency, presence, repetition, tokens, parents,
            vocab, width, depth, tiles, frequency.stride(0),
            TILE=_TILE, NODES=_NODES, S=max(16, triton.next_power_of_2(width)), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
