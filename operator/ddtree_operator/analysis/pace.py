"""What pairs of the past say about those to come: how long one takes, and how much they scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ddtree_operator.analysis.policy import ACCEPT_LENGTH, THROUGHPUT
from ddtree_operator.analysis.samples import problem
from ddtree_operator.analysis.types import Pair

LEAST = 5  # usable pairs that a pace is taken from


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured over ``pairs`` usable pairs."""

    pairs: int
    seconds: float  # both sides of a pair together, mean
    longest: int  # tokens of the longest answer
    cut: bool  # half of the answers and more are that long: they ended at maxTokens and not by themselves
    spread: dict[str, float] = field(default_factory=dict)  # metric -> standard deviation of log(canary / baseline)

    def seconds_at(self, max_tokens: int) -> float:
        """Seconds a pair takes with other ``maxTokens``, taking time as proportional to tokens."""
        if max_tokens < self.longest or (max_tokens > self.longest and self.cut):
            return self.seconds * max_tokens / self.longest
        return self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain data, rounded; the inverse of ``from_dict``."""
        rounded = {"seconds": round(self.seconds, 4), "spread": {k: round(v, 4) for k, v in self.spread.items()}}
        return asdict(self) | rounded

    @classmethod
    def from_dict(cls, data: Any) -> Pace | None:
        """From what ``as_dict`` gave; None for anything else."""
        try:
            spread = {str(k): float(v) for k, v in data["spread"].items()}
            pace = cls(int(data["pairs"]), float(data["seconds"]), int(data["longest"]), bool(data["cut"]), spread)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        finite = all(math.isfinite(v) and v >= 0 for v in (pace.seconds, *spread.values()))
        return pace if finite and pace.seconds > 0 and pace.longest > 0 else None


def pace(pairs: Iterable[Pair]) -> Pace | None:
    """The pace of these pairs; None when fewer than LEAST of them are usable."""
    usable = [p for p in pairs if problem(p.baseline) is None and problem(p.canary) is None]
    if len(usable) < LEAST:
        return None
    tokens = [s.completion_tokens for p in usable for s in (p.baseline, p.canary)]
    longest = max(tokens)
    ratios = {
        ACCEPT_LENGTH: [math.log(p.canary.accept_length / p.baseline.accept_length) for p in usable],
        THROUGHPUT: [math.log(p.canary.tokens_per_second / p.baseline.tokens_per_second) for p in usable],
    }
    return Pace(
        pairs=len(usable),
        seconds=sum(p.baseline.seconds + p.canary.seconds for p in usable) / len(usable),
        longest=longest,
        cut=2 * tokens.count(longest) >= len(tokens),
        spread={name: float(np.std(np.asarray(logs), ddof=1)) for name, logs in ratios.items()},
    )
