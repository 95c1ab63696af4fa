# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Ancestor masks: node q may see the prefix, itself and its ancestors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree.kernels.build import MAX_DEPTH


@triton.jit
def _ancestors(parents, rows, cols, Q, DEPTH):
    """[rows, cols] bool: column is the row's node or one of its ancestors."""
    seen = rows[:, None] == cols[None, :]
    at = tl.where(rows < Q, rows, -1)
    for _ in range(0, DEPTH):
        at = tl.load(parents + at, mask=at > 0, other=-1)
        seen = seen | (at[:, None] == cols[None, :])
    return seen


@triton.jit(do_not_specialize=["Q", "batch", "DEPTH"])
def _full_kernel(
    parents, seq_lens, out, Q, batch, DEPTH,
    S: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr,
    PREFIX: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, S)
    seen = _ancestors(parents + b * Q, rows, cols, Q, DEPTH)
    if PREFIX:
        others = tl.arange(0, BATCH)
        lens = tl.load(seq_lens + others, mask=(others < b) & (others < batch), other=0).to(tl.int64)
        base = tl.sum(tl.where(others < b, Q * (lens + Q), 0), 0)
        seq = tl.load(seq_lens + b).to(tl.int64)
    else:
        base = b.to(tl.int64) * Q * Q
        seq = tl.zeros([], tl.int64)
    row_at = base + rows.to(tl.int64) * (seq + Q)
    tl.store(
        out + row_at[:, None] + (seq + cols)[None, :],
        seen.to(out.dtype.element_ty),
        mask=(rows < Q)[:, None] & (cols < Q)[None, :],
    )
    if FILL:
        ones = tl.full([ROWS, S], 1, tl.int8).to(out.dtype.element_ty)
        for start in range(0, seq, S):
            pre = start + cols
            tl.store(out + row_at[:, None] + pre[None, :], ones, mask=(rows < Q)[:, None] & (pre < seq)[None, :])


@triton.jit(do_not_specialize=["Q", "W", "DEPTH"])
def _packed_kernel(parents, out, Q, W, DEPTH, S: tl.constexpr):
    b = tl.program_id(0)
    word = tl.program_id(1)
    rows = tl.arange(0, S)
    bits = tl.arange(0, 32)
    seen = _ancestors(parents + b * Q, rows, word * 32 + bits, Q, DEPTH)
    packed = tl.sum(seen.to(tl.int64) << bits[None, :].to(tl.int64), 1).to(tl.int32)
    tl.store(out + (b * Q + rows) * W + word, packed, mask=rows < Q)


def full_mask_cells(batch: int, width: int, seq_lens_sum: int) -> int:
    """Cells of the FULL_MASK layout: rows of ``seq_len + width`` for each of ``width`` nodes a request."""
    return width * (seq_lens_sum + batch * width)


def _launch(
    parents: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, depth: int, prefix: bool, fill: bool
) -> None:
    batch, width = parents.shape
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"a tree is 1 to {MAX_DEPTH} deep, not {depth}")
    if batch == 0:
        return
    rows = min(16, triton.next_power_of_2(width))
    flat = out.view(torch.uint8) if out.dtype == torch.bool else out
    _full_kernel[(batch, triton.cdiv(width, rows))](
        parents, seq_lens, flat, width, batch, depth,
        S=max(16, triton.next_power_of_2(width)), ROWS=rows,
        BATCH=max(16, triton.next_power_of_2(batch)), PREFIX=prefix, FILL=fill, num_warps=4,
    )  # fmt: skip


def write_full_mask(
    parents: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, *, depth: int, fill_prefix: bool = False
) -> None:
    """Write the tree cells of SGLang's FULL_MASK layout, request after request, rows of ``seq_len + width``.

    Args:
        parents: int32 [batch, width], see ``TreeBuffers``.
        seq_lens: integer [batch], true prefix lengths.
        out: flat bool or uint8, at least ``full_mask_cells`` long. Not checked: the need is known on the GPU only.
        depth: the deepest a node can be.
        fill_prefix: also set the prefix cells (FlashInfer reads them; Triton and FA3 do not).
    """
    _launch(parents, seq_lens, out, depth, True, fill_prefix)


def write_qlen_mask(parents: torch.Tensor, out: torch.Tensor, *, depth: int) -> None:
    """Write the tree cells alone: ``out`` bool or uint8, flat or [batch, width, width]."""
    _launch(parents, parents, out, depth, False, False)


def write_packed_mask(parents: torch.Tensor, out: torch.Tensor, *, depth: int) -> None:
    """Write the tree cells as bits: ``out`` int32 [batch, width, ceil(width / 32)], column c is bit c % 32."""
    batch, width = parents.shape
    words = triton.cdiv(width, 32)
    if out.shape != (batch, width, words) or out.dtype != torch.int32:
        raise ValueError(f"the packed mask must be int32 {(batch, width, words)}, not {out.dtype} {tuple(out.shape)}")
    if batch == 0:
        return
    _packed_kernel[(batch, words)](
        parents, out, width, words, depth, S=max(16, triton.next_power_of_2(width)), num_warps=4
    )


def fill_words(words: torch.Tensor, parents: torch.Tensor, depth: int) -> None:
    """The mask of a batch's trees in the first rows of ``words`` int32 [requests, width, any]; parents int32 [bs,
    width]. The only writer of what ``verify_attention`` reads, so that the start-up check sees a fault in it."""
    write_packed_mask(parents, words[: parents.shape[0]], depth=depth)
