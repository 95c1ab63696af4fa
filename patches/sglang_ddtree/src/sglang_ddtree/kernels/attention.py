# ruff: noqa: N803 (kernel constants are upper case)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of a verify pass: every request brings the same number of new rows after a cached prefix.

All new rows see the whole prefix, so no mask is read there. Among themselves they see what a bit mask says (a tree), or
everything (a drafter's block). The query heads that share a KV head share a tile, so K and V are read once for all of
them; when the tiles alone would not fill the GPU, the prefix is split and the tile's last program merges the parts, in
a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_SPLITS = 16
MAX_SPLIT_M = 64  # rows of a tile whose prefix may be split
MIN_SPLIT = 256  # tokens of prefix below which another part is not worth its merge


@triton.jit(do_not_specialize=["Q", "W", "splits"])
def _verify_kernel(
    q, k_new, v_new, o, k_cache, v_cache, indptr, indices, words, part, part_ml, arrived,
    scale, Q, W, splits,
    sq, sqh, sk, skh, sv, svh, so, soh, skc, skch, svc, svch,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TREE_N: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr, MIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head_kv = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    b = tl.program_id(2)
    begin = tl.load(indptr + b).to(tl.int64)
    length = (tl.load(indptr + b + 1) - begin).to(tl.int32)
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N, MIN)
        parts = tl.maximum(tl.cdiv(length, share), 1)
    else:
        share = length
        parts = 1
    if split < parts:
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        node = m // G
        head = head_kv * G + m % G
        real = node < Q
        row = (b * Q + node).to(tl.int64)
        ind = real[:, None] & (d < D)[None, :]
        query = tl.load(q + row[:, None] * sq + head[:, None] * sqh + d[None, :], mask=ind, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        n = tl.arange(0, BLOCK_N)
        last = tl.minimum((split + 1) * share, length)
        for start in tl.range(split * share, last, BLOCK_N, num_stages=STAGES):
            here = start + n < last
            slot = tl.load(indices + begin + start + n, mask=here, other=0).to(tl.int64)
            k = tl.load(
                k_cache + slot[None, :] * skc + head_kv * skch + d[:, None],
                mask=here[None, :] & (d < D)[:, None], other=0.0,
            )  # fmt: skip
            s = tl.dot(query, k) * scale
            s = tl.where(here[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))  # finite: a step holds at least one token
            p = tl.exp2(s - new[:, None])
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(p, 1)
            v = tl.load(
                v_cache + slot[:, None] * svc + head_kv * svch + d[None, :],
                mask=here[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            top = new

        if split == parts - 1:
            c = tl.arange(0, TREE_N)
            for start in range(0, Q, TREE_N):
                col = start + c
                here = col < Q
                if TREE:
                    word = tl.load(words + row * W + start // 32, mask=real, other=0)
                    seen = ((word[:, None] >> (start % 32 + c)[None, :]) & 1) != 0
                    seen = seen & here[None, :]
                else:
                    seen = (here & (col >= 0))[None, :] & (m >= 0)[:, None]
                at = (b * Q + col).to(tl.int64)
                k = tl.load(
                    k_new + at[None, :] * sk + head_kv * skh + d[:, None],
                    mask=here[None, :] & (d < D)[:, None], other=0.0,
                )  # fmt: skip
                s = tl.where(seen, tl.dot(query, k) * scale, float("-inf"))
                new = tl.maximum(top, tl.max(s, 1))
                base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
                p = tl.exp2(s - base[:, None])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(p, 1)
                v = tl.load(
                    v_new + at[:, None] * sv + head_kv * svh + d[None, :],
                    mask=here[:, None] & (d < D)[None, :], other=0.0,
                )  # fmt: skip
                acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
                top = new

        out = o + row[:, None] * so + head[:, None] * soh + d[None, :]
        if parts == 1:
            tl.store(out, (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(o.dtype.element_ty), mask=ind)
        elif SPLIT:
            heads = tl.num_programs(1) // splits
            place = (b * heads + head_kv) * tl.num_programs(0) + tile
            r = tl.arange(0, BLOCK_M)
            mine = (place * splits + split).to(tl.int64)
            cell = r[:, None] * BLOCK_D + d[None, :]
            tl.store(part + mine * BLOCK_M * BLOCK_D + cell, acc)
            tl.store(part_ml + mine * 2 * BLOCK_M + r, top)
            tl.store(part_ml + (mine * 2 + 1) * BLOCK_M + r, total)
            tl.debug_barrier()  # every thread's stores come before the count
            if tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu") == parts - 1:
                top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for i in range(0, parts):
                    other = (place * splits + i).to(tl.int64)
                    there = tl.load(part_ml + other * 2 * BLOCK_M + r, cache_modifier=".cg")
                    new = tl.maximum(top, there)
                    base = tl.where(new == float("-inf"), 0.0, new)
                    old, add = tl.exp2(top - base), tl.exp2(there - base)
                    total = total * old + add * tl.load(part_ml + (other * 2 + 1) * BLOCK_M + r, cache_modifier=".cg")
                    acc = acc * old[:, None] + add[:, None] * tl.load(
                        part + other * BLOCK_M * BLOCK_D + cell, cache_modifier=".cg"
                    )
                    top = new
                tl.store(out, (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(o.dtype.element_ty), mask=ind)
                tl.store(arrived + place, 0)  # for the next launch


@triton.jit(do_not_specialize=["stride"])
def _prefix_kernel(table, rows, lens, indptr, indices, stride, batch, BATCH: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    others = tl.arange(0, BATCH)
    all_lens = tl.load(lens + others, mask=others < batch, other=0).to(tl.int64)
    begin = tl.sum(tl.where(others < b, all_lens, 0), 0)
    length = tl.load(lens + b).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(indptr + b + 1, (begin + length).to(indptr.dtype.element_ty))
        if b == 0:
            tl.store(indptr, tl.zeros([], tl.int64).to(indptr.dtype.element_ty))
    n = tl.arange(0, BLOCK)
    for start in range(tl.program_id(1) * BLOCK, length, BLOCK * tl.num_programs(1)):
        at = start + n
        slot = tl.load(table + row * stride + at, mask=at < length, other=0)
        tl.store(indices + begin + at, slot.to(indices.dtype.element_ty), mask=at < length)


def list_prefixes(
    table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor
) -> None:
    """The slots of every prefix, one after the other, as ``verify_attention`` reads them, in one launch.

    Args:
        table: integer [requests, tokens], unit column stride: the slot of each token.
        rows: integer [batch], the rows of the table. lens: integer [batch], prefix lengths.
        indptr: integer [batch + 1], written. indices: integer, at least sum(lens) long, written.
    """
    batch = rows.shape[0]
    if batch == 0:
        return
    _prefix_kernel[(batch, 4)](
        table, rows, lens, indptr, indices, table.stride(0), batch,
        BATCH=max(16, triton.next_power_of_2(batch)), BLOCK=512, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How a launch is cut: query rows a tile, prefix tokens and new rows a step, parts of the prefix, warps, stages."""

    block_m: int
    block_n: int
    tree_n: int
    splits: int
    warps: int
    stages: int


def plan(batch: int, width: int, heads: int, kv_heads: int, dim: int, processors: int, shared: int = 232_448) -> Shape:
    """The cut for ``batch`` requests of ``width`` rows on a GPU of ``processors``, ``shared`` bytes of shared memory a
    program. Depends on nothing that changes while a CUDA graph lives. Measured on an H200 (docs/benchmarks/gpu.md)."""
    rows = heads // kv_heads * width
    tree_n = 16 if width <= 16 else 32
    deep = 3 if shared > 160_000 and dim <= 64 else 2
    if rows >= 128 and dim <= 128 and triton.cdiv(rows, 128) * kv_heads * batch >= processors:
        return Shape(128, 64, tree_n, 1, 8, deep)
    block_m = min(MAX_SPLIT_M, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m) * kv_heads * batch
    splits = 1
    while splits < MAX_SPLITS and tiles * splits * 2 <= 2 * processors:
        splits *= 2
    block_n = 128 if dim <= 64 and shared > 160_000 else 64
    while block_n > 16 and 4 * deep * block_n * triton.next_power_of_2(dim) > 0.8 * shared:  # K and V of all stages
        block_n //= 2
    return Shape(block_m, block_n, tree_n, splits, 4, deep)


class Scratch:
    """Parts of split prefixes: as much as any ``plan`` for this many processors needs, so that it never moves while a
    CUDA graph lives. All layers share it: they run one after the other."""

    def __init__(self, device: torch.device | str, processors: int, dim: int, shared: int = 232_448) -> None:
        places = 2 * processors
        block_d = max(16, triton.next_power_of_2(dim))
        self.processors = processors
        self.shared = shared
        self.part = torch.empty(places * MAX_SPLIT_M * block_d, dtype=torch.float32, device=device)
        self.ml = torch.empty(places * MAX_SPLIT_M * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(places, dtype=torch.int32, device=device)


def verify_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    words: torch.Tensor | None,
    scratch: Scratch,
    *,
    width: int,
    scale: float,
    shape: Shape,
) -> None:
    """Attention of ``width`` new rows a request over its prefix and each other.

    Args:
        q, out: [batch * width, heads, dim], unit stride in the last dimension.
        k_new, v_new: [batch * width, kv_heads, dim] of the new rows.
        k_cache, v_cache: [slots, kv_heads, dim].
        kv_indptr: [batch + 1] and kv_indices: the prefix's slots, request after request.
        words: int32 [batch, width, ceil(width / 32)], bit c of a row: it sees row c; None: all see all.
        scratch: made for as many processors as the ``shape``.

    Raises:
        ValueError: the shape splits into more parts than the scratch holds.
    """
    heads, dim = q.shape[1:]
    kv_heads = k_new.shape[1]
    batch = q.shape[0] // width
    if batch == 0:
        return
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(dim))
    tiles = triton.cdiv(group * width, shape.block_m)
    parts = tiles * kv_heads * batch * shape.splits
    if shape.splits > 1 and (parts > 2 * scratch.processors or shape.block_m > MAX_SPLIT_M):
        raise ValueError(f"{parts} parts of {shape.block_m} rows are more than the scratch holds")
    _verify_kernel[(tiles, kv_heads * shape.splits, batch)](
        q, k_new, v_new, out, k_cache, v_cache, kv_indptr, kv_indices, q if words is None else words,
        scratch.part, scratch.ml, scratch.arrived,
        scale * 1.4426950408889634, width, (width + 31) // 32, shape.splits,
        q.stride(0), q.stride(1), k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
        out.stride(0), out.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        G=group, D=dim, BLOCK_D=block_d, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, TREE_N=shape.tree_n,
        TREE=words is not None, SPLIT=shape.splits > 1, MIN=MIN_SPLIT, STAGES=shape.stages,
        num_warps=shape.warps,
    )  # fmt: skip
