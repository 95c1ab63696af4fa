"""Check, apply and report the patch series.

usage: python -m sglang_ddtree.patches verify|apply|status|combine [--series DIR] [--root SITE_PACKAGES] [--wheel FILE]

The series holds what a plugin cannot do (``patches/sglang-0.5.23`` in the repository, also inside this package).
``apply`` changes all files or none and does nothing the second time. ``verify`` applies it in memory, compiles what
changed and imports it from a shadow of the installation; with ``--wheel`` it works on the pinned wheel, whose sha256
it checks."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from sglang_ddtree import SGLANG_VERSION
from sglang_ddtree import series as s

WHEELS = {  # sha256 of the wheels the series is made for
    "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937": "cp311-cp311-manylinux_2_34_x86_64",
    "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6": "cp312-cp312-manylinux_2_34_x86_64",
}


def default_series() -> Path:
    """The series inside the wheel, or the repository's when run from a checkout."""
    inside = Path(__file__).parent / "series-files"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / f"sglang-{SGLANG_VERSION}"


def default_root() -> Path:
    """site-packages of the installed SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.origin:
        raise s.PatchError("sglang: not installed here; give --root SITE_PACKAGES or --wheel FILE")
    return Path(spec.origin).resolve().parents[1]


def reader(root: Path) -> s.Read:
    def read(path: str) -> str | None:
        try:
            return (root / path).read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise s.PatchError(f"{path} hunk 1: cannot be read ({error})") from None

    return read


def wheel_reader(wheel: Path) -> s.Read:
    """Files of a wheel whose hash is pinned."""
    try:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise s.PatchError(f"{wheel}: cannot be read ({error.strerror})") from None
    if digest not in WHEELS:
        raise s.PatchError(
            f"{wheel.name}: sha256 {digest} is not that of a pinned SGLang {SGLANG_VERSION} wheel "
            f"({', '.join(sorted(WHEELS.values()))})"
        )
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    ours = reader(Path(__file__).resolve().parents[1])

    def read(path: str) -> str | None:
        if path.startswith("sglang_ddtree/"):  # a series may also change this package
            return ours(path)
        return archive.read(path).decode() if path in names else None

    return read


def write_all(root: Path, files: dict[str, str | None]) -> None:
    """Write every file or none: new contents go beside the old ones first, and a failure puts the old ones back."""
    before = {path: (root / path).read_bytes() if (root / path).exists() else None for path in files}
    fresh: list[tuple[Path, Path]] = []
    done: list[str] = []
    try:
        for path, text in files.items():
            if text is not None:
                target = root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(target.name + ".ddtree-new")
                temporary.write_bytes(text.encode())
                if target.exists():
                    temporary.chmod(target.stat().st_mode)
                fresh.append((temporary, target))
        for (temporary, target), path in zip(fresh, [p for p, t in files.items() if t is not None], strict=True):
            temporary.replace(target)
            done.append(path)
        for path, text in files.items():
            if text is None:
                (root / path).unlink()
                done.append(path)
    except OSError as error:
        for path in done:
            old = before[path]
            if old is None:
                (root / path).unlink(missing_ok=True)
            else:
                (root / path).write_bytes(old)
        for temporary, _ in fresh:
            temporary.unlink(missing_ok=True)
        raise s.PatchError(f"{root}: nothing was changed, writing failed ({error})") from None


def compile_all(files: dict[str, str | None]) -> None:
    for path, text in files.items():
        if text is not None and path.endswith(".py"):
            try:
                compile(text, path, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise s.PatchError(
                    f"{path}: the patched file does not compile, line {error.lineno}: {error.msg}"
                ) from None


def import_all(root: Path, files: dict[str, str | None]) -> None:
    """Import every changed module from a folder of links to ``root`` with the changed files in place."""
    modules = [p.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in files if p.endswith(".py")]
    with tempfile.TemporaryDirectory(prefix="ddtree-patches-") as folder:
        for package in sorted({path.split("/")[0] for path in files}):
            for source in (root / package).rglob("*"):
                if source.is_file() and "__pycache__" not in source.parts:
                    link = Path(folder) / source.relative_to(root)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(source)
        for path, text in files.items():
            target = Path(folder, path)
            target.unlink(missing_ok=True)
            if text is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)",
                *modules,
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"
        raise s.PatchError(f"{', '.join(files)}: the patched files do not import: {reason}")


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_ddtree.patches", description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=("verify", "apply", "status", "combine"))
    parser.add_argument(
        "--series", type=Path, default=None, help="folder with the file 'series' (default: the one shipped)"
    )
    parser.add_argument(
        "--root", type=Path, default=None, help="site-packages to work on (default: where sglang is installed)"
    )
    parser.add_argument(
        "--wheel", type=Path, default=None, help="verify only: work on this SGLang wheel and check its sha256"
    )
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments.command, arguments.series or default_series(), arguments.root, arguments.wheel)
    except s.PatchError as error:
        print(f"ddtree-patches: error: {error}", file=sys.stderr)
        return 1


def _run(command: str, folder: Path, root: Path | None, wheel: Path | None) -> int:
    patches = s.load(folder)
    if command == "combine":
        print(s.combined(patches), end="")
        return 0
    if wheel is not None:
        if command != "verify":
            raise s.PatchError(f"{wheel.name}: a wheel can only be verified; {command} works on --root")
        files = s.run(patches, wheel_reader(wheel))
        compile_all(files)
        print(f"{len(patches)} patches apply to {wheel.name} with zero fuzz: {len(files)} files, all compile")
        return 0
    at = root or default_root()
    version = _installed_version() if root is None else None
    if version not in (None, SGLANG_VERSION):
        raise s.PatchError(f"sglang: version {version} is installed, the series is for {SGLANG_VERSION}")
    read = reader(at)
    count = s.applied(patches, read)
    if command == "status":
        for index, patch in enumerate(patches):
            print(f"{'applied    ' if index < count else 'not applied'} {patch.name}")
        return 0
    pristine: s.Read = read
    if command == "verify" and count:
        earlier = s.run(patches[:count], read, backwards=True)
        pristine = lambda path: earlier[path] if path in earlier else read(path)  # noqa: E731
        count = 0
    files = s.run(patches[count:], pristine)
    compile_all(files)
    if command == "verify":
        import_all(at, files)
        print(f"{len(patches)} patches apply with zero fuzz: {len(files)} files, all compile and import")
        return 0
    if not files:
        print(f"already applied: {len(patches)} patches")
        return 0
    write_all(at, files)
    print(f"applied {len(patches) - count} of {len(patches)} patches: {', '.join(sorted(files))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
