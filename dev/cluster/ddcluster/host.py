"""The outside of a cluster: makes the namespaces, finds them again, and removes every trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import certs, preflight, render
from .binaries import build, kubectl_and_helm, locked
from .node import MAIN
from .say import Problem, say
from .settings import REGISTRY, Settings


@dataclass(frozen=True)
class Running:
    """A cluster that was started: `outer` is unshare's process, `outer_start` tells it from a later one of that id."""

    outer: int
    outer_start: int
    api_port: int
    registry_port: int

    @property
    def init(self) -> int:
        """The host's id of process 1 of the PID namespace; 0 when it is gone."""
        return child(self.outer)


def find(s: Settings) -> Running | None:
    """The running cluster of this name, if any."""
    try:
        found = Running(**json.loads((s.state / "running.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if start_time(found.outer) == found.outer_start else None


def require(s: Settings) -> Running:
    """The running cluster, or a Problem."""
    found = find(s)
    if not found or not (s.state / "ready").exists():
        raise Problem(f"cluster {s.name!r} is not running: start it with make cluster-up (or dev/cluster/cluster up)")
    return found


def up(s: Settings) -> float:
    """Start the cluster and return the seconds it took; 0 when it runs already. Raises Problem; leaves nothing then."""
    preflight.check()
    for folder in (s.state, s.cache):
        folder.mkdir(parents=True, exist_ok=True)
    preflight.storage(s.cache)
    with locked(s.state / "lock"):
        if find(s) and (s.state / "ready").exists():
            return 0.0
        _remove(s)
        kube = build("kube", s.cache)
        kubectl_and_helm(s.cache)
        began = time.monotonic()
        say(f"starting cluster {s.name!r}")
        with _interruptible() as deaf:
            try:
                _start(s, kube)
            except BaseException:
                deaf()
                _remove(s)
                raise
        return time.monotonic() - began


def down(s: Settings) -> bool:
    """Stop the cluster and remove all but images and logs; False when none ran."""
    if not s.state.exists():
        return False
    with locked(s.state / "lock"):
        ran = find(s) is not None
        _remove(s)
    return ran


def purge(s: Settings) -> None:
    """Stop the cluster and remove its image store, its logs and its folder as well."""
    down(s)
    for images in (s.containerd_root, *s.containerd_root.parent.glob(f"{s.name}.node-?")):
        shutil.rmtree(images, ignore_errors=True)
    shutil.rmtree(s.state, ignore_errors=True)


def neighbours(s: Settings) -> list[str]:
    """Names of all running clusters of this user, this one included."""
    folders = s.state.parent.iterdir() if s.state.parent.is_dir() else iter(())
    return sorted(f.name for f in folders if find(replace(s, name=f.name, state=f)))


def enter(s: Settings, command: list[str]) -> None:
    """Replace this process by `command` inside the cluster's namespaces."""
    running = require(s)
    os.environ.update(inner_environment(s))
    os.execvp("nsenter", [*entering(running), *command])


def entering(running: Running) -> list[str]:
    """What to put before a command so that it runs inside the namespaces, in the current folder."""
    return ["nsenter", "-t", str(running.init), "-n", "-m", "-p", f"--wd={Path.cwd()}", "--"]


def inner_environment(s: Settings) -> dict[str, str]:
    """Environment of a program inside the namespaces."""
    tools = kubectl_and_helm(s.cache)
    return {
        "KUBECONFIG": str(s.inner_kubeconfig),
        "DDTREE_REGISTRY": REGISTRY,
        "DDTREE_REGISTRY_LOCAL": REGISTRY,
        "DDTREE_KUBECTL": str(tools / "kubectl"),
        "DDTREE_HELM": str(tools / "helm"),
        "PATH": f"{tools}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
    }


def outer_environment(s: Settings) -> dict[str, str]:
    """Environment of a program in the user's own shell. Raises Problem when the cluster does not run."""
    running = require(s)
    tools = kubectl_and_helm(s.cache)
    return {
        "KUBECONFIG": str(s.kubeconfig),
        "DDTREE_CLUSTER": s.name,
        "DDTREE_REGISTRY": REGISTRY,
        "DDTREE_REGISTRY_LOCAL": f"127.0.0.1:{running.registry_port}",
        "DDTREE_KUBECTL": str(tools / "kubectl"),
        "DDTREE_HELM": str(tools / "helm"),
    }


def _start(s: Settings, kube: Path) -> None:
    shutil.rmtree(s.log, ignore_errors=True)
    for folder in (s.live, s.log):
        folder.mkdir(parents=True, exist_ok=True)
    pki = s.live / "pki"
    certs.make(pki)
    with _listen(s, "api") as api, _listen(s, "registry") as registry:
        ports = {"api": api.getsockname()[1], "registry": registry.getsockname()[1]}
        (s.state / "ports.json").write_text(json.dumps(ports))
        s.kubeconfig.touch(mode=0o600)
        s.kubeconfig.write_text(
            render.kubeconfig(pki, "admin", f"https://127.0.0.1:{ports['api']}", f"ddtree-{s.name}")
        )  # fmt: skip
        fds = (api.fileno(), registry.fileno())
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--"]
        command: list[str | Path] = [*unshare, sys.executable, MAIN, "_node", kube, *map(str, fds)]
        env = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
        with (s.log / "node.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                pass_fds=fds, start_new_session=True,
            )  # fmt: skip
    running = Running(process.pid, start_time(process.pid), ports["api"], ports["registry"])
    (s.state / "running.json").write_text(json.dumps(asdict(running)))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            (s.state / "ready").touch()
            return
        if line.startswith("! "):
            raise Problem(f"the cluster did not start: {line[2:].strip()} (logs: {s.log})")
        say(line.strip().removeprefix("· "))
    raise Problem(f"the cluster's first process ended early: see {s.log}/node.log")


def _listen(s: Settings, what: str) -> socket.socket:
    """A socket on 127.0.0.1 in the host's network, on the port of last time if that is free.

    It is opened before the namespaces exist and served from inside them, so that it needs no rules and dies with them.
    """
    port = 0
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        port = int(json.loads((s.state / "ports.json").read_text())[what])
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    return listener


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """A polite kill or a closed terminal shall clean up just as Ctrl-C does.

    Yields a function that makes this process ignore all three, for the cleaning up.
    """

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def deaf() -> None:
        for n in numbers:
            signal.signal(n, signal.SIG_IGN)

    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield deaf
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _remove(s: Settings) -> None:
    running = find(s)
    (s.state / "ready").unlink(missing_ok=True)
    if running:
        _kill(running)
    for group in sorted(_groups(s), key=lambda p: len(p.parts), reverse=True):
        _remove_group(group)
    shutil.rmtree(s.live, ignore_errors=True)
    s.kubeconfig.unlink(missing_ok=True)
    (s.state / "running.json").unlink(missing_ok=True)


def _kill(running: Running) -> None:
    """End process 1 of the namespace, and with it everything; unshare ends when the kernel has reaped them all."""
    try:
        handle = os.pidfd_open(running.outer)
    except ProcessLookupError:
        return
    try:
        for pid in (running.init, running.outer):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
            if select.select([handle], [], [], 30)[0]:
                return
        ended(handle, f"process {running.outer}", 0)
    finally:
        os.close(handle)


def ended(handle: int, what: str, seconds: float = 30) -> None:
    """Wait for the end of a killed process by its descriptor; a Problem when it does not come."""
    if not select.select([handle], [], [], seconds)[0]:
        raise Problem(f"{what} could not be ended: something in it hangs in the kernel")


def _groups(s: Settings) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    tops = [p for p in (root / s.cgroup, *(h / s.cgroup for h in root.iterdir() if not h.is_symlink())) if p.is_dir()]
    return [g for top in tops for g in (top, *(p for p in top.rglob("*") if p.is_dir()))]


def _remove_group(group: Path) -> None:
    """A group that has just lost its last process may be busy for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise Problem(f"the cgroup {group} cannot be removed: {e.strerror}") from e
            time.sleep(0.02)


def child(pid: int) -> int:
    """The one child of a process; 0 when there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return 0


def start_time(pid: int) -> int:
    """When the process started, in ticks since boot; 0 when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
