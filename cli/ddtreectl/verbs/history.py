"""``rollout history``: what was tried and how it ended."""

from __future__ import annotations

import sys

from ddtreectl import kube, options, output, view
from ddtreectl.exits import Exit


def history(
    name: options.Name,
    namespace: options.Namespace = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """List past rollouts, newest last: result, measured acceptance, who and why."""
    obj = kube.connect(namespace, kubeconfig, context).get(name)
    entries = view.status_of(obj).get("history") or []
    if form != options.View.TABLE:
        print(output.data(entries, form))
    elif entries:
        print(view.history(obj, output.colour(sys.stdout, no_color)))
    else:
        output.hint(f"{name} has no history yet", no_color)
    return Exit.DONE
