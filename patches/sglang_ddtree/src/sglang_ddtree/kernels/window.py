# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What a step begins with, in one launch: the KV slots after every prefix, and the drafter's ids and positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree.tree import Opened, Opening


@triton.jit(do_not_specialize=["stride", "N", "B", "mask_id"])
def _open_kernel(table, rows, lens, roots, slots, ids, positions, stride, N, B, mask_id, S: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, S)
    length = tl.load(lens + b).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    slot = tl.load(table + row * stride + length + lane, mask=lane < N, other=0)
    tl.store(slots + b * N + lane, slot.to(tl.int64), mask=lane < N)
    root = tl.load(roots + b).to(tl.int64)
    tl.store(ids + b * B + lane, tl.where(lane == 0, root, mask_id), mask=lane < B)
    tl.store(positions + b * B + lane, length + lane, mask=lane < B)


def open_window(at: Opening) -> Opened:
    """The slots, ids and positions, in tensors of their own. The table needs unit column stride."""
    batch = at.rows.shape[0]
    slots = torch.empty((batch, at.window), dtype=torch.int64, device=at.table.device)
    ids, positions = torch.empty((2, batch, at.block), dtype=torch.int64, device=at.table.device)
    if batch:
        _open_kernel[(batch,)](
            at.table, at.rows, at.lens, at.roots.contiguous(), slots, ids, positions,
            at.table.stride(0), at.window, at.block, at.mask_id,
            S=triton.next_power_of_2(max(at.window, at.block, 16)), num_warps=1,
        )  # fmt: skip
    return Opened(slots, ids, positions)
