# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Add a step's trees and what was accepted of them to running sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["Q", "D", "stride"])
def _account_kernel(
    scores, depths, counts, stats, accept_len, slots, sums, Q, D, stride, S: tl.constexpr, P: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    if tl.load(slots + b * stride) != 0:
        lane = tl.arange(0, S)
        node = (lane > 0) & (lane < tl.load(counts + b))
        depth = tl.load(depths + b * Q + lane, mask=node, other=0)
        score = tl.load(scores + b * Q + lane, mask=node, other=0.0)
        tl.atomic_add(sums + depth, tl.exp(score).to(tl.float64), mask=node, sem="relaxed")
        tl.atomic_add(sums + D + depth, tl.full([S], 1.0, tl.float64), mask=node, sem="relaxed")
        d = tl.arange(0, P)
        reached = (d <= tl.load(accept_len + b)) & (d < D)
        tl.atomic_add(sums + 2 * D + d, tl.full([P], 1.0, tl.float64), mask=reached, sem="relaxed")
        shape = tl.load(stats + b * 4 + d, mask=d < 2, other=0.0)
        tl.atomic_add(sums + 3 * D + d, shape.to(tl.float64), mask=d < 2, sem="relaxed")


def account(
    scores: torch.Tensor,
    depths: torch.Tensor,
    counts: torch.Tensor,
    stats: torch.Tensor,
    accept_len: torch.Tensor,
    slots: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """scores, depths [batch, width], counts [batch] and stats float32 [batch, 4] as in ``TreeBuffers``; accept_len
    [batch]; slots integer [batch, any], a row whose first is 0 does not count; sums float64 [4, steps], steps at least
    2: see ``metrics.Metrics``."""
    batch, width = depths.shape
    steps = sums.shape[1]
    if batch:
        _account_kernel[(batch,)](
            scores, depths, counts, stats, accept_len, slots, sums, width, steps, slots.stride(0),
            S=max(16, triton.next_power_of_2(width)), P=max(16, triton.next_power_of_2(steps)), num_warps=1,
        )  # fmt: skip
