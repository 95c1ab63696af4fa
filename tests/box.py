"""Runs a command in an image's root file system: read-only but for /tmp, as the image's user, without a runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from imagetool.registry import Registry

_INSIDE = r"""
root=$1; shift
ip link set lo up
mount --bind "$root" "$root" && mount -o remount,ro,bind "$root"
mount -t tmpfs tmpfs "$root/tmp" && chmod 1777 "$root/tmp"
mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/dev" && mkdir -m 1777 "$root/dev/shm"
for d in null zero random urandom; do touch "$root/dev/$d" && mount --bind "/dev/$d" "$root/dev/$d"; done
exec /usr/bin/env -i "$@"
"""


def unpack(registry: Registry, repo: str, digest: str, root: Path) -> dict[str, Any]:
    """Unpacks an image's layers below `root` and returns its configuration."""
    manifest = registry.manifest(repo, digest)
    root.mkdir(parents=True)
    for layer in manifest["layers"]:
        assert layer["mediaType"].endswith("tar+zstd")
        tar = subprocess.run(
            ["zstd", "-dcq"], input=registry.blob(repo, layer["digest"]), stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(root)], input=tar.stdout, check=True)
    config: dict[str, Any] = json.loads(registry.blob(repo, manifest["config"]["digest"]))
    return config


def run(root: Path, config: dict[str, Any], *command: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `command`, or the image's own, with the image's environment in namespaces of its own (loopback only)."""
    settings = config["config"]
    wanted = list(command) or [*settings.get("Entrypoint", []), *settings.get("Cmd", [])]
    chroot = [shutil.which("chroot") or "chroot", f"--userspec={settings.get('User') or '0:0'}", str(root)]
    inside = [*settings["Env"], *chroot, *wanted]  # the image may have no command of its own for any of this
    isolate = ["unshare", "--mount", "--net", "--pid", "--fork", "--propagation", "private", "--kill-child"]
    argv = [*isolate, "sh", "-euc", _INSIDE, "sh", str(root), *inside]
    return subprocess.run(argv, capture_output=True, text=True, timeout=seconds)
