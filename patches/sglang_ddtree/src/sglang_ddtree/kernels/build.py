# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Best-first draft tree by product of marginals: one program a request, one max-reduction a node.

Each node holds exactly one candidate: its next unused child. The state of the heap therefore fits in one
lane a node, and popping is a maximum over the lanes. The 64-bit key of a lane carries the score in its
upper half (mapped to an integer of the same order) and ``255 - lane, depth, rank`` below, so one reduction
yields the winner, breaks ties by the lower lane, and says which child it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_BUDGET = 255
MAX_DEPTH = 31
STATS = ("depth", "leaves", "mass", "saturated")


@dataclass(frozen=True)
class TreeBuffers:
    """What ``build_tree`` writes, for up to ``capacity`` requests of ``width`` nodes (root included).

    Nodes past ``count`` are padding: token 0, parent -1, depth 0, score -inf. They are children of nobody.

    Attributes:
        tokens: int64 [capacity, width].
        parents: int32 [capacity, width]; -1 for the root; always smaller than the node's own index.
        depths: int32 [capacity, width]; 0 for the root.
        positions: int64 [capacity, width]; prefix length + depth.
        scores: float32 [capacity, width]; log of the product of marginals; 0 for the root.
        counts: int32 [capacity]; nodes in use, root included.
        stats: float32 [capacity, 4]; see ``STATS``: deepest node, leaves, sum of node probabilities
            (the accepted drafts the drafter itself expects), nodes at the last candidate rank (0 means
            that more candidates a position could not have changed the tree).
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, width: int, device: torch.device | str) -> TreeBuffers:
        """Make buffers for trees of ``width`` nodes, root included (2 to 256).

        Raises:
            ValueError: the width is outside that range.
        """
        if not 2 <= width <= MAX_BUDGET + 1:
            raise ValueError(f"a tree has 1 to {MAX_BUDGET} draft nodes, not {width - 1}: change the budget")
        shape = (capacity, width)
        return cls(
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            parents=torch.full(shape, -1, dtype=torch.int32, device=device),
            depths=torch.zeros(shape, dtype=torch.int32, device=device),
            positions=torch.zeros(shape, dtype=torch.int64, device=device),
            scores=torch.zeros(shape, dtype=torch.float32, device=device),
            counts=torch.zeros(capacity, dtype=torch.int32, device=device),
            stats=torch.zeros((capacity, len(STATS)), dtype=torch.float32, device=device),
        )

    @property
    def width(self) -> int:
        """Nodes a tree, root included."""
        return int(self.tokens.shape[1])

    def rows(self, batch: int) -> TreeBuffers:
        """The first ``batch`` requests, as views."""
        return TreeBuffers(
            self.tokens[:batch],
            self.parents[:batch],
            self.depths[:batch],
            self.positions[:batch],
            self.scores[:batch],
            self.counts[:batch],
            self.stats[:batch],
        )


@triton.jit
def _logp(vals, lse, row, rank, inside, K, HAS_LSE: tl.constexpr):
    """log-probability of candidate ``rank`` at ``row``: at most 0, -inf outside the table and for NaN."""
    v = tl.load(vals + row * K + rank, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_LSE:
        v = v - tl.load(lse + row, mask=inside, other=0.0).to(tl.float32)
    v = tl.where(v == v, v, float("-inf"))
    return tl.minimum(v, 0.0)


@triton.jit
def _key(score, lane, depth, rank):
    """The lane's key; a candidate of probability 0 gets the smallest key and is never taken."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 and 0.0 tie
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = ((255 - lane) << 16) | (depth << 8) | rank
    key = (order.to(tl.int64) << 32) | low.to(tl.int64)
    return tl.where(score == float("-inf"), -9223372036854775807, key)


@triton.jit
def _grow(key, mass, info, inner, lane, count, take, p, d, r, best, sibling, child):
    """Append node ``count`` = child ``r`` of node ``p`` (at depth ``d``) if ``take``; renew both candidates."""
    isp = lane == tl.where(take, p, -1)
    isn = lane == tl.where(take, count, -1)
    key = tl.where(isp, _key(sibling, p, d, r + 1), tl.where(isn, _key(child, count, d + 1, 0), key))
    mass = tl.where(isn, best, mass)
    info = tl.where(isn, (p << 16) | (d << 8) | r, info)
    inner = inner | isp.to(tl.int32)
    count = tl.where(take, count + 1, count)
    return key, mass, info, inner, count


@triton.jit(do_not_specialize=["L", "K", "Q", "root_stride", "prefix_stride"])
def _build_kernel(
    vals, ids, lse, root, prefix, tokens, parents, depths, positions, scores, counts, stats,
    L, K, Q, root_stride, prefix_stride,
    S: tl.constexpr, SPINE: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, S)
    vals += b * L * K
    ids += b * L * K
    lse += b * L
    first = _logp(vals, lse, 0, 0, L > 0, K, HAS_LSE)
    key = tl.where(lane == 0, _key(first, 0, 0, 0), -9223372036854775807)
    mass = tl.zeros([S], tl.float32)
    info = tl.zeros([S], tl.int32)  # parent, row and rank of the node, 8 bits each
    inner = tl.zeros([S], tl.int32)  # 1 if the node has a child
    count = tl.full([], 1, tl.int32)

    if SPINE:
        above = 0.0
        step = first
        for i in range(0, tl.minimum(L, Q - 1)):
            best = above + step
            sibling = above + _logp(vals, lse, i, 1, K > 1, K, HAS_LSE)
            step = _logp(vals, lse, i + 1, 0, i + 1 < L, K, HAS_LSE)
            take = (best > float("-inf")) & (count == i + 1)
            key, mass, info, inner, count = _grow(
                key, mass, info, inner, lane, count, take, i, i, 0, best, sibling, best + step
            )
            above = best

    for _ in range(count, Q):
        top = tl.max(key, 0)
        take = top != -9223372036854775807
        low = top.to(tl.int32)
        p = 255 - ((low >> 16) & 255)
        d = (low >> 8) & 255
        r = low & 255
        order = (top >> 32).to(tl.int32)
        best = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        above = tl.sum(tl.where(lane == p, mass, 0.0), 0)
        sibling = above + _logp(vals, lse, d, r + 1, take & (r + 1 < K), K, HAS_LSE)
        child = best + _logp(vals, lse, d + 1, 0, take & (d + 1 < L), K, HAS_LSE)
        key, mass, info, inner, count = _grow(key, mass, info, inner, lane, count, take, p, d, r, best, sibling, child)

    node = (lane > 0) & (lane < count)
    row = (info >> 8) & 255
    rank = info & 255
    depth = tl.where(node, row + 1, 0)
    token = tl.load(ids + row * K + rank, mask=node, other=0).to(tl.int64)
    token = tl.where(lane == 0, tl.load(root + b * root_stride).to(tl.int64), token)
    at = b * Q + lane
    inside = lane < Q
    tl.store(tokens + at, token, mask=inside)
    tl.store(parents + at, tl.where(node, (info >> 16) & 255, -1), mask=inside)
    tl.store(depths + at, depth, mask=inside)
    tl.store(positions + at, tl.load(prefix + b * prefix_stride).to(tl.int64) + depth, mask=inside)
    tl.store(scores + at, tl.where(lane < count, mass, float("-inf")), mask=inside)
    tl.store(counts + b, count)
    tl.store(stats + b * 4, tl.max(depth, 0).to(tl.float32))
    tl.store(stats + b * 4 + 1, tl.sum(tl.where(node & (inner == 0), 1, 0), 0).to(tl.float32))
    tl.store(stats + b * 4 + 2, tl.sum(tl.where(node, tl.exp(mass), 0.0), 0))
    tl.store(stats + b * 4 + 3, tl.sum(tl.where(node & (rank == K - 1), 1, 0), 0).to(tl.float32))


def build_tree(
    vals: torch.Tensor,
    ids: torch.Tensor,
    lse: torch.Tensor | None,
    root: torch.Tensor,
    prefix_lens: torch.Tensor,
    out: TreeBuffers,
    *,
    spine: bool | None = None,
) -> None:
    """Build one tree a request into ``out`` (sized to the batch, see ``TreeBuffers.rows``).

    Args:
        vals: float [batch, depth, K], the K best candidates of each draft position, best first. Logits if
            ``lse`` is given, log-probabilities otherwise.
        ids: integer [batch, depth, K], their token ids, distinct within a position.
        lse: float [batch, depth] log-sum-exp over the vocabulary, or None.
        root: integer [batch], any stride, the last committed token.
        prefix_lens: integer [batch], any stride, tokens already in the KV cache.
        out: budget = ``out.width - 1``.
        spine: take the chain of best candidates first, whatever its score. Default: if the budget holds it.

    Raises:
        ValueError: shapes do not fit together, or K or depth is out of range.
    """
    batch, depth, k = vals.shape
    if ids.shape != vals.shape or out.tokens.shape[0] != batch:
        raise ValueError(
            f"candidates {tuple(vals.shape)}, ids {tuple(ids.shape)} and {out.tokens.shape[0]} trees do not fit"
        )
    if not 1 <= depth <= MAX_DEPTH or not 1 <= k <= 256:
        raise ValueError(f"a tree is 1 to {MAX_DEPTH} deep over 1 to 256 candidates, not {depth} over {k}")
    if not vals.is_contiguous() or not ids.is_contiguous() or (lse is not None and not lse.is_contiguous()):
        raise ValueError("the candidate tables must be contiguous")
    if batch == 0:
        return
    width = out.width
    _build_kernel[(batch,)](
        vals, ids, vals if lse is None else lse, root, prefix_lens,
        out.tokens, out.parents, out.depths, out.positions, out.scores, out.counts, out.stats,
        depth, k, width, root.stride(0), prefix_lens.stride(0),
        S=max(16, triton.next_power_of_2(width)), SPINE=width > depth if spine is None else spine,
        HAS_LSE=lse is not None, num_warps=1,
    )  # fmt: skip
