"""What the trees were, what was accepted of them and how long a step took, for Prometheus, without waiting for the
device.

Sums over the trees live on the device, are added to by one small kernel a step (in a CUDA graph where the step ends in
one), and are copied to the host every few steps; a copy is read when it has arrived. Accepted drafts also come from
numbers that SGLang has brought to the host anyway. Definitions: docs/reference/metrics.md."""

from __future__ import annotations

import time
from typing import Any

import torch

from sglang_ddtree.config import Config
from sglang_ddtree.tree import Tree

COPY_EVERY = 8  # steps between copies of the sums on a device
TIME_EVERY = 16  # steps of which one is timed
PHASES = ("draft", "verify", "commit")
MASS, NODES, ACCEPTED, SHAPE = range(4)  # rows of the sums


class Metrics:
    """Counts of one scheduler process.

    ``depths[d]``: request steps that accepted d drafts. ``sums`` float64 [4, steps] on the device, by depth: the
    drafter's expectation (sum of the probabilities of the nodes there), draft nodes, request steps that accepted a node
    there (column 0 counts all request steps); the last row has the trees' deepest nodes' depths and their leaves in its
    first two columns. ``predicted``, ``nodes``, ``observed``: their totals as
    far as the host knows. Exported when the engine runs with ``--enable-metrics``."""

    def __init__(self, config: Config, export: bool, device: str) -> None:
        self.depths = [0] * (config.depth + 1)
        self.sums = torch.zeros((4, config.steps), dtype=torch.float64, device=device)
        self._known = torch.zeros((4, config.steps), dtype=torch.float64)
        self._on_host = self.sums.device.type == "cpu"
        self._steps = 0
        self._copy: tuple[torch.Tensor, Any] | None = None
        self._marks: list[Any] | None = None
        self._timed: list[list[Any]] = []
        self._exported = _Exported(config) if export else None

    @property
    def predicted(self) -> float:
        """Drafts the drafter expected to be accepted."""
        return float(self._known[MASS].sum())

    @property
    def nodes(self) -> int:
        """Draft nodes verified."""
        return int(self._known[NODES].sum())

    @property
    def observed(self) -> int:
        """Request steps behind ``predicted`` and ``nodes``."""
        return int(self._known[ACCEPTED, 0])

    def account(self, tree: Tree, accept_len: torch.Tensor, slots: torch.Tensor) -> None:
        """Add a step's trees and accepted drafts (int [bs]) to the sums, on the device. A row whose first slot is 0
        (the sink) fills up a graph's batch and does not count; slots integer [bs, any]."""
        if not self._on_host:
            from sglang_ddtree.kernels.account import account

            account(tree.scores, tree.depths, tree.counts, tree.stats, accept_len, slots, self.sums)
            return
        steps = self.sums.shape[1]
        real = tree.depths > 0
        at = tree.depths[real].long()
        self.sums[MASS].index_add_(0, at, tree.scores[real].double().exp())
        self.sums[NODES].index_add_(0, at, torch.ones(len(at), dtype=torch.float64))
        reached = torch.arange(steps) <= accept_len[:, None]
        self.sums[ACCEPTED] += reached.double().sum(0)
        self.sums[SHAPE, :2] += tree.stats[:, :2].double().sum(0)

    def step(self) -> None:
        """After the last launch of a step: start a copy of the sums if it is time, take in what has arrived."""
        self._steps += 1
        if self._on_host:
            self._take(self.sums.clone())
        elif self._copy is None and self._steps % COPY_EVERY == 0:
            host = self.sums.to("cpu", non_blocking=True)
            done = torch.get_device_module(self.sums.device).Event()
            done.record()
            self._copy = host, done
        self._drain()

    def mark(self, index: int) -> None:
        """Between the phases of a step: 0 before the draft, then after each of ``PHASES``. Now and then a step is
        timed, by events."""
        if self._exported is None:
            return
        if index == 0:
            self._marks = [] if self._steps % TIME_EVERY == 1 else None
        if self._marks is None:
            return
        if self._on_host:
            self._marks.append(time.perf_counter())
        else:
            event = torch.get_device_module(self.sums.device).Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        if index == len(PHASES):
            self._timed.append(self._marks)
            self._marks = None

    def note_accepted(self, accepted: list[int]) -> None:
        """Accepted drafts of every request of a finished step."""
        for drafts in accepted:
            self.depths[min(drafts, len(self.depths) - 1)] += 1
            if self._exported is not None:
                self._exported.accepted.observe(drafts)
        self._drain()

    def _drain(self) -> None:
        if self._copy is not None and self._copy[1].query():
            self._take(self._copy[0])
            self._copy = None
        while self._timed and (self._on_host or self._timed[0][-1].query()):
            marks = self._timed.pop(0)
            for phase, a, b in zip(PHASES, marks, marks[1:], strict=False):
                seconds = b - a if self._on_host else a.elapsed_time(b) / 1000
                if self._exported is not None:
                    self._exported.seconds[phase].observe(seconds)

    def _take(self, sums: torch.Tensor) -> None:
        if self._exported is not None:
            self._exported.add((sums - self._known).tolist())
        self._known = sums


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
        self.deepest = Counter("ddtree:tree_depth", "Depths of the deepest nodes of the trees, summed.")
        self.leaves = Counter("ddtree:tree_leaves", "Leaves of the trees.")
        by_depth = [
            Counter(f"ddtree:{name}_by_depth", text, ["depth"])
            for name, text in (
                ("predicted_drafts", "Drafts at this depth the drafter expected to be accepted."),
                ("tree_nodes", "Draft nodes verified at this depth."),
                ("accepted_drafts", "Request steps that accepted a draft at this depth."),
            )
        ]
        self.by_depth = [[c.labels(str(d)) for d in range(1, config.depth + 1)] for c in by_depth]
        seconds = Histogram(
            "ddtree:step_seconds",
            f"Device time of a step's phases, one step in {TIME_EVERY}.",
            ["phase"],
            buckets=[m * 10**e for e in (-4, -3, -2) for m in (1, 1.5, 2, 3, 5, 7)] + [0.1, 0.3, 1],
        )
        self.seconds = {phase: seconds.labels(phase) for phase in PHASES}

    def add(self, more: list[list[float]]) -> None:
        """Growth of the sums."""
        self.predicted.inc(sum(more[MASS]))
        self.nodes.inc(sum(more[NODES]))
        self.steps.inc(more[ACCEPTED][0])
        self.deepest.inc(more[SHAPE][0])
        self.leaves.inc(more[SHAPE][1])
        for children, row in zip(self.by_depth, (more[MASS], more[NODES], more[ACCEPTED]), strict=True):
            for child, value in zip(children, row[1:], strict=True):
                if value:
                    child.inc(value)
