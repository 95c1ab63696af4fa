"""The seam between the worker and how its tree operations are computed: plain torch, or Triton on a GPU."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from sglang_ddtree import penalties
from sglang_ddtree import tree as torch_tree
from sglang_ddtree.penalties import Terms
from sglang_ddtree.tree import Accepted, Opened, Opening, Tree


class TreeOps(Protocol):
    """Operations of one step. Shapes and meanings: ``Opening``, ``Opened``, ``Tree`` and ``Accepted`` in ``tree``."""

    def open(self, at: Opening) -> Opened:
        """What the step works on."""

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
        """Trees from candidates: vals, ids [bs, L, K], lse [bs, L] or None, root and prefix_lens [bs]."""

    def mask(
        self, parents: torch.Tensor, prefix_lens: torch.Tensor, prefix_lens_cpu: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """FULL_MASK for the attention backend, flat bool."""

    def links(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First child and next sibling, int64 [bs, width], -1 for none."""

    def walk(self, tree: Tree, target: torch.Tensor, prefix_lens: torch.Tensor, *, steps: int) -> Accepted:
        """Accepted paths; target [bs, width]."""

    def weigh(
        self, logits: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor, terms: Terms, tree: Tree, *, depth: int
    ) -> None:
        """Penalties by the tokens before each node, in place: logits float32 [bs * width, vocab], counts int32
        [any, vocab], whose rows ``slots`` [bs] are the batch's."""

    def move_kv(self, pool: Any, window: torch.Tensor, accept_index: torch.Tensor) -> None:
        """Copy the KV of every path to the front of its request's ``window`` [bs, width] in the target's pool. A slot
        may be a source and a destination at once: read everything before writing anything."""


class TorchOps:
    """Plain torch, the reference on any device."""

    def open(self, at: Opening) -> Opened:
        device, lens = at.lens.device, at.lens.long()[:, None]
        places = lens + torch.arange(at.window, device=device)
        ids = torch.full((len(at.rows), at.block), at.mask_id, dtype=torch.int64, device=device)
        ids[:, 0] = at.roots
        positions = lens + torch.arange(at.block, device=device)
        return Opened(at.table[at.rows[:, None], places].long(), ids, positions)

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
        return torch_tree.build_tree(vals, ids, lse, root, prefix_lens, width, spine)

    def mask(
        self, parents: torch.Tensor, prefix_lens: torch.Tensor, prefix_lens_cpu: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        return torch_tree.full_mask(parents, prefix_lens, depth)

    def links(self, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_tree.links(parents)

    def walk(self, tree: Tree, target: torch.Tensor, prefix_lens: torch.Tensor, *, steps: int) -> Accepted:
        return torch_tree.walk(tree.tokens, tree.parents, target, prefix_lens, steps)

    def weigh(
        self, logits: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor, terms: Terms, tree: Tree, *, depth: int
    ) -> None:
        own = counts.index_select(0, slots.long())
        penalties.weigh(logits, own, terms, tree.tokens, tree.parents, depth)

    def move_kv(self, pool: Any, window: torch.Tensor, accept_index: torch.Tensor) -> None:
        source, target = moves(window, accept_index)
        if source.numel() == 0:
            return
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[target] = buffer[source]  # the right side is a copy: everything is read first


def moves(window: torch.Tensor, accept_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and destination slots of the path positions that are not yet in place. window [bs, width], accept_index
    [bs, steps] as in ``Accepted``."""
    batch, width = window.shape
    steps = accept_index.shape[1]
    node = accept_index.long() - torch.arange(batch, device=window.device)[:, None] * width
    place = torch.arange(steps, device=window.device)
    moved = (accept_index >= 0) & (node != place)
    slots = window.long()
    source = slots.gather(1, node.clamp(0, width - 1))[moved]
    target = slots[:, :steps][moved]
    return source, target


def select_ops(device: str) -> TreeOps:
    """The operations for a device type: Triton on ``cuda`` where ``kernels.backend`` offers it, else plain torch."""
    if device.split(":")[0] == "cuda":
        try:
            backend = importlib.import_module("sglang_ddtree.kernels.backend")
        except ModuleNotFoundError as missing:
            if missing.name != "sglang_ddtree.kernels.backend":
                raise
        else:
            ops: TreeOps = backend.TritonOps()
            return ops
    return TorchOps()
