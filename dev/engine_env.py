"""Makes build/engine: a thin environment of this checkout on top of the shared, content-keyed engine environment.

The shared one (torch, SGLang, …; 6 GB) must not know any checkout's path. This one holds three small things in its
site-packages: a `.pth` file that adds the shared packages and the source folders of the project's own wheels, and for
each of those wheels a dist-info folder, so that their entry points (`sglang.srt.plugins`) are found as if installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PTH = "ddtree-checkout.pth"


def dist_info(project: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The dist-info folder of a pyproject's `[project]` table: its name and its files (name to text)."""
    name, version = str(project["name"]), str(project["version"])
    groups: dict[str, Mapping[str, str]] = dict(project.get("entry-points", {}))
    if project.get("scripts"):
        groups["console_scripts"] = project["scripts"]
    lines = []
    for group, points in sorted(groups.items()):
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in sorted(points.items())), ""]
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return f"{name.replace('-', '_')}-{version}.dist-info", {"METADATA": metadata, "entry_points.txt": "\n".join(lines)}


def write(path: Path, text: str) -> None:
    """Writes only what differs: an engine that starts meanwhile never sees a half-written file of the same content."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        temporary.replace(path)


def make(root: Path, shared: Path, out: Path) -> None:
    """Creates or refreshes `out` for the checkout at `root`; `shared` is the folder of the shared environment."""
    python = shared / "bin" / "python"
    site = out / "lib" / "python3.11" / "site-packages"
    if not (out / "bin" / "python").exists():
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", out], check=True)
    paths = [f"import site; site.addsitedir({str(shared / 'lib/python3.11/site-packages')!r})"]
    wanted = set()
    for pyproject in sorted(root.glob("patches/*/pyproject.toml")):
        folder, files = dist_info(tomllib.loads(pyproject.read_text())["project"])
        wanted.add(folder)
        paths.append(str(pyproject.parent / "src"))
        for name, text in files.items():
            write(site / folder / name, text)
    write(site / PTH, "\n".join(paths) + "\n")
    for stale in site.glob("*.dist-info"):
        if stale.name not in wanted:
            shutil.rmtree(stale)


if __name__ == "__main__":
    make(*(Path(argument).resolve() for argument in sys.argv[1:4]))
