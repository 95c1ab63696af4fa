"""Installs wheels into the running Python's site-packages. Runs inside the image being built; standard library only.

usage: install_wheels.py FOLDER
Why not pip: engine bases come with or without it, with PEP 668 markers, with older versions; this does one thing, the
same everywhere, offline, and byte for byte the same twice (no times in bytecode, sorted records).
An installed distribution of the same name is removed first, editable installs included.
Problems end as one line "ddtree-build: error: …" and exit status 1.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import py_compile
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


class RefusedError(Exception):
    """One sentence."""


def normal(name: str) -> str:
    """Distribution name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def glibc() -> tuple[int, int] | None:
    """Version of the C library; None when it is another."""
    text = ""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def platform_fits(tag: str) -> bool:
    """Whether a wheel's platform tag fits this machine and C library."""
    machine = os.uname().machine
    if tag in ("any", f"linux_{machine}"):
        return True
    if not tag.endswith(f"_{machine}"):
        return False
    old = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    found = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    need = (int(found[1]), int(found[2])) if found else old.get(tag.split("_", 1)[0])
    have = glibc()
    return need is not None and have is not None and have >= need


def check_tags(filename: str) -> None:
    """Refuse a wheel that is for another Python or platform, with both named."""
    pythons, abis, platforms = (part.split(".") for part in filename[: -len(".whl")].split("-")[-3:])
    minor = sys.version_info.minor
    here = f"cp3{minor}"

    def fits(tag: str) -> bool:
        found = re.fullmatch(r"(cp|py)3(\d+)", tag)
        older = found is not None and int(found[2]) <= minor and (found[1] == "py" or "abi3" in abis)
        return tag in ("py3", here) or older

    if not any(fits(tag) for tag in pythons):
        raise RefusedError(f"the wheel {filename} is for {'.'.join(pythons)}, but the base image has {here}")
    if not any(platform_fits(tag) for tag in platforms):
        version = glibc()
        library = f"glibc {version[0]}.{version[1]}" if version else "no glibc"
        raise RefusedError(
            f"the wheel {filename} is for {'.'.join(platforms)}, "
            f"but the base image is {os.uname().machine} with {library}"
        )


def remove_installed(name: str) -> None:
    """Take an installed distribution of this name away, wherever it is on the path."""
    inside = Path(sys.prefix).resolve()
    for dist in list(importlib.metadata.distributions()):
        if normal(dist.metadata["Name"] or "") != normal(name):
            continue
        if not dist.files:
            raise RefusedError(
                f"the base image has {name} {dist.version} installed without a record of its files, "
                "so it cannot be replaced; use a base image without it"
            )
        print(f"removing {name} {dist.version}", flush=True)
        folders: set[Path] = set()
        for entry in dist.files:
            path = Path(str(dist.locate_file(entry))).resolve()
            if inside not in path.parents:
                continue
            victims = [path]
            if path.suffix == ".py":
                victims.append(Path(importlib.util.cache_from_source(str(path))))
            for victim in victims:
                if victim.is_file():
                    victim.unlink()
                    folders.add(victim.parent)
        for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
            while inside in folder.parents and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent


def destination(member: str, data_folder: str, library: Path) -> tuple[Path, bool]:
    """Where a member of the wheel goes, and whether it is a script."""
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or "\\" in member:
        raise RefusedError(f"a wheel holds a path that leads out of its folder: {member}")
    if path.parts[0] != data_folder:
        return library.joinpath(*path.parts), False
    places = {"purelib": "purelib", "platlib": "platlib", "scripts": "scripts", "data": "data", "headers": "include"}
    if len(path.parts) < 3 or path.parts[1] not in places:
        raise RefusedError(f"a wheel holds {member}, which no install scheme has a place for")
    scheme = path.parts[1]
    return Path(sysconfig.get_paths()[places[scheme]]).joinpath(*path.parts[2:]), scheme == "scripts"


def write(path: Path, content: bytes, *, executable: bool = False) -> None:
    """Write a file with plain permissions, whatever the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if executable else 0o644)


def console_scripts(text: str) -> Iterator[tuple[str, str]]:
    """Name and target of each script in an entry_points.txt."""
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(text)
    for section in ("console_scripts", "gui_scripts"):
        if parser.has_section(section):
            yield from sorted(parser.items(section))


def script_text(target: str) -> bytes:
    """A script that calls ``module:attribute``."""
    module, _, attribute = target.split("[", 1)[0].strip().partition(":")
    first = attribute.split(".")[0]
    return f"#!{sys.executable}\nimport sys\nfrom {module} import {first}\nsys.exit({attribute}())\n".encode()


def install(wheel: Path) -> None:
    """Install one wheel and compile it. Raises RefusedError."""
    check_tags(wheel.name)
    name = wheel.name.split("-")[0]
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise RefusedError(f"the wheel {wheel.name} is damaged or cut short") from None
    installed: list[tuple[Path, bytes]] = []
    with archive:
        members = [i for i in archive.infolist() if not i.is_dir()]
        markers = [i.filename for i in members if re.fullmatch(r"[^/]+\.dist-info/WHEEL", i.filename)]
        if len(markers) != 1:
            raise RefusedError(f"the wheel {wheel.name} has no single .dist-info/WHEEL")
        info = markers[0].split("/")[0]
        data_folder = info[: -len(".dist-info")] + ".data"
        pure = b"root-is-purelib: true" in archive.read(markers[0]).lower()
        library = Path(sysconfig.get_paths()["purelib" if pure else "platlib"])
        remove_installed(name)
        for member in members:
            if member.filename in (f"{info}/RECORD", f"{info}/INSTALLER"):
                continue
            target, is_script = destination(member.filename, data_folder, library)
            content = archive.read(member)
            if is_script and content.startswith(b"#!python"):
                content = b"#!" + sys.executable.encode() + content[content.find(b"\n") :]
            write(target, content, executable=is_script or bool((member.external_attr >> 16) & 0o111))
            installed.append((target, content))
        if f"{info}/entry_points.txt" in archive.namelist():
            for script, call in console_scripts(archive.read(f"{info}/entry_points.txt").decode()):
                target, content = Path(sysconfig.get_paths()["scripts"]) / script, script_text(call)
                write(target, content, executable=True)
                installed.append((target, content))
    installed.append((library / info / "INSTALLER", b"ddtree\n"))
    write(*installed[-1])
    record = [f"{info}/RECORD,,\n"]
    for target, content in installed:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        where = os.path.relpath(target, library)
        where = f'"{where}"' if "," in where else where
        record.append(f"{where},sha256={digest},{len(content)}\n")
    write(library / info / "RECORD", "".join(sorted(record)).encode())
    for target, _ in sorted(installed):
        if target.suffix == ".py" and library in target.parents:
            compile_file(target)
    print(f"installed {wheel.name}: {len(installed)} files", flush=True)


def compile_file(source: Path) -> bool:
    """Compile one file; False when it is no valid Python (templates, code for other versions).

    Bytecode carries the hash of its source, not a time: valid whatever happens to file times, and never stale.
    """
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    try:
        compiled = py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, SyntaxError, ValueError):
        return False
    if compiled:
        Path(compiled).chmod(0o644)
    return True


def main(folder: str) -> None:
    """Install every wheel of a folder, in the order of their names."""
    os.umask(0o022)
    for wheel in sorted(Path(folder).glob("*.whl")):
        install(wheel)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RefusedError as error:
        sys.exit(f"ddtree-build: error: {error}")
    except (zipfile.BadZipFile, EOFError) as error:
        sys.exit(f"ddtree-build: error: a wheel is damaged or cut short: {error}")
    except OSError as error:
        sys.exit(f"ddtree-build: error: cannot write into the base image: {error}")
