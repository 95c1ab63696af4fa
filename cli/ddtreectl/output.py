"""Writing: results to stdout, everything else to stderr; colour only for people at a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

_STYLES = {"green": "32", "red": "31", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}


def colour(stream: TextIO, no_color: bool = False) -> bool:
    """Whether to colour what goes to ``stream``."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str, on: bool) -> str:
    """``text`` in a style, or as it is."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if on and style and text else text


def hint(text: str, no_color: bool = False) -> None:
    """Progress and advice: to stderr, so that stdout stays a result."""
    print(paint(text, "dim", colour(sys.stderr, no_color)), file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], styles: dict[str, str] | None = None) -> str:
    """Aligned columns, as kubectl prints them. ``styles`` maps a cell's text to a style; None for no colour."""
    grid = [list(head), *[list(r) for r in rows]]
    widths = [max(len(r[i]) for r in grid) for i in range(len(head))]
    lines = []
    for n, row in enumerate(grid):
        cells = []
        for i, cell in enumerate(row):
            shown = paint(cell, styles.get(cell, ""), True) if styles and n else cell
            cells.append(shown + " " * (widths[i] - len(cell)))
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def data(value: Any, form: str) -> str:
    """JSON or YAML text."""
    if form == "json":
        return json.dumps(value, indent=2, ensure_ascii=False)
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)).rstrip()


def age(stamp: str | None, now: datetime | None = None) -> str:
    """Time since an ISO stamp as kubectl writes it: 45s, 12m, 3h, 5d; empty without one."""
    if not stamp:
        return ""
    try:
        then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    except ValueError:
        return stamp
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0, int(((now or datetime.now(UTC)) - then).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size or (unit == "d" and seconds >= size):
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
