"""What the machine must offer; packages that are missing are installed, anything else is one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .say import Problem, say

ELSEWHERE = "or use a cluster you have: export KUBECONFIG=/path/to/its/kubeconfig"

# Program that shows the package is there -> Debian package.
_PACKAGES = {
    "runc": "runc",
    "containerd": "containerd",
    "ctr": "containerd",
    "docker-registry": "docker-registry",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "ebtables": "iptables",
    "ethtool": "ethtool",
    "openssl": "openssl",
    "gcc": "gcc",
    "/usr/include/stdlib.h": "libc6-dev",
    "unshare": "util-linux",
    "mount": "mount",
    "losetup": "mount",
}
_SYS_ADMIN, _NET_ADMIN = 21, 12


def check() -> None:
    """Raise Problem unless a cluster can run here; installs missing Debian packages."""
    if sys.platform != "linux":
        raise Problem(f"the dev cluster needs Linux: run it on a Linux machine, {ELSEWHERE}")
    if os.geteuid() != 0:
        raise Problem(f"the dev cluster needs root, for its namespaces and containers: use sudo -E, {ELSEWHERE}")
    capabilities = _capabilities()
    for bit, name in ((_SYS_ADMIN, "CAP_SYS_ADMIN"), (_NET_ADMIN, "CAP_NET_ADMIN")):
        if not capabilities >> bit & 1:
            raise Problem(
                f"{name} is missing here (a container without --privileged?):"
                f" run this on a machine or in a privileged container, {ELSEWHERE}"
            )
    if not Path("/sys/fs/cgroup").is_dir() or not any(Path("/sys/fs/cgroup").iterdir()):
        raise Problem(f"no cgroups are mounted at /sys/fs/cgroup: mount them first, {ELSEWHERE}")
    if not _has_overlay():
        _modprobe("overlay")
        if not _has_overlay():
            raise Problem(f"this kernel has no overlayfs: use another machine, {ELSEWHERE}")
    if not Path("/proc/sys/net/bridge").exists():
        _modprobe("br_netfilter")
        if not Path("/proc/sys/net/bridge").exists():
            raise Problem(f"this kernel has no br_netfilter, which Services need: use another machine, {ELSEWHERE}")
    _packages()
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"namespaces cannot be made here ({_last(done.stderr)}): run this on a machine"
                      f" or in a privileged container, {ELSEWHERE}")  # fmt: skip


def storage(folder: Path) -> None:
    """Raise Problem unless images can be unpacked below `folder`: overlayfs cannot lie on overlayfs."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False).stdout
    if kind.strip() == "overlayfs":
        raise Problem(f"images cannot be unpacked on overlayfs ({folder}): set DDTREE_CACHE to a folder on a disk")


def _has_overlay() -> bool:
    return "overlay" in Path("/proc/filesystems").read_text()


def _modprobe(module: str) -> None:
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", module], capture_output=True, check=False)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x.split()[1] for x in lines if x.startswith("CapEff:")), 16)


def _missing() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    there = {p: Path(p).exists() if p.startswith("/") else bool(shutil.which(p, path=path)) for p in _PACKAGES}
    return sorted({_PACKAGES[p] for p, found in there.items() if not found})


def _packages() -> None:
    missing = _missing()
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise Problem(
            f"{', '.join(missing)} missing, and only Debian and Ubuntu are known here (no apt-get):"
            f" install them yourself, {ELSEWHERE}"
        )
    say(f"installing {' '.join(missing)}")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-q"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_services():
        for command in ([*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Problem(
                    f"{' '.join(command[4:])} failed ({_last(done.stderr)}): install {' '.join(missing)} yourself"
                )
    if still := _missing():
        raise Problem(f"{', '.join(still)} still missing after the installation: install them yourself")


class _no_services:  # noqa: N801 - a context manager
    """While packages are installed their services must not start: Debian asks policy-rc.d, which says no."""

    _policy = Path("/usr/sbin/policy-rc.d")

    def __enter__(self) -> None:
        self._made = not self._policy.exists()
        if self._made:
            self._policy.write_text("#!/bin/sh\nexit 101\n")
            self._policy.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        if self._made:
            self._policy.unlink(missing_ok=True)
