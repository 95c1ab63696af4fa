"""Applies the patch series, compiles what changed and imports the result. Runs inside the image being built.

usage: finish.py SERIES_FOLDER MODULE...
Standard library only. Problems end as one line with "error:" and exit status 1.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
import sysconfig
from pathlib import Path


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; its standard error is kept."""
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    return subprocess.run([sys.executable, *argv], env=env, text=True, stderr=subprocess.PIPE, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of standard error that says something."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"exit status {done.returncode}"


def apply(series: Path) -> None:
    """Apply the series with the engine package's own tool, which explains itself."""
    lines = (series / "series").read_text().splitlines()
    if not any(line.split("#", 1)[0].strip() for line in lines):
        print("the series is empty", flush=True)
        return
    done = run("-m", "sglang_ddtree.patches", "apply", "--series", str(series))
    sys.stderr.write(done.stderr)
    if done.returncode:
        if "ddtree-patches: error:" not in done.stderr:
            sys.stderr.write(f"ddtree-build: error: applying the patch series failed: {last_line(done)}\n")
        sys.exit(1)


def fresh(source: Path) -> bool:
    """Whether the bytecode beside ``source`` is of this very text."""
    try:
        head = Path(importlib.util.cache_from_source(str(source))).read_bytes()[:16]
    except OSError:
        return False
    return head[:4] == importlib.util.MAGIC_NUMBER and head[8:] == importlib.util.source_hash(source.read_bytes())


def compile_changed(modules: list[str]) -> None:
    """Compile again what the patches changed, with the hash of the source in the bytecode."""
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    count = 0
    for library in sorted({sysconfig.get_paths()[k] for k in ("purelib", "platlib")}):
        for source in sorted(s for module in modules for s in Path(library, module).rglob("*.py")):
            if fresh(source):
                continue
            try:
                compiled = py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
            except (py_compile.PyCompileError, SyntaxError, ValueError):
                continue  # found by the import below when it matters
            if compiled:
                Path(compiled).chmod(0o644)
                count += 1
    print(f"compiled {count} changed files", flush=True)


def check_imports(modules: list[str]) -> None:
    """Import each module in a process of its own."""
    for module in modules:
        done = run("-c", f"import {module}")
        if done.returncode:
            sys.stderr.write(done.stderr[-4000:])
            sys.exit(f"ddtree-build: error: import {module} fails in this image: {last_line(done)}")
        print(f"import {module}: ok", flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    apply(Path(sys.argv[1]))
    compile_changed(sys.argv[2:])
    check_imports(sys.argv[2:])
