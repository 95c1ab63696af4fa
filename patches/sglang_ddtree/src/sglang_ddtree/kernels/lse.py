# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""log-sum-exp over the vocabulary in one pass, in float32 whatever the logits' type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
_TILES = 4  # a program reads this many tiles: at a batch of 1 the rows alone would not fill a GPU


@triton.jit(do_not_specialize=["V", "stride", "P"])
def _lse_kernel(logits, out, V, stride, P, TILE: tl.constexpr, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for i in range(TILES):
        col = (part * TILES + i) * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # a tile of -inf alone
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = new
    tl.store(out + row * P + part, top + tl.log(tl.maximum(total, 1e-37)))


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] (unit column stride) -> float32 [rows]."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _TILE * _TILES)
    out = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    _lse_kernel[(rows, parts)](logits, out, vocab, logits.stride(0), parts, TILE=_TILE, TILES=_TILES, num_warps=8)
    return out.logsumexp(-1)
