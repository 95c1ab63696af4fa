"""Holds what was installed against the image's torch and CUDA, and writes down what the image needs of a node.

usage: facts.py OUT_FILE DEVICE DISTRIBUTION...      (DEVICE: cpu | cuda; the distributions are the kernel wheels)
Runs inside the image being built, after everything is installed; no GPU is needed. Standard library only.
Writes one JSON object, and beside it packages.json with every Python and Debian package; problems end as one line
"ddtree-build: error: …" and exit status 1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

# Said by libraries that want a driver; the builder has none, so that they prove nothing.
NO_DRIVER = re.compile(r"lib(cuda|nvidia-ml|nvcuvid)\.so|NVIDIA driver|No CUDA GPUs|CUDA driver|no NVIDIA GPU", re.I)
NOTED = (
    "sglang",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "sglang-kernel",
    "sglang-ddtree",
    "sglang-cpu",
)


FATBIN = 0xBA55ED50
# Flags of binaries that run on exactly one architecture (sm_90a), or on one family (sm_100f).
ONLY_THIS, FAMILY = 1 << 20, 1 << 21


class RefusedError(Exception):
    """One sentence."""


def version_of(distribution: str) -> str | None:
    """Installed version; None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any]:
    """Version and CUDA version (None for a CPU build) of torch, without importing it; {} when there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    told: dict[str, Any] = {}
    exec((Path(spec.origin).parent / "version.py").read_text(), told)
    return {"torch": str(told.get("__version__", "")), "cuda": told.get("cuda")}


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own."""
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=False)


def architectures() -> list[str]:
    """What torch's own kernels are compiled for, such as sm_90 and compute_120."""
    done = python("import torch; print(torch._C._cuda_getArchFlags() or '')")
    if done.returncode:
        raise RefusedError(f"import torch fails in the base image: {last_line(done.stderr)}")
    return sorted(set(done.stdout.split()))


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no reason given"


def release(version: str) -> list[int]:
    """Numbers of a version without its local part: 2.14.1+cu130 → [2, 14, 1]."""
    return [int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3]]


def check_torch_pin(distribution: str, torch: str) -> None:
    """Refuse a distribution that pins another minor release of torch than the image has."""
    for requirement in importlib.metadata.requires(distribution) or []:
        found = re.match(r"torch\s*\(?\s*==\s*([0-9.]+)", requirement)
        if found and release(found[1])[:2] != release(torch)[:2]:
            raise RefusedError(
                f"{distribution} {version_of(distribution)} is made for torch {found[1]}, "
                f"but the base image has {torch}; use a base image with that torch"
            )


def check_local_tags(distribution: str, torch: dict[str, Any]) -> None:
    """Refuse a wheel whose version names another CUDA major or torch than the image has (``+cu126torch2.8``)."""
    version = version_of(distribution) or ""
    local = version.partition("+")[2]
    built = re.search(r"cu(\d{2})(\d)", local)
    cuda = torch.get("cuda")
    if built and cuda and built[1] != str(cuda).split(".")[0]:
        raise RefusedError(
            f"the wheel {distribution} {version} is built for CUDA {built[1]}.{built[2]}, but torch in the base image "
            f"is for CUDA {cuda}; use the wheel for CUDA {str(cuda).split('.')[0]}"
        )
    if built and not cuda:
        raise RefusedError(
            f"the wheel {distribution} {version} is built for CUDA {built[1]}.{built[2]}, "
            "but torch in the base image is a CPU build"
        )
    wanted = re.search(r"(?:torch|pt)\.?(\d+)\.?(\d+)", local)
    if wanted and torch.get("torch"):
        have = release(torch["torch"])[:2]
        if [int(wanted[1]), int(wanted[2])] != have:
            raise RefusedError(
                f"the wheel {distribution} {version} is built for torch {wanted[1]}.{wanted[2]}, "
                f"but the base image has {torch['torch']}"
            )


def modules_of(distribution: str) -> list[str]:
    """Top-level modules of a distribution."""
    names = set()
    for file in importlib.metadata.files(distribution) or []:
        top = file.parts[0]
        if len(file.parts) > 1 and file.name == "__init__.py" and len(file.parts) == 2:
            names.add(top)
        elif len(file.parts) == 1 and file.suffix in (".py", ".so"):
            names.add(top.split(".")[0])
    return sorted(name for name in names if name.isidentifier())


def check_import(distribution: str) -> list[str]:
    """Import a kernel wheel's modules after torch. Returns those that only a machine with a driver can judge."""
    unjudged = []
    for module in modules_of(distribution):
        done = python(f"import importlib.util as u\nif u.find_spec('torch'): import torch\nimport {module}")
        if done.returncode == 0:
            continue
        if NO_DRIVER.search(done.stderr):
            unjudged.append(module)
            continue
        reason = last_line(done.stderr)
        hint = "; it is built for another torch" if "undefined symbol" in reason else ""
        raise RefusedError(f"import {module} (of the wheel {distribution}) fails in this image: {reason}{hint}")
    return unjudged


def device_code(path: Path) -> set[str]:
    """What the device code in a library is compiled for, such as sm_90a and compute_120; empty for any other file.

    A section .nv_fatbin holds containers (magic, version, size of this header, size of the rest) of entries: kind
    (1 PTX, 2 binary), size of this header and of the padded code; at 28 the architecture, at 40 flags.
    """
    found: set[str] = set()
    if path.stat().st_size < 64:
        return found
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at, end in elf_sections(data, (b".nv_fatbin", b"__nv_relfatbin")):
            while at + 16 <= end:
                magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
                if magic != FATBIN:
                    at += 8
                    continue
                entry, at = at + header, at + header + size
                while entry + 64 <= min(at, end):
                    kind, _, head, padded = struct.unpack_from("<HHIQ", data, entry)
                    number, flags = (
                        *struct.unpack_from("<I", data, entry + 28),
                        *struct.unpack_from("<Q", data, entry + 40),
                    )
                    if kind == 1:
                        found.add(f"compute_{number}")
                    elif kind == 2:
                        found.add(f"sm_{number}{'a' if flags & ONLY_THIS else 'f' if flags & FAMILY else ''}")
                    entry += max(head + padded, 64)
    return found


def elf_sections(data: mmap.mmap, names: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """First and last offset of the sections of these names in a 64-bit library; [] when there are none."""
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, strings = struct.unpack_from("<HHH", data, 58)
        heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count if table else 0)]
        texts = heads[strings][4] if heads else 0
        return [
            (offset, min(offset + length, len(data)))
            for name, _, _, _, offset, length in heads
            if any(data[texts + name : texts + name + len(n) + 1] == n + b"\0" for n in names)
        ]
    except (struct.error, IndexError):
        return []


def kernel_architectures(distribution: str) -> list[str]:
    """What the device code of a kernel wheel is compiled for, over all its libraries; [] when it has none."""
    found: set[str] = set()
    for file in importlib.metadata.files(distribution) or []:
        if ".so" in file.suffixes:
            found |= device_code(Path(str(file.locate())))
    return sorted(found)


def debian_packages(status: Path) -> dict[str, str]:
    """Installed packages and their versions by dpkg's own record; {} where there is none."""
    if not status.is_file():
        return {}
    found = {}
    for entry in status.read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.+)$", entry, re.M))
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields.get("Version", "")
    return found


def python_packages() -> dict[str, list[str]]:
    """Distributions by name: version, and the licence where it is declared as an SPDX expression."""
    found = {}
    for dist in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower()
        licence = dist.metadata["License-Expression"]
        if name:
            found[name] = [dist.version, *([licence] if licence else [])]
    return found


def main(out: str, device: str, kernels: list[str]) -> None:
    """Check, and write the facts."""
    torch = torch_facts()
    facts: dict[str, Any] = {
        "python": f"cp3{sys.version_info.minor}",
        "packages": {name: found for name in (*NOTED, *kernels) if (found := version_of(name))},
        **torch,
    }
    if device == "cpu":
        facts.pop("cuda", None)  # torch's CUDA build runs on a CPU too; nothing is asked of a driver
    for distribution in ("sglang", *kernels):
        if torch and version_of(distribution):
            check_torch_pin(distribution, torch["torch"])
    unjudged = []
    for distribution in kernels:
        check_local_tags(distribution, torch)
        unjudged += check_import(distribution)
    if device == "cuda":
        if not torch.get("cuda"):
            what = f"torch {torch['torch']}, a CPU build" if torch else "no torch"
            raise RefusedError(f"the base image has {what}; a CUDA engine needs a base image with torch for CUDA")
        facts["arch"] = architectures()
        facts["kernels"] = {name: code for name in kernels if (code := kernel_architectures(name))}
    if unjudged:
        facts["needDriver"] = sorted(unjudged)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(facts, sort_keys=True, separators=(",", ":")))
    packages = {"deb": debian_packages(Path("/var/lib/dpkg/status")), "pypi": python_packages()}
    Path(out).with_name("packages.json").write_text(json.dumps(packages, sort_keys=True, separators=(",", ":")))
    print(f"facts: {json.dumps(facts, sort_keys=True)}", flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    except RefusedError as error:
        sys.exit(f"ddtree-build: error: {error}")
