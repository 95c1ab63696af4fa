"""A layer's files and their tar form: the same entries give the same bytes, whatever machine packs them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

EPOCH = 1767225600  # 2026-01-01, every file's date: zip files, and so wheels, cannot hold dates before 1980


class Writable(Protocol):
    """What a tar stream is written to."""

    def write(self, data: bytes, /) -> object:
        """Takes the next bytes."""


@dataclass(frozen=True)
class Entry:
    """One path of a layer: a folder (no content, no target), a symbolic link (target) or a file (content)."""

    path: str  # relative to the image's root, no leading slash
    mode: int = 0o644
    content: bytes | Path | Callable[[], bytes] | None = None
    target: str | None = None
    owner: int = 0


def folder(path: str, mode: int = 0o755, owner: int = 0) -> Entry:
    """A folder's entry."""
    return Entry(path, mode, owner=owner)


def complete(entries: Iterable[Entry]) -> list[Entry]:
    """Entries sorted, a later one of the same path winning, with the folders that they lie in."""
    by_path = {entry.path.strip("/"): entry for entry in entries}
    for path in list(by_path):
        for parent in PurePosixPath(path).parents:
            if (name := parent.as_posix()) != ".":
                by_path.setdefault(name, folder(name))
    # By parts, so that a folder comes right before what it holds.
    return [by_path[path] for path in sorted(by_path, key=lambda p: p.split("/"))]


def tree(root: Path, at: str, keep: Callable[[str], bool] = lambda path: True) -> Iterator[Entry]:
    """Files and links below `root`, placed below `at`; `keep` is asked with the path relative to `root`."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if not keep(relative) or "__pycache__" in path.parts[len(root.parts) :]:
            continue
        if path.is_symlink():
            yield Entry(f"{at}/{relative}", 0o777, target=str(path.readlink()))
        elif path.is_file():
            yield Entry(f"{at}/{relative}", 0o755 if path.stat().st_mode & 0o100 else 0o644, path)


def write_tar(entries: Iterable[Entry], out: Writable) -> None:
    """Writes completed entries as a tar stream, in the order of `complete`."""
    with tarfile.open(fileobj=_Sink(out), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in complete(entries):
            info = tarfile.TarInfo(entry.path)
            info.mode, info.mtime, info.uid, info.gid = entry.mode, EPOCH, entry.owner, entry.owner
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif isinstance(entry.content, Path):
                info.size = entry.content.stat().st_size
                with entry.content.open("rb") as file:
                    tar.addfile(info, file)
            else:
                data = entry.content if isinstance(entry.content, bytes) else entry.content()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


class _Sink(io.RawIOBase):
    """Gives tarfile's stream mode the one method that it needs."""

    def __init__(self, out: Writable) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        block = bytes(data)  # type: ignore[call-overload]
        self._out.write(block)
        return len(block)


def from_tar(stream: IO[bytes], keep: Callable[[str], bool]) -> list[Entry]:
    """The entries of a tar stream (a root file system). Device nodes are left out: a runtime makes its own."""
    found: list[Entry] = []
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            path = member.name.removeprefix("./").strip("/")
            if path in ("", ".") or not keep(path):
                continue
            if member.isdir():
                found.append(Entry(path, member.mode, owner=member.uid))
            elif member.issym():
                found.append(Entry(path, 0o777, target=member.linkname, owner=member.uid))
            elif member.islnk():
                source = member.linkname.removeprefix("./").strip("/")
                origin = next(entry for entry in found if entry.path == source)
                found.append(Entry(path, member.mode, origin.content, owner=member.uid))
            elif member.isfile() and (file := tar.extractfile(member)) is not None:
                found.append(Entry(path, member.mode, file.read(), owner=member.uid))
    return found
