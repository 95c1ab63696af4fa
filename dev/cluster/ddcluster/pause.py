"""The image of the process that holds a pod's namespaces: one static program, packed without any image builder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path

from .say import Problem
from .settings import PAUSE_IMAGE

_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(int signal) { (void)signal; _exit(0); }
static void reap(int signal) { (void)signal; while (waitpid(-1, 0, WNOHANG) > 0) {} }

int main(void) {
  signal(SIGINT, stop);
  signal(SIGTERM, stop);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
"""
_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(folder: Path) -> Path:
    """An OCI archive of PAUSE_IMAGE below `folder`, made when missing (its name carries the hash of the source)."""
    key = hashlib.sha256((_SOURCE + PAUSE_IMAGE).encode()).hexdigest()[:12]
    path = folder / f"pause-{key}.tar"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _pack(_compile(folder), path)
    return path


def _compile(folder: Path) -> bytes:
    binary = folder / ".pause"
    done = subprocess.run(
        ["gcc", "-static", "-Os", "-s", "-x", "c", "-o", binary, "-"],
        input=_SOURCE.encode(), capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"cannot compile the pause program: {done.stderr.decode().strip()}")
    content = binary.read_bytes()
    binary.unlink()
    return content


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _pack(program: bytes, path: Path) -> None:
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    layer = _tar({"pause": program}, 0o755)
    arch = _ARCH.get(platform.machine(), platform.machine())
    config = {
        "architecture": arch,
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(gzip.compress(layer, mtime=0), "layer.v1.tar+gzip")],
    }
    found = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    found["annotations"] = {"io.containerd.image.name": PAUSE_IMAGE}
    index = {"schemaVersion": 2, "manifests": [{**found, "platform": {"architecture": arch, "os": "linux"}}]}
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(_tar(files, 0o644))
    unfinished.rename(path)
