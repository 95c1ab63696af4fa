"""What building needs from this machine: a few Debian packages, and a registry where no cluster runs one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .registry import Registry, RegistryError

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_S = 30.0


class HostError(RuntimeError):
    """Something is missing here that cannot be installed; the text is one sentence."""


def need(program: str, package: str, say: Callable[[str], None]) -> str:
    """The path of a program, its Debian package installed when it is missing. Raises HostError."""
    found = shutil.which(program, path=_PATH)
    if found:
        return found
    by_hand = f"{program} is missing: install the package {package}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise HostError(f"{by_hand} (it could not be done here: that needs root on Debian or Ubuntu)")
    say(f"installing {package}")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-q"]
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", package]):
        done = subprocess.run(
            [*apt, *arguments], capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise HostError(f"{by_hand} (apt-get {arguments[0]} failed: {last})")
    found = shutil.which(program, path=_PATH)
    if not found:
        raise HostError(by_hand)
    return found


@contextmanager
def own_registry(storage: Path, say: Callable[[str], None]) -> Iterator[str]:
    """A registry on a free loopback port over `storage`, for as long as the block runs; gives its address.

    The dev cluster's registry serves the same folder: what is stored here is there when a cluster starts.
    Raises HostError or RegistryError.
    """
    program = need("docker-registry", "docker-registry", say)
    storage.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="ddtree-registry-") as scratch:
        settings, log = Path(scratch, "registry.yml"), Path(scratch, "log")
        settings.write_text(
            "version: 0.1\nlog: {level: error}\n"
            f"storage: {{filesystem: {{rootdirectory: {str(storage)!r}}}, delete: {{enabled: true}}}}\n"
            f"http: {{addr: '{address}'}}\n"
        )
        # It ends with this process however that ends; in a session of its own, so that Ctrl-C does not end it first.
        command = ["setpriv", "--pdeathsig", "TERM", program, "serve", str(settings)]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            _wait(process, Registry(address), log)
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], registry: Registry, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return registry.ping()
        except RegistryError:
            if process.poll() is not None or time.monotonic() > deadline:
                last = (log.read_text().strip().splitlines() or ["no message"])[-1]
                raise RegistryError(f"docker-registry did not start: {last}") from None
            time.sleep(0.05)
