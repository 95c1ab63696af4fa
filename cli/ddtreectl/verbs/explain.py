"""``explain``: why a revision was promoted or rolled back."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ddtreectl import kube, options, output, view
from ddtreectl.exits import CliError, Exit


def explain(
    name: options.Name,
    revision: Annotated[str | None, typer.Argument(metavar="[REV]", help="Number or hash; else the newest.")] = None,
    namespace: options.Namespace = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """Show the verdict on a revision."""
    cluster = kube.connect(namespace, kubeconfig, context)
    obj = cluster.get(name)
    status = view.status_of(obj)
    entry = view.find_entry(obj, revision)
    if entry is None and revision is not None:
        known = ", ".join(f"{e.get('number')} ({e.get('revision')})" for e in status.get("history") or []) or "none"
        raise CliError(f"no revision {revision} in the history of {name}; there are: {known}", Exit.NOT_FOUND)
    if entry is None:
        output.hint(f"{name} has no history yet", no_color)
        return Exit.DONE
    current = entry.get("revision") == status.get("revision")
    verdict: dict[str, Any] = (status.get("analysis") or {}) if current else {}
    if form != options.View.TABLE:
        print(output.data({"revision": entry, "analysis": verdict}, form))
        return Exit.DONE
    color = output.colour(sys.stdout, no_color)
    print(_story(entry, color))
    if verdict:
        print()
        print(view.analysis(verdict, color))
    return Exit.DONE


def _story(entry: dict[str, Any], color: bool) -> str:
    result = entry.get("result") or "inProgress"
    shown = output.paint(result, view.RESULT_STYLES.get(result, ""), color)
    by = f" by {entry['by']}" if entry.get("by") else ""
    lines = [f"revision {entry.get('number')} ({entry.get('revision')}): {shown}{by}"]
    lines += [f"  at        {entry['at']}"] if entry.get("at") else []
    lines += [f"  because   {entry['reason']}"] if entry.get("reason") else []
    lines += [f"  ran       {entry['algorithm']}"] if entry.get("algorithm") else []
    lines += [f"  image     {entry['image']}"] if entry.get("image") else []
    numbers = [f"accept length {entry['acceptLength']}"] if entry.get("acceptLength") else []
    numbers += [f"{entry['throughput']} tok/s"] if entry.get("throughput") else []
    lines += [f"  measured  {', '.join(numbers)}"] if numbers else []
    return "\n".join(lines)
