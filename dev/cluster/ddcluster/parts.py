"""The components of one node as processes: started, waited for, and started again when they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .say import Problem

START_DEADLINE = 180.0
COMPONENTS = "components.json"  # below a node's live folder: name -> {pid inside the namespace, starts}


def reap(work: Callable[[], int]) -> int:
    """Be process 1: run `work` in a child and return its exit status once it ends."""
    child = os.fork()
    if child == 0:
        os._exit(work())
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def tell(line: str) -> None:
    """A line for the process that started this node: "· text" is progress, "ready" ends it, "! text" says why not."""
    print(line, flush=True)


def serve(start: Callable[[], Parts]) -> int:
    """Start a node, report, then restart whatever of it dies until the namespace is killed."""
    try:
        parts = start()
    except (Problem, OSError) as e:
        tell(f"! {e}")
        return 1
    except subprocess.CalledProcessError as e:
        tell(f"! {' '.join(map(str, e.cmd))}: {(e.stderr or '').strip() or e}")
        return 1
    tell("ready")
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parts.keep_alive()
    return 0


class Parts:
    """Processes by name, with what is needed to start each again. ``again`` is called with the name of one that was."""

    def __init__(self, live: Path, log: Path, again: Callable[[str], None]) -> None:
        self._live, self._log, self._again = live, log, again
        self._commands: dict[str, tuple[Sequence[str | Path], tuple[int, ...]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}
        self._deadline = time.monotonic() + START_DEADLINE

    def run(self, name: str, *command: str | Path, keep: tuple[int, ...] = ()) -> None:
        """Start a component; it is started again when it ends. ``keep``: descriptors that it inherits."""
        self._commands[name] = (command, keep)
        self._spawn(name)

    def end(self, name: str) -> None:
        """Stop a component, for good."""
        process = self._processes.pop(name)
        del self._starts[name]
        process.terminate()
        process.wait()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll `condition` until it holds; a component that ends meanwhile, or the deadline, is a Problem."""
        told = time.monotonic()
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    raise Problem(f"{name} ended with status {process.returncode}: {_tail(self._log / f'{name}.log')}")
            now = time.monotonic()
            if now > self._deadline:
                raise Problem(f"{what} was not ready within {START_DEADLINE:.0f} s: see {self._log}")
            if now - told > 5:
                tell(f"· waiting for {what}")
                told = now
            time.sleep(0.1)

    def keep_alive(self) -> None:
        """Start a component again when it ends; each end is noted in log/restarts.log."""
        notes = self._log / "restarts.log"
        while True:
            time.sleep(1)
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                with notes.open("a") as f:
                    f.write(f"{time.strftime('%H:%M:%S')} {name} ended with status {process.returncode}\n")
                self._spawn(name)
                self._again(name)

    def _spawn(self, name: str) -> None:
        command, keep = self._commands[name]
        with (self._log / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._live, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=keep
            )  # fmt: skip
        self._processes[name] = process
        self._starts[name] = self._starts.get(name, 0) + 1
        table = {n: {"pid": p.pid, "starts": self._starts[n]} for n, p in self._processes.items()}
        components = self._live / COMPONENTS
        unfinished = components.with_suffix(".new")
        unfinished.write_text(json.dumps(table))
        unfinished.rename(components)


def _tail(log: Path) -> str:
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()] if log.exists() else []
    return (lines or ["it said nothing"])[-1][:400]
