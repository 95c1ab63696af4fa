"""``build logs``: what the builder of a resource's image says."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated, TextIO

import typer

from ddtreectl import kube, options, output, view
from ddtreectl.exits import CliError, Exit
from ddtreectl.progress import Progress

POLL_SECONDS = 1.0


@options.connected
def logs(
    name: options.Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the build has ended, retries too.")] = False,
    where: options.Where = options.HERE,
    no_color: options.NoColor = False,
) -> int:
    """Show the log of the newest image build. With -f the exit code is the build's: 0 built, 1 failed."""
    cluster = kube.connect(*where)
    status = view.status_of(cluster.get(name))
    build = status.get("build") or {}
    jobs = [str(job["metadata"]["name"]) for job in cluster.builds(name)]
    wanted = str(build.get("job") or (jobs[-1] if jobs else ""))
    job, pods = cluster.job(wanted) if wanted else (None, [])
    if job is None:
        return _without_job(name, build.get("log") or [], no_color)
    if follow:
        return _follow(cluster, wanted, output.colour(sys.stderr, no_color))
    if not pods:
        output.hint(f"Job {wanted} has no pod yet; -f waits for it", no_color)
        return Exit.DONE
    for line in cluster.log(pods[-1]["metadata"]["name"], False):
        print(line)
    return Exit.DONE


def _without_job(name: str, kept: list[str], no_color: bool) -> int:
    if not kept:
        raise CliError(
            f"no build of {name} is known here: its image was given, was built before, or its Job has been cleaned up",
            Exit.NOT_FOUND,
        )
    output.hint("the Job is gone; these are the last lines, as the status keeps them", no_color)
    print("\n".join(kept))
    return Exit.DONE


def _follow(cluster: kube.Cluster, name: str, live: bool) -> int:
    """Print every pod's log as it comes, below it a line of progress; returns when the Job has ended."""
    from ddtree_operator.build import job_result

    shown: set[str] = set()
    line = _Line(sys.stderr if live else None)
    try:
        while True:
            job, pods = cluster.job(name)
            if job is None:
                raise CliError(f"Job {name} was deleted")
            fresh = [p for p in pods if p["metadata"]["name"] not in shown]
            if fresh and fresh[0].get("status", {}).get("phase") != "Pending":
                shown.add(fresh[0]["metadata"]["name"])
                _print(cluster, fresh[0]["metadata"]["name"], line)
                continue
            result = job_result(job, pods)
            if result.state == "running":
                line.show(f"waiting: {result.sentence or 'for the builder'}")
                time.sleep(POLL_SECONDS)
                continue
            line.clear()
            if result.state == "failed":
                raise CliError(result.sentence)
            output.hint(f"built {result.digest or 'and pushed'}", no_color=not live)
            return Exit.DONE
    finally:
        line.clear()


def _print(cluster: kube.Cluster, pod: str, line: _Line) -> None:
    progress, began = Progress(), time.monotonic()
    for text in cluster.log(pod, True):
        progress.feed(text)
        line.clear()
        print(text, flush=True)
        line.show(progress.text(time.monotonic() - began, line.width))


class _Line:
    """One line at the bottom of a terminal that is written over; nothing where there is no terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._there = False

    @property
    def width(self) -> int:
        """Columns there are."""
        return shutil.get_terminal_size().columns - 1

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._stream is not None:
            self._stream.write(f"\r\033[K\033[36m{text[: self.width]}\033[0m")
            self._stream.flush()
            self._there = True

    def clear(self) -> None:
        """Take the line away."""
        if self._stream is not None and self._there:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._there = False
