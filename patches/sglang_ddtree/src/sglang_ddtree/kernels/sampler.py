"""The drafter's candidates and the tree, inside the drafter's CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.speculative.lilicorr import MAX_FUSED_CANDIDATE_TOPK
from sglang.srt.models import dflash
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_ddtree.config import Config
from sglang_ddtree.kernels.backend import as_tree
from sglang_ddtree.kernels.build import TreeBuffers, build_tree
from sglang_ddtree.kernels.lse import log_sum_exp
from sglang_ddtree.kernels.mask import fill_words
from sglang_ddtree.tree import Tree, drafted


def candidate_count(budget: int, vocab: int) -> int:
    """Candidates a position. No node of a tree of ``budget`` nodes can have a rank of ``budget`` or more, so that
    many are always enough; SGLang's fused head wants a power of two up to 16."""
    wanted = budget if budget > MAX_FUSED_CANDIDATE_TOPK else 1 << (budget - 1).bit_length()
    return min(wanted, vocab)


def candidates(hidden: torch.Tensor, head: Any, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens after each row of ``hidden`` [N, H], best first: ids int64 and logits [N, count], and
    the float32 log-sum-exp over the vocabulary [N].

    Up to 16, and on several GPUs, SGLang's own head does it. Beyond, its head takes the sum in the logits' type, so on
    one GPU it is done here in float32. FlashInfer's radix top-k would fit, but compiles for minutes at the first start.
    """
    dense = is_dense_head_weight(getattr(head, "weight", None))
    if count <= MAX_FUSED_CANDIDATE_TOPK or get_parallel().tp_size != 1 or not dense:
        ids, vals, lse = dflash.candidate_topk(hidden, head, count, with_partition=True)
        assert lse is not None
        return ids, vals, lse
    logits = dflash._project_candidate_logits(hidden, head, num_org=int(head.org_vocab_size), use_quant_head=False)
    vals, ids = torch.topk(logits, count, dim=-1)
    return ids, vals, log_sum_exp(logits)


class TreeSampler:
    """A tail of the drafter's graph: hidden states in, trees out, in buffers that every graph size shares.

    A tree's root is column 0 of the drafter's ids, its prefix length column 0 of the drafter's positions.
    """

    def __init__(
        self,
        config: Config,
        head: Callable[[], Any],
        vocab: int,
        max_batch: int,
        device: str,
        words: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self._words = words
        self.count = candidate_count(config.budget, vocab)
        self._head = head
        self._trees = TreeBuffers.allocate(max_batch, config.width, device)

    def capture_hook(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang calls this while it captures a graph, after the drafter's forward."""
        if getattr(out, "hidden_states", None) is None:
            raise RuntimeError("the drafter's forward has no hidden states to build a tree from")
        self(out.hidden_states, forward_batch.input_ids, forward_batch.positions)

    def __call__(self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor) -> Tree:
        """hidden [bs * block, H], input_ids and positions [bs * block]."""
        block = self.config.block
        rows, depth = hidden.shape[0] // block, self.config.depth
        ids, vals, lse = candidates(drafted(hidden, self.config), self._head(), self.count)
        table = (rows, depth, self.count)
        out = self._trees.rows(rows)
        build_tree(
            vals.reshape(table).contiguous(),
            ids.reshape(table).contiguous(),
            lse.reshape(rows, depth).contiguous(),
            input_ids.view(rows, block)[:, 0],
            positions.view(rows, block)[:, 0],
            out,
            spine=self.config.spine,
        )
        if self._words is not None:
            fill_words(self._words, out.parents, self.config.depth)
        return as_tree(out)

    def trees(self, rows: int) -> Tree:
        """What the last replay wrote for its first ``rows`` requests; overwritten by the next."""
        return as_tree(self._trees.rows(rows))
