"""Takes out of an installed engine environment what a CPU never loads.

usage: python3 trim.py SITE_PACKAGES      trims in place and prints how much went

The rules name what a running engine was not seen to map, and what torch's libraries do not link. `slim` libraries keep
everything but device code and symbol tables (slim_elf.py).
"""

from __future__ import annotations

import mmap
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from slim_elf import NotSlimmableError, slim

Verdict = Literal["keep", "drop", "slim"]

DROP = (
    "triton/backends/nvidia/bin/*",
    "triton/backends/nvidia/lib/cupti*",
    "triton/backends/nvidia/lib/*.a",
    "triton/backends/nvidia/include/*",
    "triton/backends/amd/lib/*",
    "triton/_C/libproton.so",
    "triton/FileCheck*",
    "triton/instrumentation/*",
    "nvidia/cudnn/lib/libcudnn_*",
    "nvidia/*/include/*",
    "nvidia/*/lib/*.a",
    "nvidia/*/lib/*.alt.*",
    "nvidia/*/lib/libcusolver*",
    "nvidia/*/lib/libcufftw*",
    "nvidia/*/lib/libnvblas*",
    "nvidia/*/lib/libnvperf*",
    "nvidia/*/lib/libpcsamplingutil*",
    "nvidia/*/lib/libcheckpoint*",
    "nvidia/*/lib/libcufile_rdma*",
    "nvidia/nvshmem/lib/nvshmem_*",
    "nvidia/nvshmem/lib/libnvshmem_device*",
    "torch/lib/libtorch_cuda_linalg.so",
    "torch/include/*",
    "torch/share/*",
    "torch/bin/protoc*",
    "scipy/*/tests/*",
    "numpy/*/tests/*",
    "numba/tests/*",
    "numba/cuda/tests/*",
    "sympy/*/tests/*",
    "networkx/*/tests/*",
)
SLIM_FROM = 2 << 20  # bytes; smaller libraries are not worth it


def verdict(path: str, size: int) -> Verdict:
    """What becomes of a file: `path` relative to site-packages, `size` in bytes."""
    if any(fnmatch(path, pattern) for pattern in DROP):
        return "drop"
    name = path.rpartition("/")[2]
    return "slim" if size >= SLIM_FROM and (name.endswith(".so") or ".so." in name) else "keep"


def slimmed(path: Path) -> bytes:
    """The content that a library gets; its own where nothing can be taken out."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        try:
            return slim(view)
        except NotSlimmableError:
            return bytes(view)


def trim(site: Path) -> tuple[int, int]:
    """Trims a site-packages folder in place. Returns its size in bytes before and after."""
    before = after = 0
    for path in sorted(site.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        size = path.stat().st_size
        before += size
        match verdict(path.relative_to(site).as_posix(), size):
            case "drop":
                path.unlink()
            case "slim":
                mode, data = path.stat().st_mode, slimmed(path)
                path.unlink()  # it may be a hard link into an installer's cache
                path.write_bytes(data)
                path.chmod(mode)
                after += len(data)
            case "keep":
                after += size
    return before, after


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    old, new = trim(Path(sys.argv[1]))
    print(f"trimmed {old / 1e6:.0f} MB to {new / 1e6:.0f} MB")
