"""What the trees were and what was accepted of them, for Prometheus, without waiting for the device.

Accepted drafts come from numbers that SGLang has brought to the host anyway. A tree's own statistics are copied in the
background and read when the copy is done, some steps later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from sglang_ddtree.config import Config
from sglang_ddtree.tree import Tree

PENDING = 64  # copies under way at most; older ones are dropped rather than waited for


class Metrics:
    """Counts of one scheduler process. ``depths[d]``: request steps that accepted d drafts; ``predicted``: drafts the
    drafter expected to be accepted (the sum of its nodes' probabilities), ``nodes``: draft nodes verified, both over
    the ``observed`` request steps whose statistics have arrived. Exported when the engine runs with
    ``--enable-metrics``."""

    def __init__(self, config: Config, export: bool) -> None:
        self.depths = [0] * (config.depth + 1)
        self.predicted = 0.0
        self.nodes = 0
        self.observed = 0
        self._pending: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._exported = _Exported(config) if export else None

    def note_tree(self, tree: Tree) -> None:
        """A step's trees."""
        self._drain()
        if tree.stats.device.type == "cpu":
            self._observe(tree.stats, tree.counts)
            return
        copies = [t.to("cpu", non_blocking=True) for t in (tree.stats, tree.counts)]
        done = torch.get_device_module(tree.stats.device).Event()
        done.record()
        self._pending.append((done, copies[0], copies[1]))
        if len(self._pending) > PENDING:
            self._pending.popleft()

    def note_accepted(self, accepted: list[int]) -> None:
        """Accepted drafts of every request of a finished step."""
        for drafts in accepted:
            self.depths[min(drafts, len(self.depths) - 1)] += 1
            if self._exported is not None:
                self._exported.accepted.observe(drafts)
        self._drain()

    def _drain(self) -> None:
        while self._pending and self._pending[0][0].query():
            _, stats, counts = self._pending.popleft()
            self._observe(stats, counts)

    def _observe(self, stats: torch.Tensor, counts: torch.Tensor) -> None:
        predicted, nodes = float(stats[:, 2].sum()), int(counts.sum()) - len(counts)
        self.predicted += predicted
        self.nodes += nodes
        self.observed += len(counts)
        if self._exported is not None:
            self._exported.predicted.inc(predicted)
            self._exported.nodes.inc(nodes)
            self._exported.steps.inc(len(counts))


class _Exported:
    """Prometheus metrics. SGLang's /metrics collects them from the scheduler process as it does its own."""

    def __init__(self, config: Config) -> None:
        from prometheus_client import Counter, Histogram

        self.accepted = Histogram(
            "ddtree:accepted_drafts",
            "Accepted drafts of a request's verify step.",
            buckets=[*range(config.depth + 1)],
        )
        self.predicted = Counter("ddtree:predicted_drafts", "Drafts the drafter expected to be accepted.")
        self.nodes = Counter("ddtree:tree_nodes", "Draft nodes verified.")
        self.steps = Counter("ddtree:tree_steps", "Request steps behind ddtree:predicted_drafts and ddtree:tree_nodes.")
