"""``rollout status``: where a rollout stands, once or until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ddtreectl import kube, options, output, view
from ddtreectl.exits import CliError, Exit

# A watch is renewed after this many seconds, and the cluster may be silent for that long before a watcher gives up.
WATCH_SECONDS = 60.0
SILENCE_SECONDS = 60.0
RETRY_SECONDS = 1.0


@options.connected
def status(
    name: options.Name,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow until it is done or rolled back.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="With --watch: give up after, such as 20m.")
    ] = None,
    where: options.Where = options.HERE,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """Show where a rollout stands. Exit code: 0 done, 1 error, 2 rolled back, 3 still going, 4 not found."""
    seconds = parse_duration(timeout) if timeout else None
    cluster = kube.connect(*where)
    if not watch:
        obj = cluster.get(name)
    elif form == options.View.TABLE and output.colour(sys.stdout, no_color):
        obj = _follow_live(cluster, name, seconds)
    else:
        obj = _follow_lines(cluster, name, seconds, form != options.View.TABLE)
    code, sentence = view.outcome(obj)
    if form == options.View.TABLE:
        if not watch:
            print(view.rollout(obj, output.colour(sys.stdout, no_color)))
    else:
        meta = obj["metadata"]
        whole = {
            "name": meta["name"],
            "namespace": meta.get("namespace"),
            "generation": meta.get("generation"),
            "outcome": {Exit.DONE: "done", Exit.ROLLED_BACK: "rolledBack", Exit.GOING: "going"}.get(code, "error"),
            "exitCode": int(code),
            "summary": sentence,
            "status": view.status_of(obj),
        }
        print(output.data(whole, form))
    _advise(obj, code, no_color)
    return code


def _advise(obj: kube.Object, code: Exit, no_color: bool) -> None:
    """What one may do next, to stderr."""
    name = obj["metadata"]["name"]
    if not view.status_of(obj):
        output.hint("no status yet: is the operator running, and does it watch this namespace?", no_color)
    elif code == Exit.ROLLED_BACK:
        output.hint(f"why: ddtreectl explain {name}; again: ddtreectl rollout retry {name}", no_color)
    elif view.status_of(obj).get("phase") == "Paused":
        output.hint(f"it waits for a person: ddtreectl rollout promote|resume|abort {name}", no_color)


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``20m``, ``1h30m`` or a bare number of seconds. Raises CliError."""
    import re

    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not match or not text:
        raise CliError(f'"{text}" is not a duration; write 90s, 20m or 1h30m')
    h, m, s = (int(g or 0) for g in match.groups())
    return float(h * 3600 + m * 60 + s)


def ended(obj: kube.Object) -> bool:
    """Whether a watcher need not wait longer. A degraded resource may recover, so it is waited for."""
    code, _ = view.outcome(obj)
    return code != Exit.GOING and view.status_of(obj).get("phase") != "Degraded"


def follow(cluster: kube.Cluster, name: str, timeout: float | None) -> Iterator[kube.Object]:
    """The resource now and after every change, until it ends or the time is up.

    Survives watches that expire and a cluster that is away for less than SILENCE_SECONDS.
    """
    start = last_word = time.monotonic()
    while True:
        left = None if timeout is None else timeout - (time.monotonic() - start)
        if left is not None and left <= 0:
            return
        try:
            for obj in cluster.changes(name, WATCH_SECONDS if left is None else min(WATCH_SECONDS, left)):
                last_word = time.monotonic()
                yield obj
                if ended(obj):
                    return
        except kube.UnreachableError as exc:
            if time.monotonic() - last_word > SILENCE_SECONDS:
                raise
            output.hint(f"{exc}; retrying")
            time.sleep(RETRY_SECONDS)


def _follow_lines(cluster: kube.Cluster, name: str, timeout: float | None, quiet: bool) -> kube.Object:
    """One line per change: to stdout, or to stderr when stdout is kept for data."""
    shown, obj = "", None
    for obj in follow(cluster, name, timeout):
        text = view.line(obj)
        if text != shown:
            print(text, file=sys.stderr if quiet else sys.stdout, flush=True)
            shown = text
    return _last(cluster, name, obj)


def _follow_live(cluster: kube.Cluster, name: str, timeout: float | None) -> kube.Object:
    """The whole view, redrawn in place."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    obj: Any = None

    def now() -> Text:  # drawn every second, so that ages move
        return Text.from_ansi(view.rollout(obj, True)) if obj is not None else Text("")

    with Live(get_renderable=now, console=Console(), refresh_per_second=1, vertical_overflow="visible") as live:
        for changed in follow(cluster, name, timeout):
            obj = changed
            live.refresh()
    return _last(cluster, name, obj)


def _last(cluster: kube.Cluster, name: str, obj: kube.Object | None) -> kube.Object:
    """What was seen last; a time limit of nothing still deserves one look."""
    last = obj if obj is not None else cluster.get(name)
    if view.outcome(last)[0] == Exit.GOING:
        output.hint("time is up, it goes on")
    return last
