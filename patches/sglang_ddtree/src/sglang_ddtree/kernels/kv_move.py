# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Move the KV of the accepted path to the front of each request's window, in place.

A slot of the window can be both the destination of one path position and the source of another. Every
program therefore reads its whole column of the path before it writes any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK_BYTES = 1024


@dataclass(frozen=True)
class KVBuffers:
    """The K and V buffers of all layers, addressed as rows of bytes, one row a token slot.

    Attributes:
        pointers: uint64 [buffers], device addresses.
        row_bytes: int64 [buffers], bytes a row.
        max_row_bytes: the largest of them.
        word: bytes of the widest word that divides every row (8, 4, 2 or 1).
        keep: the tensors, so that they outlive the addresses.
    """

    pointers: torch.Tensor
    row_bytes: torch.Tensor
    max_row_bytes: int
    word: int
    keep: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> KVBuffers:
        """Describe ``buffers``, each contiguous [slots, ...].

        Raises:
            ValueError: none given, or one is not contiguous.
        """
        if not buffers:
            raise ValueError("no KV buffer to move: the pool has no layers")
        if any(not b.is_contiguous() for b in buffers):
            raise ValueError("a KV buffer is not contiguous: use the default KV layout (NHD)")
        rows = [int(b[0].numel()) * b.element_size() for b in buffers]
        word = next(w for w in (8, 4, 2, 1) if all(r % w == 0 for r in rows))
        device = buffers[0].device
        return cls(
            pointers=torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64).to(device),
            row_bytes=torch.tensor(rows, dtype=torch.int64, device=device),
            max_row_bytes=max(rows),
            word=word,
            keep=tuple(buffers),
        )


@triton.jit(do_not_specialize=["Q", "D", "stride"])
def _move_kernel(
    pointers, row_bytes, window, accept_index, Q, D, stride,
    P: tl.constexpr, CHUNK: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    buffer = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, P)
    row = tl.load(accept_index + b * D + slot, mask=slot < D, other=-1).to(tl.int64)
    node = row - b * Q
    moves = (row >= 0) & (node != slot)
    if tl.max(moves.to(tl.int32), 0) > 0:
        source = tl.load(window + b * stride + node, mask=moves, other=0).to(tl.int64)
        target = tl.load(window + b * stride + slot, mask=moves, other=0).to(tl.int64)
        words = tl.load(row_bytes + buffer) // WORD
        base = tl.load(pointers + buffer)
        if WORD == 8:
            base = base.to(tl.pointer_type(tl.int64))
        elif WORD == 4:
            base = base.to(tl.pointer_type(tl.int32))
        elif WORD == 2:
            base = base.to(tl.pointer_type(tl.int16))
        else:
            base = base.to(tl.pointer_type(tl.int8))
        col = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
        mask = moves[:, None] & (col < words)[None, :]
        data = tl.load(base + source[:, None] * words + col[None, :], mask=mask, other=0)
        tl.debug_barrier()
        tl.store(base + target[:, None] * words + col[None, :], data, mask=mask)


def move_accepted_kv(kv: KVBuffers, window: torch.Tensor, accept_index: torch.Tensor) -> None:
    """Copy, in every buffer, the row of path position i from its node's slot to slot i of the window.

    Positions already in place (always so for the chain, whose nodes come first) cost nothing.

    Args:
        kv: the pool's buffers.
        window: integer [batch, width], the slot of each node; rows may be strided.
        accept_index: int32 [batch, steps], see ``WalkBuffers``.
    """
    batch, width = window.shape
    steps = accept_index.shape[1]
    if window.stride(1) != 1:
        raise ValueError("the slots of a window must lie side by side")
    if batch == 0:
        return
    chunk = _CHUNK_BYTES // kv.word
    words = kv.max_row_bytes // kv.word
    _move_kernel[(len(kv.keep), batch, triton.cdiv(words, chunk))](
        kv.pointers, kv.row_bytes, window, accept_index, width, steps, window.stride(0),
        P=max(16, triton.next_power_of_2(steps)), CHUNK=chunk, WORD=kv.word, num_warps=4,
    )  # fmt: skip
