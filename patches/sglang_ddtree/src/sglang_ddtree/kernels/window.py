# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What a step begins with, in one launch: the KV slots after every prefix, and the drafter's ids and positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def open_window(
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    roots: torch.Tensor,
    *,
    window: int,
    block: int,
    mask_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots int64 [batch, window] at positions ``lens`` and on; the drafter's ids int64 [batch, block] (the root, then
    mask tokens) and positions int64 [batch, block]. ``table`` integer [requests, tokens], unit column stride; the
    others integer [batch]."""
    batch = rows.shape[0]
    slots = torch.empty((batch, window), dtype=torch.int64, device=table.device)
    drafted = torch.empty((2, batch, block), dtype=torch.int64, device=table.device)
    if batch:
        _open_kernel[(batch,)](
            table, rows, lens, roots.contiguous(), slots, drafted[0], drafted[1],
            table.stride(0), window, block, mask_id,
            S=triton.next_power_of_2(max(window, block, 16)), num_warps=1,
        )  # fmt: skip
    return slots, drafted[0], drafted[1]
