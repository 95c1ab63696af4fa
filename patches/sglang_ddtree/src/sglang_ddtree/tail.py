"""The end of a step as one CUDA graph a batch size: the target's tokens, the walk, the KV move, the drafter's KV.

Eagerly these are some twenty small launches, which at small batches take the host longer than the target's pass takes
the GPU. Only for steps whose tokens are the plain maxima of the logits; others run the same functions eagerly.

A graph reads what the target's graph of the same size left in its buffers (logits, hidden states, lengths, slots) and
the trees the drafter's graph built; what it writes has two slots, because the next step begins before this step's
results have been read everywhere (so there are two graphs a size)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree.kernels.walk import WalkBuffers, walk_tree
from sglang_ddtree.tree import Accepted, Tree

logger = logging.getLogger(__name__)


@dataclass
class _Size:
    """Graphs of one batch size, and the addresses they read."""

    graphs: list[torch.cuda.CUDAGraph]
    logits: int
    hidden: int
    dtype: torch.dtype


class Tail:
    """Made after the graphs of target and drafter."""

    def __init__(self, worker: Any, trees: Any) -> None:
        self._worker, self._trees = worker, trees
        self._runner = worker.model_runner.decode_cuda_graph_runner
        self._sizes: dict[int, _Size] = {}
        self._slot = 0
        self._warned = False
        config = worker.config
        largest = max(self._runner.capture_bs)
        dtype = self._runner.buffers.seq_lens.dtype
        self._walks = [WalkBuffers.allocate(largest, config.steps, worker.device, dtype) for _ in range(2)]

    def capture(self) -> None:
        """Record a pair of graphs for every size the target has one for."""
        runner = self._runner
        with torch.inference_mode():
            for rows in sorted(runner.capture_bs, reverse=True):
                out = runner.backend._outputs.get(runner._make_graph_key(rows))
                logits, hidden = getattr(out, "next_token_logits", None), getattr(out, "hidden_states", None)
                if logits is None or hidden is None or logits.shape[0] != rows * self._worker.config.width:
                    logger.warning("DDTREE: no tail graph for batches of %d", rows)
                    continue
                graphs = []
                for walk in self._walks:
                    self._run(rows, logits, hidden, walk.rows(rows))  # compiles what is not compiled yet
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=runner.backend._pool):
                        self._run(rows, logits, hidden, walk.rows(rows))
                    graphs.append(graph)
                self._sizes[rows] = _Size(
                    graphs, logits.data_ptr(), hidden.data_ptr(), self._runner.buffers.seq_lens.dtype
                )
        logger.info("DDTREE tail graphs: batches of %s", sorted(self._sizes))

    def _run(self, rows: int, logits: torch.Tensor, hidden: torch.Tensor, walk: WalkBuffers) -> None:
        """What is recorded."""
        worker, buffers = self._worker, self._runner.buffers
        config = worker.config
        tree: Tree = self._trees.trees(rows)
        prefix = buffers.seq_lens[:rows]
        slots = buffers.out_cache_loc[: rows * config.width].view(rows, config.width)
        walk_tree(tree.tokens, tree.parents, logits.argmax(-1), prefix, walk)
        accepted = _accepted(walk)
        worker.ops.move_kv(worker.model_runner.token_to_kv_pool, slots, accepted.accept_index)
        worker.commit_draft_kv(hidden, accepted, slots[:, : config.steps].reshape(-1), prefix)
        worker.tree_metrics.account(tree, accepted.accept_len, slots)

    def run(self, rows: int, logits_output: Any, prefix: torch.Tensor) -> Accepted | None:
        """Replay for a batch whose target pass ran in a graph and whose trees came from the drafter's. None if there is
        no graph for it: then nothing was done."""
        bs = self._runner.bs
        size = self._sizes.get(bs)
        if size is None:
            return None
        logits, hidden = logits_output.next_token_logits, logits_output.hidden_states
        if logits.data_ptr() != size.logits or hidden.data_ptr() != size.hidden or prefix.dtype != size.dtype:
            if not self._warned:
                self._warned = True
                logger.warning("DDTREE: the target's outputs moved; steps end without a graph, which is slower")
            return None
        self._slot = 1 - self._slot
        size.graphs[self._slot].replay()
        return _accepted(self._walks[self._slot].rows(rows))


def _accepted(w: WalkBuffers) -> Accepted:
    return Accepted(w.accept_index, w.accept_len, w.commit_lens, w.bonus, w.out_tokens, w.new_seq_lens)
