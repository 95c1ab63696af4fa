"""Durations and percentages as the resource writes them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")


def seconds(duration: str) -> float:
    """Seconds of a duration such as ``10m``, ``1h30m`` or ``45s``. Raises ValueError for anything else."""
    found = _DURATION.match(duration)
    if not duration or found is None:
        raise ValueError(f"{duration!r} is not a duration; write it like 45s, 10m or 1h30m")
    hours, minutes, secs = (int(x or 0) for x in found.groups())
    return float(hours * 3600 + minutes * 60 + secs)


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
