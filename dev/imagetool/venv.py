"""Python environments as layers: the files of an environment on this machine, as they look at /opt/venv in an image."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from pathlib import Path

from .layers import Entry

VENV = "opt/venv"
SITE = f"{VENV}/lib/python3.11/site-packages"
_IGNORED = ("_virtualenv.", "__editable__", "uv_cache.json", "direct_url.json")
_CONFIG = "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n"

_COMPILE = """
import py_compile, sys
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
py_compile.compile(sys.argv[1], sys.argv[2], sys.argv[3], doraise=True, invalidation_mode=mode)
"""


def skeleton() -> Iterator[Entry]:
    """The environment itself, on the base image's Python."""
    yield Entry(f"{VENV}/pyvenv.cfg", content=_CONFIG.encode())
    for name in ("python", "python3", "python3.11"):
        yield Entry(f"{VENV}/bin/{name}", 0o777, target="/usr/bin/python3.11")


def packages(venv: Path, treat: Callable[[str, Path], Entry | None]) -> Iterator[Entry]:
    """Site-packages of `venv`, bytecode included; `treat(relative path, file)` makes an entry or drops it (None)."""
    site = venv / "lib/python3.11/site-packages"
    for path in sorted(site.rglob("*")):
        relative = path.relative_to(site).as_posix()
        if path.is_dir() or path.name in _IGNORED or path.name.startswith(_IGNORED[:2]):
            continue
        if (entry := treat(relative, path)) is not None:
            yield entry


def plain(relative: str, path: Path) -> Entry:
    """A file as it is."""
    mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    return Entry(f"{SITE}/{relative}", mode, path)


def scripts(venv: Path, keep: Callable[[str], bool] = lambda name: True) -> Iterator[Entry]:
    """The environment's commands, with the interpreter's path in the image."""
    for path in sorted((venv / "bin").iterdir()):
        if path.is_symlink() or not keep(path.name):
            continue
        data = path.read_bytes()
        first, newline, rest = data.partition(b"\n")
        if newline and first.startswith(b"#!") and str(venv).encode() in first:
            yield Entry(f"{VENV}/bin/{path.name}", 0o755, b"#!/" + VENV.encode() + b"/bin/python3\n" + rest)


def wheel(path: Path) -> Iterator[Entry]:
    """A pure-Python wheel as installed: its files, their bytecode, and its commands."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in sorted(archive.namelist()) if not name.endswith("/")}
    for name, data in files.items():
        yield Entry(f"{SITE}/{name}", content=data)
        if name.endswith(".py"):
            folder, _, file = name.rpartition("/")
            yield Entry(
                f"{SITE}/{folder}/__pycache__/{file[:-3]}.cpython-311.pyc", content=bytecode(data, f"/{SITE}/{name}")
            )
        if name.endswith(".dist-info/entry_points.txt"):
            yield from _commands(data.decode())


def bytecode(source: bytes, shown_as: str) -> bytes:
    """Compiled source that is valid whatever the file's date is (PEP 552, unchecked).

    In a process of its own: what marshal writes depends on which strings the process has interned before.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, compiled = Path(scratch, "m.py"), Path(scratch, "m.pyc")
        file.write_bytes(source)
        compiler = [sys.executable, "-I", "-S", "-c", _COMPILE, str(file), str(compiled), shown_as]
        subprocess.run(compiler, check=True)
        return compiled.read_bytes()


def _commands(entry_points: str) -> Iterator[Entry]:
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(entry_points)
    if not parser.has_section("console_scripts"):
        return
    for name, target in parser.items("console_scripts"):
        module, function = target.split(":")
        text = f"#!/{VENV}/bin/python3\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        yield Entry(f"{VENV}/bin/{name}", 0o755, text.encode())


def content_key(*paths: Path, root: Path) -> str:
    """Hash of files and folders (their paths below `root` and their bytes)."""
    digest = hashlib.sha256()
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in found:
            if "__pycache__" in file.parts or not file.is_file():
                continue
            digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
