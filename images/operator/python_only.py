"""Which files of a Debian 12 with Python a Python program needs: the operator's image holds these and nothing else.

No shell, no package manager, no commands but python3. Used by dev/images on a root file system, and by the Dockerfile:

usage: python_only.py FOLDER      (copies them from / to FOLDER)
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

PACKAGES = (
    "base-files", "tzdata", "media-types",
    "python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "python3-minimal",
    # what the interpreter, its standard library and compiled wheels are linked with
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libsqlite3-0", "libbz2-1.0",
    "liblzma5", "libuuid1", "libcrypt1",
)  # fmt: skip
# Made when packages are installed and listed by none of them; and the certificate authorities.
GENERATED = (
    "bin", "lib", "lib32", "lib64", "libx32", "sbin", "etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/ld.so.*",
    "etc/ssl/certs/*", "usr/lib/ssl/*", "usr/share/ca-certificates/*", "usr/lib/python3.11/*",
)  # fmt: skip
# In those packages, and for people or other programs.
LEFT_OUT = ("usr/share/doc/*", "usr/share/man/*", "usr/share/base-files/*", "usr/bin/pdb3*", "etc/update-motd.d/*")
INFO = "var/lib/dpkg/info"
STATUS = "var/lib/dpkg/status"


class MissingError(LookupError):
    """The root file system lacks a package; the text says which."""


def keeper(lists: Mapping[str, str]) -> Callable[[str], bool]:
    """Whether a path (relative to the root) is kept; ``lists`` maps packages to dpkg's lists of their files."""
    missing = [name for name in PACKAGES if name not in lists]
    if missing:
        raise MissingError(f"the root file system has no package {missing[0]}")
    wanted = {_settled(path) for name in PACKAGES for path in lists[name].split("\n") if path.strip("/.")}

    def kept(path: str) -> bool:
        if any(fnmatch(path, pattern) for pattern in LEFT_OUT):
            return False
        return path in wanted or any(fnmatch(path, pattern) for pattern in GENERATED)

    return kept


def _settled(path: str) -> str:
    """Where a listed path is since /bin and /lib are links into /usr."""
    path = path.strip("/")
    top = path.partition("/")[0]
    return f"usr/{path}" if top in ("bin", "lib", "lib64", "sbin") and path != top else path


def package_of(path: str) -> str:
    """Name of the package that a file in dpkg's folder is the list of; "" for another file."""
    folder, _, name = path.rpartition("/")
    return name.removesuffix(".list").partition(":")[0] if folder == INFO and name.endswith(".list") else ""


def status_of(status: str) -> str:
    """dpkg's record of the kept packages: scanners and bills of materials read it."""
    entries = (entry for entry in status.split("\n\n") if entry.strip())
    names = {f"Package: {name}" for name in PACKAGES}
    return "".join(f"{entry.strip()}\n\n" for entry in entries if entry.strip().partition("\n")[0] in names)


def copy(root: Path, into: Path) -> None:
    """Copy the kept files."""
    lists = {
        name: path.read_text() for path in (root / INFO).glob("*.list") if (name := package_of(f"{INFO}/{path.name}"))
    }
    kept = keeper(lists)
    for top in ("bin", "lib", "lib64", "sbin", "etc", "usr"):
        for path in (root / top, *([] if (root / top).is_symlink() else sorted((root / top).rglob("*")))):
            relative = path.relative_to(root).as_posix()
            if not kept(relative) or (path.is_dir() and not path.is_symlink()):
                continue
            (into / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, into / relative, follow_symlinks=False)
    (into / STATUS).parent.mkdir(parents=True)
    (into / STATUS).write_text(status_of((root / STATUS).read_text()))
    for folder, mode in (("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("run", 0o755)):
        (into / folder).mkdir()
        (into / folder).chmod(mode)


if __name__ == "__main__":
    copy(Path("/"), Path(sys.argv[1]))
