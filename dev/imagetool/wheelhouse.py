"""Fills the wheelhouse and prints what is in it; see dev/wheelhouse."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from .wheels import WheelError, plugin_wheels, sglang_wheel, sha256


def main(root: Path) -> None:
    """Fetches and builds what is missing for the checkout at `root`."""
    cache = Path(os.environ["DDTREE_CACHE"])
    (cache / "wheelhouse").mkdir(parents=True, exist_ok=True)
    try:
        with (cache / "wheelhouse/.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wheels = [sglang_wheel(root, cache, os.environ["UV"]), *plugin_wheels(root, cache)]
    except WheelError as error:
        sys.exit(f"wheelhouse: {error}")
    for wheel in wheels:
        print(wheel, sha256(wheel))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
