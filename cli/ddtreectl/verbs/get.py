"""``get``: what there is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ddtreectl import kube, options, output, view
from ddtreectl.complete import names
from ddtreectl.exits import Exit


@options.connected
def get(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them.", autocompletion=names)] = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="In every namespace.")] = False,
    where: options.Where = options.HERE,
    form: options.Output = options.Format.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """List DDTreeDeployments, or show one."""
    cluster = kube.connect(*where)
    found = [cluster.get(name)] if name else cluster.all(everywhere)
    match form:
        case "json" | "yaml":
            whole = found[0] if name else {"apiVersion": "v1", "kind": "List", "items": found}
            print(output.data(whole, form))
        case "name":
            for obj in found:
                print(f"ddtreedeployment.ddtree.dev/{obj['metadata']['name']}")
        case _:
            if not found:
                place = "any namespace" if everywhere else f"namespace {cluster.namespace}"
                output.hint(f"no DDTreeDeployment in {place}", no_color)
                return Exit.DONE
            color = output.colour(sys.stdout, no_color)
            print(view.listing(found, everywhere and not name, form == options.Format.WIDE, color))
    return Exit.DONE
