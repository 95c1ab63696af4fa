"""The worker's tree operations in Triton: static buffers, no host synchronisation.

What the next step or another stream may still read when a step begins (the walk's results) has two slots; all else is
scratch of the forward stream and has one.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree.config import Refused
from sglang_ddtree.kernels.build import TreeBuffers, build_tree
from sglang_ddtree.kernels.kv_move import KVBuffers, move_accepted_kv
from sglang_ddtree.kernels.mask import full_mask_cells, write_full_mask
from sglang_ddtree.kernels.penalties import weigh
from sglang_ddtree.kernels.walk import WalkBuffers, tree_links, walk_tree
from sglang_ddtree.kernels.window import open_window
from sglang_ddtree.penalties import Terms
from sglang_ddtree.tree import Accepted, Opened, Opening, Tree


def as_tree(buffers: TreeBuffers) -> Tree:
    """The kernel's buffers under the worker's name for them."""
    b = buffers
    return Tree(b.tokens, b.parents, b.depths, b.positions, b.scores, b.counts, b.stats)


def _grown(wanted: int, have: int) -> int:
    """Capacity for ``wanted`` rows: doubled, so that a growing batch reallocates rarely."""
    return have if wanted <= have else max(wanted, 2 * have, 8)


class TritonOps:
    """``ops.TreeOps`` on a GPU (``fill_prefix``: for attention that reads the prefix cells of the mask too)."""

    def __init__(self, device: str = "cuda", *, fill_prefix: bool = False) -> None:
        self.device = device
        self.fill_prefix = fill_prefix
        self._trees: TreeBuffers | None = None
        self._walks: list[WalkBuffers] = []
        self._slot = 0
        self._pool: tuple[int, KVBuffers] | None = None
        self._backend: Any = None

    def attach(self, backend: Any) -> None:
        """The target's attention backend: its mask buffer, which CUDA graphs read, is then written in place."""
        self._backend = backend

    def open(self, at: Opening) -> Opened:
        """See ``TreeOps.open``."""
        return open_window(at)

    def build(
        self,
        vals: torch.Tensor,
        ids: torch.Tensor,
        lse: torch.Tensor | None,
        root: torch.Tensor,
        prefix_lens: torch.Tensor,
        *,
        width: int,
        spine: bool,
    ) -> Tree:
        """See ``TreeOps.build``. The result is overwritten by the next call."""
        rows = vals.shape[0]
        if self._trees is None or self._trees.width != width or rows > self._trees.tokens.shape[0]:
            have = 0 if self._trees is None else self._trees.tokens.shape[0]
            self._trees = TreeBuffers.allocate(_grown(rows, have), width, self.device)
        out = self._trees.rows(rows)
        build_tree(vals.contiguous(), ids.contiguous(), lse, root, prefix_lens, out, spine=spine)
        return as_tree(out)

    def mask(
        self, parents: torch.Tensor, prefix_lens: torch.Tensor, prefix_lens_cpu: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """See ``TreeOps.mask``; prefix cells are not written, which Triton's attention never reads.

        If the backend has a mask buffer for CUDA graphs and the batch fits, the cells are written there and the first
        cell alone is returned: the backend's copy of what it is given into its buffer then costs nothing, and a pass
        without a graph reads the same memory.
        """
        rows, width = parents.shape
        shared = getattr(self._backend, "verify_mask", None)
        if shared is not None and shared.fits(rows):
            write_full_mask(parents, prefix_lens, shared.buffer, depth=depth, fill_prefix=self.fill_prefix)
            return shared.buffer[:1]
        if prefix_lens_cpu is None:
            raise RuntimeError("a tree mask of its own needs the prefix lengths on the host")
        cells = full_mask_cells(rows, width, int(prefix_lens_cpu.sum()))
        own = torch.empty(cells, dtype=torch.uint8, device=self.device)
        write_full_mask(parents, prefix_lens, own, depth=depth, fill_prefix=self.fill_prefix)
        return own

    def links(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TreeOps.links``."""
        child, sibling = (torch.empty(parents.shape, dtype=torch.int64, device=parents.device) for _ in range(2))
        tree_links(parents, child, sibling)
        return child, sibling

    def walk(self, tree: Tree, target: torch.Tensor, prefix_lens: torch.Tensor, *, steps: int) -> Accepted:
        """See ``TreeOps.walk``. The result stays valid during the next step and is overwritten by the one after."""
        rows = tree.tokens.shape[0]
        have = self._walks[0].accept_index.shape if self._walks else (0, steps)
        if not self._walks or rows > have[0] or steps != have[1]:
            capacity = _grown(rows, have[0])
            self._walks = [WalkBuffers.allocate(capacity, steps, self.device, prefix_lens.dtype) for _ in range(2)]
        self._slot = 1 - self._slot
        out = self._walks[self._slot].rows(rows)
        walk_tree(tree.tokens, tree.parents, target, prefix_lens, out)
        return Accepted(out.accept_index, out.accept_len, out.commit_lens, out.bonus, out.out_tokens, out.new_seq_lens)

    def weigh(
        self, logits: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor, terms: Terms, tree: Tree, *, depth: int
    ) -> None:
        """See ``TreeOps.weigh``."""
        asked = terms.frequency, terms.presence, terms.repetition
        weigh(logits, counts, slots, *asked, tree.tokens, tree.parents, depth)

    def move_kv(self, pool: Any, window: torch.Tensor, accept_index: torch.Tensor) -> None:
        """See ``TreeOps.move_kv``."""
        if self._pool is None or self._pool[0] != id(pool):
            if getattr(pool, "use_hnd", False):
                raise Refused(
                    "DDTree moves KV by token slot, which the HND layout has not; unset SGLANG_USE_HND_KVCACHE"
                )
            if getattr(pool, "native_k_scale_buffer", None) is not None:
                raise Refused("DDTree is not proven with an FP4 KV cache; remove --kv-cache-dtype")
            listed = getattr(pool, "_slot_move_pointer_buffers", None)
            buffers = list(listed()) if listed is not None else [*pool.k_buffer, *pool.v_buffer]
            self._pool = (id(pool), KVBuffers.of(buffers))
        move_accepted_kv(self._pool[1], window, accept_index)
