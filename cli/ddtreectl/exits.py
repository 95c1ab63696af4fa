"""Exit codes and the one error that verbs raise."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a script may rely on (documented in docs/reference/cli.md)."""

    DONE = 0
    ERROR = 1
    ROLLED_BACK = 2
    GOING = 3
    NOT_FOUND = 4
    INTERRUPTED = 130


class CliError(Exception):
    """Something to tell the user in one sentence; ``code`` is the exit code."""

    def __init__(self, sentence: str, code: Exit = Exit.ERROR) -> None:
        super().__init__(sentence)
        self.code = code
