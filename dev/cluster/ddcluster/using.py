"""For tests and benchmarks: the environment in which kubectl, helm and clients reach a cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "cluster"


def environment(name: str, *, own: bool = False) -> dict[str, str]:
    """This process's, with what ``cluster env`` says of $DDTREE_CLUSTER, else (or if ``own``) of ``name``; started when
    it is not up.

    Raises subprocess.CalledProcessError when it does not start.
    """
    env = os.environ | {"DDTREE_CLUSTER": (not own and os.environ.get("DDTREE_CLUSTER")) or name}
    subprocess.run([TOOL, "up"], env=env, check=True, stdout=subprocess.DEVNULL)
    told = subprocess.run([TOOL, "env"], env=env, check=True, capture_output=True, text=True).stdout
    for line in told.splitlines():
        key, _, value = line.removeprefix("export ").partition("=")
        env[key] = shlex.split(value)[0] if value else ""
    return env
