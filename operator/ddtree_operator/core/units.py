"""Durations and percentages as the resource writes them."""

from __future__ import annotations

from datetime import UTC, datetime

from ddtree_operator.api.durations import seconds as seconds


def fraction(percent: str) -> float:
    """0.03 for ``3%`` or ``+3%``. Raises ValueError for anything else."""
    text = percent.removeprefix("+")
    if not text.endswith("%"):
        raise ValueError(f"{percent!r} is not a percentage; write it like 3%")
    return float(text[:-1]) / 100.0


def iso(at: float) -> str:
    """UTC time stamp of epoch seconds, to the second, as Kubernetes writes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch(stamp: str | None) -> float:
    """Epoch seconds of such a stamp; 0.0 for nothing or nonsense."""
    if not stamp:
        return 0.0
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def clip(text: str, limit: int = 800) -> str:
    """One line of at most ``limit`` characters, so that no error body ever fills the status."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
