"""Unified diffs, applied exactly: every hunk at its stated line, every context line equal, all files or none. Pure.

A series is a folder with a file ``series`` (patch names, one a line, ``#`` starts a comment) and the patches; a patch
is a header in prose and unified diffs whose paths (after ``a/`` and ``b/``) are relative to site-packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[str], str | None]
"""Text of a file by its path relative to site-packages, None when there is none."""

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """One line that names the file and the hunk."""


@dataclass(frozen=True)
class Hunk:
    """``old`` lines at 1-based line ``old_start`` become ``new`` (lines keep their line ends). ``lines``: both, each
    with its mark, as they stood."""

    number: int
    old_start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    lines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FileDiff:
    """Changes of one file. ``creates``: it must not exist before; ``deletes``: it must be gone after."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False

    def reversed(self) -> FileDiff:
        hunks = tuple(Hunk(h.number, h.new_start, h.old_start, h.new, h.old) for h in self.hunks)
        return FileDiff(self.path, hunks, self.deletes, self.creates)


@dataclass(frozen=True)
class Patch:
    name: str
    header: str
    files: tuple[FileDiff, ...]


def parse(text: str, name: str) -> Patch:
    """Read a patch. Raises PatchError when it is not a well-formed unified diff."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("--- ")), len(lines))
    header = "".join(line for line in lines[:first] if not line.startswith(("diff --git", "index ")))
    files, at = [], first
    while at < len(lines):
        if not lines[at].startswith("--- "):
            if lines[at].strip() and not lines[at].startswith(
                ("diff --git", "index ", "new file", "deleted file", "-- ")
            ):
                raise PatchError(f"{name} line {at + 1}: expected '--- ', found {lines[at].strip()[:60]!r}")
            at += 1
            continue
        diff, at = _parse_file(lines, at, name)
        files.append(diff)
    if not files:
        raise PatchError(f"{name}: no diff in it")
    return Patch(name, header, tuple(files))


def _parse_file(lines: list[str], at: int, name: str) -> tuple[FileDiff, int]:
    old = _path(lines[at], name)
    if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
        raise PatchError(f"{name} line {at + 2}: expected '+++ '")
    new = _path(lines[at + 1], name)
    path = new if old is None else old
    if path is None or (old is not None and new is not None and old != new):
        raise PatchError(f"{name} line {at + 1}: renames are not supported ({old} to {new})")
    hunks: list[Hunk] = []
    at += 2
    while at < len(lines) and (match := _HUNK.match(lines[at])):
        old_start, new_start = int(match[1]), int(match[3])
        left, right = (int(match[2] or 1), int(match[4] or 1))
        before: list[str] = []
        after: list[str] = []
        marked: list[tuple[str, str]] = []
        last: list[list[str]] = []
        at += 1
        while at < len(lines) and (len(before) < left or len(after) < right or lines[at].startswith("\\")):
            line = lines[at]
            mark, rest = line[:1], line[1:]
            if mark == "\\":  # "no newline at end of file" is about the line before
                for side in last:
                    side[-1] = side[-1].rstrip("\n")
                marked[-1:] = [(m, text.rstrip("\n")) for m, text in marked[-1:]]
            elif mark in (" ", "\n"):
                last = [before, after]
            elif mark in ("-", "+"):
                last = [before if mark == "-" else after]
            else:
                raise PatchError(f"{path} hunk {len(hunks) + 1}: {name} line {at + 1} starts with {mark!r}")
            if mark != "\\":
                for side in last:
                    side.append(rest if mark != "\n" else "\n")
                marked.append((" " if mark == "\n" else mark, rest if mark != "\n" else "\n"))
            at += 1
        if (len(before), len(after)) != (left, right):
            counts = f"{left} and {right} lines, has {len(before)} and {len(after)}"
            raise PatchError(f"{path} hunk {len(hunks) + 1}: {name} promises {counts}")
        hunks.append(Hunk(len(hunks) + 1, old_start, new_start, tuple(before), tuple(after), tuple(marked)))
    if not hunks:
        raise PatchError(f"{path}: {name} has no hunk for it")
    return FileDiff(path, tuple(hunks), creates=old is None, deletes=new is None), at


def _path(line: str, name: str) -> str | None:
    text = line[4:].split("\t")[0].strip()
    if text == "/dev/null":
        return None
    if text.startswith(("a/", "b/")):
        text = text[2:]
    if text.startswith("/") or ".." in Path(text).parts:
        raise PatchError(f"{name}: the path {text!r} leaves site-packages")
    return text


def load(folder: Path) -> list[Patch]:
    """The patches of a series folder, in order."""
    index = folder / "series"
    try:
        names = [line.split("#")[0].strip() for line in index.read_text().splitlines()]
    except OSError as error:
        raise PatchError(f"{index}: cannot be read ({error.strerror})") from None
    out = []
    for name in filter(None, names):
        try:
            text = (folder / name).read_text()
        except OSError as error:
            raise PatchError(f"{folder / name}: named in the series, cannot be read ({error.strerror})") from None
        out.append(parse(text, name))
    return out


def change(diff: FileDiff, text: str | None) -> str | None:
    """The file after the diff. Raises PatchError with file and hunk where it does not fit."""
    if diff.creates:
        if text is not None:
            raise PatchError(f"{diff.path} hunk 1: the patch creates this file, but it exists")
        return "".join(diff.hunks[0].new)
    if text is None:
        raise PatchError(f"{diff.path} hunk 1: no such file")
    lines = text.splitlines(keepends=True)
    out: list[str] = []
    at = 0
    for hunk in diff.hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < at:
            raise PatchError(f"{diff.path} hunk {hunk.number}: overlaps the hunk before it")
        found = lines[start : start + len(hunk.old)]
        for offset, (wanted, line) in enumerate(zip(hunk.old, [*found, *[""] * len(hunk.old)], strict=False)):
            if wanted != line:
                raise PatchError(
                    f"{diff.path} hunk {hunk.number}: line {start + offset + 1} is {line.strip()[:60]!r}, "
                    f"the patch expects {wanted.strip()[:60]!r}"
                )
        out += lines[at:start]
        out += hunk.new
        at = start + len(hunk.old)
    out += lines[at:]
    if diff.deletes:
        if out:
            raise PatchError(f"{diff.path} hunk {len(diff.hunks)}: the patch deletes the file, but more is in it")
        return None
    return "".join(out)


def run(patches: Sequence[Patch], read: Read, *, backwards: bool = False) -> dict[str, str | None]:
    """All files the patches change, as they are afterwards (None: gone). Nothing is written."""
    state: dict[str, str | None] = {}
    for patch in reversed(patches) if backwards else patches:
        for diff in reversed(patch.files) if backwards else patch.files:
            before = state[diff.path] if diff.path in state else read(diff.path)
            try:
                state[diff.path] = change(diff.reversed() if backwards else diff, before)
            except PatchError as error:
                raise PatchError(f"{patch.name}: {error}") from None
    return state


def combined(patches: Sequence[Patch]) -> str:
    """The series as one patch for ``patch -p1`` in site-packages: the headers' first lines, then all diffs in order."""
    subjects = [patch.header.splitlines()[0].removeprefix("Subject: ") for patch in patches]
    head = "".join(f"  {patch.name}: {subject}\n" for patch, subject in zip(patches, subjects, strict=True))
    diffs = "".join(_render(diff) for patch in patches for diff in patch.files)
    title = "All patches of the series, in order. In site-packages: patch -p1 --fuzz=0 < sglang-ddtree.patch"
    return f"{title}\n{head}\n{diffs}"


def _render(diff: FileDiff) -> str:
    out = ["--- /dev/null\n" if diff.creates else f"--- a/{diff.path}\n"]
    out.append("+++ /dev/null\n" if diff.deletes else f"+++ b/{diff.path}\n")
    for hunk in diff.hunks:
        out.append(f"@@ -{hunk.old_start},{len(hunk.old)} +{hunk.new_start},{len(hunk.new)} @@\n")
        for mark, line in hunk.lines:
            out.append(mark + line if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n")
    return "".join(out)


def applied(patches: Sequence[Patch], read: Read) -> int:
    """How many patches from the front of the series are in place."""
    for count in range(len(patches), 0, -1):
        try:
            run(patches[:count], read, backwards=True)
        except PatchError:
            continue
        return count
    return 0
