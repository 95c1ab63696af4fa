# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Walk the verified tree: follow the target's tokens from the root as long as they name a child."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class WalkBuffers:
    """What ``walk_tree`` writes for up to ``capacity`` requests; ``steps`` = depth + 1.

    Attributes:
        accept_index: int32 [capacity, steps]; row ``request * width + node`` of the path, root first, then -1.
        accept_len: int32 [capacity]; accepted drafts, 0 to depth.
        commit_lens: int32 [capacity]; ``accept_len + 1``: the tokens this step adds.
        bonus: int64 [capacity]; the target's token after the path: the next root.
        out_tokens: int64 [capacity, steps]; accepted drafts, then the bonus, then 0.
        new_seq_lens: prefix lengths + ``commit_lens``.
    """

    accept_index: torch.Tensor
    accept_len: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor
    out_tokens: torch.Tensor
    new_seq_lens: torch.Tensor

    @classmethod
    def allocate(
        cls, capacity: int, steps: int, device: torch.device | str, seq_dtype: torch.dtype = torch.int64
    ) -> WalkBuffers:
        """Make buffers for paths of up to ``steps`` nodes, root included."""
        return cls(
            accept_index=torch.full((capacity, steps), -1, dtype=torch.int32, device=device),
            accept_len=torch.zeros(capacity, dtype=torch.int32, device=device),
            commit_lens=torch.zeros(capacity, dtype=torch.int32, device=device),
            bonus=torch.zeros(capacity, dtype=torch.int64, device=device),
            out_tokens=torch.zeros((capacity, steps), dtype=torch.int64, device=device),
            new_seq_lens=torch.zeros(capacity, dtype=seq_dtype, device=device),
        )

    def rows(self, batch: int) -> WalkBuffers:
        """The first ``batch`` requests, as views."""
        return WalkBuffers(
            self.accept_index[:batch],
            self.accept_len[:batch],
            self.commit_lens[:batch],
            self.bonus[:batch],
            self.out_tokens[:batch],
            self.new_seq_lens[:batch],
        )


@triton.jit(do_not_specialize=["Q", "D"])
def _walk_kernel(
    tokens, parents, target, prefix, accept_index, accept_len, commit_lens, bonus, out_tokens, new_seq_lens,
    Q, D, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, S)
    slot = tl.arange(0, P)
    inside = lane < Q
    tok = tl.load(tokens + b * Q + lane, mask=inside, other=-1)
    par = tl.load(parents + b * Q + lane, mask=inside, other=-1)
    want = tl.load(target + b * Q + lane, mask=inside, other=-1).to(tl.int64)
    node = 0
    length = 0
    going = 1
    token = tl.sum(tl.where(lane == 0, want, 0), 0)
    path = tl.where(slot == 0, b * Q, -1)
    text = tl.where(slot == 0, token, 0)
    for step in range(1, D):
        hit = tl.max(tl.where((par == node) & (tok == token), lane, -1), 0)
        going = tl.where(hit < 0, 0, going)
        node = tl.where(going > 0, hit, node)
        token = tl.where(going > 0, tl.sum(tl.where(lane == hit, want, 0), 0), token)
        length += going
        here = slot == tl.where(going > 0, step, -1)
        path = tl.where(here, b * Q + node, path)
        text = tl.where(here, token, text)
    tl.store(accept_index + b * D + slot, path.to(tl.int32), mask=slot < D)
    tl.store(out_tokens + b * D + slot, text, mask=slot < D)
    tl.store(accept_len + b, length)
    tl.store(commit_lens + b, length + 1)
    tl.store(bonus + b, token)
    seq = tl.load(prefix + b) + length + 1
    tl.store(new_seq_lens + b, seq.to(new_seq_lens.dtype.element_ty))


@triton.jit(do_not_specialize=["Q"])
def _links_kernel(parents, first_child, next_sibling, Q, S: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    lane = tl.arange(0, S)
    par = tl.load(parents + b * Q + lane, mask=lane < Q, other=-1)
    mine = tl.load(parents + b * Q + n)
    child = tl.min(tl.where(par == n, lane, S), 0)
    sibling = tl.min(tl.where((par == tl.where(mine >= 0, mine, -2)) & (lane > n), lane, S), 0)
    tl.store(first_child + b * Q + n, tl.where(child < S, child, -1).to(tl.int64))
    tl.store(next_sibling + b * Q + n, tl.where(sibling < S, sibling, -1).to(tl.int64))


def walk_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    target: torch.Tensor,
    prefix_lens: torch.Tensor,
    out: WalkBuffers,
) -> None:
    """Find each request's accepted path.

    Children of a node carry distinct tokens, so at most one matches.

    Args:
        tokens: int64 [batch, width], see ``TreeBuffers``.
        parents: int32 [batch, width].
        target: integer [batch * width] or [batch, width]: the target's token after each node.
        prefix_lens: integer [batch].
        out: sized to the batch.
    """
    batch, width = tokens.shape
    steps = out.accept_index.shape[1]
    if batch == 0:
        return
    _walk_kernel[(batch,)](
        tokens, parents, target, prefix_lens,
        out.accept_index, out.accept_len, out.commit_lens, out.bonus, out.out_tokens, out.new_seq_lens,
        width, steps,
        S=max(16, triton.next_power_of_2(width)), P=max(16, triton.next_power_of_2(steps)), num_warps=1,
    )  # fmt: skip


def tree_links(parents: torch.Tensor, first_child: torch.Tensor, next_sibling: torch.Tensor) -> None:
    """Write int64 [batch, width] first-child and next-sibling links (-1: none), as grammar masks want them."""
    batch, width = parents.shape
    if batch == 0:
        return
    _links_kernel[(batch, width)](
        parents, first_child, next_sibling, width, S=max(16, triton.next_power_of_2(width)), num_warps=1
    )
