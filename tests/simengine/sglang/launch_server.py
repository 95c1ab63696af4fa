"""Start a simulated engine: python -m sglang.launch_server --model-path ... (flags of SGLang, script of the README)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence

from sglang.sim.script import parse, start_error
from sglang.sim.server import Engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    settings, script = parse(sys.argv[1:] if argv is None else argv)
    # Waited for, not handled: a handler may run, or be put off, in the very moment in which its thread begins to wait.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if signal.sigtimedwait(ends, script.start_delay):
        return 0
    error = start_error(settings, script)
    if error is not None:
        print(error, file=sys.stderr, flush=True)
        return 1
    try:
        engine = Engine(settings, script)
    except OSError as e:
        print(f"OSError: cannot listen on {settings.host}:{settings.port}: {e.strerror}", file=sys.stderr, flush=True)
        return 1
    port = engine.server_address[1]
    threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    print(f"The server is fired up and ready to roll! (simulated, http://{settings.host}:{port})", flush=True)
    signal.sigwait(ends)
    started = time.monotonic()
    engine.drain()
    print(f"Gracefully exiting after {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
