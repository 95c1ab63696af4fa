"""The folder of all caches: how large it is, and how to empty it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import host
from .binaries import REPO
from .say import Problem, say
from .settings import Settings


def clean(s: Settings) -> None:
    """Remove everything below the cache folder and say what that gave back. Raises Problem when it is in use."""
    if running := host.neighbours(s):
        raise Problem(f"running clusters use the cache: stop them first ({', '.join(running)})")
    if not s.cache.is_dir():
        say(f"{s.cache} does not exist: nothing to remove")
        return
    for keep in (Path.home(), REPO, Path.cwd()):
        if keep.resolve().is_relative_to(s.cache.resolve()):
            raise Problem(f"DDTREE_CACHE={s.cache} holds {keep}: it is no cache folder, nothing was removed")
    total = 0
    for child in sorted(s.cache.iterdir()):
        amount = size(child)
        if amount > 100 << 20:
            say(f"  {child.name}: {human(amount)}")
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
        total += amount
    say(f"{s.cache} gave back {human(total)}")
    say("Go keeps its own caches; to empty those as well: go clean -cache -modcache")


def size(path: Path) -> int:
    """Bytes on disk below `path`; a file with several names counts in equal shares for each."""
    if not path.is_dir() or path.is_symlink():
        return _blocks([path])
    return sum(_blocks([Path(folder, n) for n in files]) for folder, _, files in os.walk(path))


def _blocks(files: list[Path]) -> int:
    total = 0
    for f in files:
        try:
            stat = f.lstat()
        except OSError:
            continue
        total += stat.st_blocks * 512 // max(1, stat.st_nlink)
    return total


def human(amount: float) -> str:
    """A number of bytes for people: "3.2 GB"."""
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
