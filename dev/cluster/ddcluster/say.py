"""What a person sees: progress on standard error, one sentence when something cannot work."""

from __future__ import annotations

import sys


class Problem(Exception):  # noqa: N818 - read as a sentence, not as a fault
    """One sentence for the user: what is wrong and what to do about it."""


def say(text: str) -> None:
    """Print one line of progress to standard error."""
    print(f"· {text}", file=sys.stderr, flush=True)
