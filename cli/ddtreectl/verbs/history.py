"""``rollout history``: what was tried and how it ended."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ddtreectl import kube, options, output, view
from ddtreectl.exits import CliError, Exit


@options.connected
def history(
    name: options.Name,
    revision: Annotated[
        str | None, typer.Argument(metavar="[REV]", help="Number or hash: everything about that one.")
    ] = None,
    where: options.Where = options.HERE,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """List past rollouts, newest last: result, measured acceptance, who and why. With REV: all that was done to it, and
    the alert that ended it.
    """
    obj = kube.connect(*where).get(name)
    entries = view.status_of(obj).get("history") or []
    if revision is not None:
        entry = view.find_entry(obj, revision)
        if entry is None:
            raise CliError(f"{name} has no revision {revision} in its history", Exit.NOT_FOUND)
        print(output.data(entry, form) if form != options.View.TABLE else view.history_entry(entry))
        return Exit.DONE
    if form != options.View.TABLE:
        print(output.data(entries, form))
    elif entries:
        print(view.history(obj, output.colour(sys.stdout, no_color)))
    else:
        output.hint(f"{name} has no history yet", no_color)
    return Exit.DONE
