"""Start a simulated engine as a process, on a port that the system picks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_HERE = Path(__file__).parent


class SimEngine:
    """A running engine; a context manager that ends it. ``url`` is its address.

    Defaults to DFLASH with a fast /health; flags given later win. Raises RuntimeError with the engine's own words when
    it does not start.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None, deadline: float = 60.0) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "sim/model", "--port", "0"]
        command += ["--enable-metrics", "--sim-health-delay", "0", "--sim-step-delay", "0.0002"]
        command += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "sim/drafter", *flags]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(_HERE), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.url = self._ready(time.monotonic() + deadline)
        except BaseException:
            self.kill()
            raise

    def _ready(self, deadline: float) -> str:
        assert self.process.stdout is not None
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.2)[0]:
                line = self.process.stdout.readline()
                if "fired up" in line:
                    return "http://" + line.rsplit("http://", 1)[1].strip().rstrip(")")
                if not line:
                    _, err = self.process.communicate(timeout=30)
                    raise RuntimeError(f"exit {self.process.returncode}: {err.strip()}")
        raise RuntimeError("the simulated engine did not start in time")

    def stop(self, deadline: float = 60.0) -> int:
        """SIGTERM, and the exit code once it has drained."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(deadline)

    def wait(self, deadline: float = 60.0) -> int:
        """The exit code of an engine that ends by itself."""
        self.process.communicate(timeout=deadline)
        return self.process.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def __enter__(self) -> SimEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
