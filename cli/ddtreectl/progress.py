"""Where a build is, from the lines of BuildKit's plain log. Pure."""

from __future__ import annotations

import re

_STEP = re.compile(r"#(\d+) \[(?:(?P<stage>[\w-]+) )?\s*(?P<step>\d+)/(?P<of>\d+)\] (?P<what>.+)")
_OTHER = re.compile(r"#(\d+) (?P<what>(?:exporting|pushing|resolving|importing|extracting)\b.*)")
_ERROR = re.compile(r"#\d+ ERROR: (.+)|error: (.+)")


class Progress:
    """Fed with lines; ``text`` says which step is at work."""

    def __init__(self) -> None:
        self._what = "starting"

    def feed(self, line: str) -> bool:
        """Take a line in; True when ``text`` has changed."""
        before = self._what
        if found := _STEP.match(line):
            stage = f"{found['stage']} " if found["stage"] else ""
            self._what = f"{stage}{found['step']}/{found['of']}: {found['what']}"
        elif found := _OTHER.match(line):
            self._what = found["what"].removesuffix(" done")
        elif found := _ERROR.match(line):
            self._what = f"failed: {found[1] or found[2]}"
        return self._what != before

    def text(self, seconds: float, width: int) -> str:
        """One line of at most ``width`` characters: time since the start, and the step."""
        minutes, rest = divmod(int(seconds), 60)
        line = f"{minutes}:{rest:02d}  {self._what}"
        return line if len(line) <= width else line[: max(1, width - 1)] + "…"
