"""Counts of what was accepted, kept on the host from numbers that are there anyway: no synchronisation."""

from __future__ import annotations

from sglang_ddtree.config import Config
from sglang_ddtree.tree import Tree


class Metrics:
    """Hook points of the worker. ``depths[d]``: steps of one request that accepted d drafts."""

    def __init__(self, config: Config) -> None:
        self.depths = [0] * (config.depth + 1)
        self.steps = 0
        self._last_stats: Tree | None = None

    def note_tree(self, tree: Tree) -> None:
        """A step's trees; their ``stats`` stay on the device until someone asks."""
        self._last_stats = tree

    def note_accepted(self, accepted: list[int]) -> None:
        """Accepted drafts of every request of a finished step."""
        self.steps += len(accepted)
        for drafts in accepted:
            self.depths[min(drafts, len(self.depths) - 1)] += 1
