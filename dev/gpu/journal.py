"""What a benchmark has measured so far, one line at a time, so that a run that is cut off keeps it.

usage: journal.py OUT.json        makes OUT.json again from the journal beside it, e.g. after the machine was taken away

The journal is OUT.runs.jsonl. A line is {"head": {…}}, {"phase", "key", "item"}: another item of a list, {"phase",
"key", "value"}, or {"phase", "seconds"}: the phase is over. OUT.json is only ever a fold of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any


def fold(lines: Iterable[str]) -> dict[str, Any]:
    """The record that the lines of a journal make: the head's fields, then every phase with its lists and values.

    A phase whose end is missing has ``"cut": true``. A last line without its end was being written and is left out; any
    other that is no JSON raises ValueError with its number.
    """
    record: dict[str, Any] = {}
    phases: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            if not line.endswith("\n"):
                break
            raise ValueError(f"line {number} of the journal is not JSON: {line[:80]!r}") from None
        if "head" in entry:
            record |= entry["head"]
            continue
        phase = phases.setdefault(entry["phase"], {"cut": True})
        if "item" in entry:
            phase.setdefault(entry["key"], []).append(entry["item"])
        elif "value" in entry:
            phase[entry["key"]] = entry["value"]
        else:
            del phase["cut"]
            phase["seconds"] = entry["seconds"]
    return record | phases


class Journal:
    """The open journal of a result file. Every line is on disk before the next measurement begins."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self.out, self.path = out, path_of(out)
        self._file = self.path.open("w")
        self._phase, self._begun = "", 0.0
        self._write({"head": head})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        write(self.out)

    def begin(self, phase: str) -> None:
        """What follows belongs to ``phase``."""
        self._phase, self._begun = phase, time.monotonic()

    def add(self, key: str, item: dict[str, Any]) -> dict[str, Any]:
        """Append to the phase's list ``key``; returns the item."""
        self._write({"phase": self._phase, "key": key, "item": item})
        return item

    def put(self, key: str, value: Any) -> None:
        """Set the phase's ``key``."""
        self._write({"phase": self._phase, "key": key, "value": value})

    def end(self) -> None:
        """The phase is over and complete; the result file is written."""
        self._write({"phase": self._phase, "seconds": round(time.monotonic() - self._begun, 1)})
        write(self.out)

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def path_of(out: Path) -> Path:
    """The journal of a result file."""
    return out.with_suffix(".runs.jsonl")


def write(out: Path) -> None:
    """Make the result file from its journal; an old one stays until the new one is whole."""
    with path_of(out).open() as lines:
        record = fold(lines)
    fresh = out.with_name(out.name + ".new")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    fresh.replace(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        sys.exit(2)
    try:
        write(Path(sys.argv[1]))
    except (OSError, ValueError) as problem:
        print(f"{path_of(Path(sys.argv[1]))}: {problem}", file=sys.stderr)
        sys.exit(1)
