"""Pack the simulated engine as a wheel, byte for byte the same each time.

usage: python -m simengine.wheel FOLDER      (with tests/ on the path; prints the file's path and sha256)
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

NAME = "sglang-0.5.23-py3-none-any.whl"
_INFO = "sglang-0.5.23.dist-info"
_TIME = (2020, 1, 1, 0, 0, 0)


def build(folder: Path) -> tuple[Path, str]:
    """Write the wheel into ``folder`` (made if missing). Returns its path and its sha256 in hex."""
    here = Path(__file__).parent
    files = {
        str(p.relative_to(here)): p.read_bytes()
        for p in sorted((here / "sglang").rglob("*.py"))
        if "__pycache__" not in p.parts
    }
    files[f"{_INFO}/METADATA"] = (
        b"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nSummary: simulated engine for tests; not SGLang\n"
    )
    files[f"{_INFO}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: simengine\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{_INFO}/RECORD"] = (record + f"{_INFO}/RECORD,,\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            wheel.writestr(entry, data)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])))
