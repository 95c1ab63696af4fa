"""Durations as the resource writes them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")


def seconds(duration: str) -> float:
    """Seconds of a duration such as ``10m``, ``1h30m`` or ``45s``. Raises ValueError for anything else."""
    found = _DURATION.match(duration)
    if not duration or found is None:
        raise ValueError(f"{duration!r} is not a duration; write it like 45s, 10m or 1h30m")
    hours, minutes, secs = (int(x or 0) for x in found.groups())
    return float(hours * 3600 + minutes * 60 + secs)
