"""The private view of the file system that a node's processes share. Runs inside the mount namespace.

Programs of a node have paths built in (/run/containerd, /var/lib/kubelet, /var/log/pods, /proc/sys ...).
Here they find them, while nothing of it appears on the host.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .settings import Machine

# The kubelet sets these for the whole machine when they differ; it shall find what it wants and leave the host alone.
_KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def prepare(m: Machine) -> None:
    """Make the view. Raises subprocess.CalledProcessError when the kernel refuses a mount."""
    _mount("--make-rshared", "/")
    resolv = Path("/etc/resolv.conf").resolve()
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    aside = Path("/run/ddtree")
    aside.mkdir()
    _shadow(Path("/var/lib"), aside, {"kubelet": m.live / "kubelet", "cni": m.live / "cni-state"})
    _shadow(Path("/var/log"), aside, {"pods": m.log / "pods", "containers": m.live / "container-links"})
    for name, value in _KERNEL.items():
        target = Path("/proc/sys") / name
        if target.exists():
            stand_in = aside / name.replace("/", "-")
            stand_in.write_text(value + "\n")
            _mount("--bind", str(stand_in), str(target))
    # No name server can be reached from inside: an empty file makes look-ups fail at once instead of after a timeout.
    empty = aside / "resolv.conf"
    empty.touch()
    resolv.parent.mkdir(parents=True, exist_ok=True)
    if not resolv.exists():
        resolv.touch()
    _mount("--bind", str(empty), str(resolv))


def _shadow(folder: Path, aside: Path, private: dict[str, Path]) -> None:
    """Cover a folder with a copy of itself made of bind mounts, in which some children are the cluster's own."""
    keep = aside / f"host-{folder.name}"
    keep.mkdir()
    _mount("--rbind", str(folder), str(keep))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for child in sorted(keep.iterdir()):
        here = folder / child.name
        if child.name in private:
            continue
        if child.is_symlink():
            here.symlink_to(child.readlink())
        elif child.is_dir():
            here.mkdir()
            _mount("--rbind", str(child), str(here))
        else:
            here.touch()
            _mount("--bind", str(child), str(here))
    for name, source in private.items():
        source.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir()
        _mount("--bind", str(source), str(folder / name))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
