"""The wheels: SGLang's from the package index, checked against its lock, and the project's own, built reproducibly."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .layers import EPOCH
from .venv import content_key

SGLANG_LOCK = "images/engine-cpu/sglang.lock"


class WheelError(RuntimeError):
    """A wheel that cannot be had; the text is one sentence."""


def build_wheel(source: Path, out: Path) -> Path:
    """Builds the wheel of the project in `source` into `out` (hatchling, fixed dates). Raises WheelError."""
    before = set(out.glob("*.whl"))
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made = sorted(set(out.glob("*.whl")) - before)
    if done.returncode or len(made) != 1:
        tail = " / ".join(done.stdout.strip().splitlines()[-2:])
        raise WheelError(f"the wheel of {source} could not be built: {tail}")
    return made[0]


def plugin_wheels(root: Path, cache: Path) -> list[Path]:
    """The wheels of patches/*/ (those with a pyproject.toml) in the wheelhouse, built where their sources changed."""
    house = cache / "wheelhouse"
    house.mkdir(parents=True, exist_ok=True)
    wheels = []
    for pyproject in sorted(root.glob("patches/*/pyproject.toml")):
        source = pyproject.parent
        key = content_key(root / "patches", root=root)[:16]  # a wheel may hold the patch series beside it
        mark = house / f".{source.name}-{key}"  # names the wheel that these sources give
        if not mark.is_file() or not (house / mark.read_text()).is_file():
            with tempfile.TemporaryDirectory(dir=house, prefix=".build-") as scratch:
                made = build_wheel(source, Path(scratch))
                for old in house.glob(f".{source.name}-*"):
                    old.unlink(missing_ok=True)
                made.replace(house / made.name)
                mark.write_text(made.name)
        wheels.append(house / mark.read_text())
    return wheels


def locked_hash(root: Path) -> tuple[str, str]:
    """Version and sha256 of SGLang's wheel from its lock file. Raises WheelError when the file holds no single one."""
    text = (root / SGLANG_LOCK).read_text()
    versions, hashes = re.findall(r"^sglang==(\S+)", text, re.M), re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    if len(versions) != 1 or len(hashes) != 1:
        raise WheelError(f"{SGLANG_LOCK} must name one version of sglang with one sha256")
    return versions[0], hashes[0]


def sglang_wheel(root: Path, cache: Path, uv: str) -> Path:
    """SGLang's stock wheel in the wheelhouse, fetched when it is not there. Raises WheelError."""
    house = cache / "wheelhouse"
    house.mkdir(parents=True, exist_ok=True)
    version, wanted = locked_hash(root)
    for wheel in house.glob(f"sglang-{version}-*.whl"):
        if sha256(wheel) == wanted:
            return wheel
        wheel.unlink()
    with tempfile.TemporaryDirectory(dir=house, prefix=".fetch-") as scratch:
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--require-hashes"]
        command = [
            uv,
            "tool",
            "run",
            "-q",
            "pip",
            "download",
            "-q",
            *options,
            "-d",
            scratch,
            "-r",
            str(root / SGLANG_LOCK),
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        found = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(found) != 1:
            tail = " / ".join(done.stderr.strip().splitlines()[-2:])
            raise WheelError(f"SGLang {version} could not be fetched from the package index: {tail}")
        return found[0].replace(house / found[0].name)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
