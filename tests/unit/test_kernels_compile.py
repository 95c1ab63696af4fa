"""Every kernel that the package launches compiles for the GPUs the product names; none of them is needed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need torch and Triton: run `make test-kernels`")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.unit


def test_all_kernels_compile_for_ampere_ada_hopper_and_blackwell(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": str(ROOT / "patches/sglang_ddtree/src"),
        "TRITON_CACHE_DIR": os.environ.get("DDTREE_TRITON_CACHE", str(tmp_path)),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev/gpu/compile_kernels.py"), "80", "89", "90", "100", "120"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert sum("attention" in line for line in lines) >= 8, "the cuts of real models"
    assert all(f"sm_{c}" in line for line in lines for c in (80, 89, 90, 100, 120))
    assert "spills" not in done.stdout
