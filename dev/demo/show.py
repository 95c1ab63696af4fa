"""What the demo shows: stages with their seconds, a line that moves while something long runs, the closing table."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

TTY = sys.stderr.isatty()


def say(text: str) -> None:
    """One line for people."""
    print(f"{_dim('·')} {text}", file=sys.stderr, flush=True)


def head(text: str) -> None:
    """A heading."""
    print(f"\n{_bold(text)}", file=sys.stderr, flush=True)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if TTY else text


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if TTY else text


class Ticker:
    """Shows the latest state of something that takes long: in place on a terminal, a line per change elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = ""

    def update(self, text: str) -> None:
        """Show this state."""
        if TTY:
            line = f"  {text}  {time.monotonic() - self._began:.0f} s"
            print(f"\r\033[2K{line[:160]}", end="", file=sys.stderr, flush=True)
        elif text != self._last:
            print(f"  {time.monotonic() - self._began:5.0f} s  {text}", file=sys.stderr, flush=True)
        self._last = text

    def done(self) -> None:
        """Leave the line."""
        if TTY:
            print("\r\033[2K", end="", file=sys.stderr, flush=True)


class Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and say when it is done."""
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 1)
        say(f"{name}: {self.seconds[name]:.0f} s")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table with aligned columns."""
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    first = "  ".join(h.ljust(w) for h, w in zip(header, widths, strict=True)).rstrip()
    return "\n".join([first, "  ".join("-" * w for w in widths), *lines])
