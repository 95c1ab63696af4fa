"""``nodes``: where engines fit, and why not elsewhere."""

from __future__ import annotations

import sys

from ddtree_operator.api.names import NODES_SHOWN
from ddtreectl import kube, options, output, view
from ddtreectl.exits import Exit


@options.connected
def nodes(
    name: options.Name,
    where: options.Where = options.HERE,
    form: options.ViewOutput = options.View.TABLE,
    no_color: options.NoColor = False,
) -> int:
    """Show which nodes fit this resource, and why the others do not, as the operator last saw them."""
    obj = kube.connect(*where).get(name)
    status = view.status_of(obj)
    found, pinned = status.get("nodes") or [], status.get("pinned") or []
    if form != options.View.TABLE:
        print(output.data({"nodes": found, "pinned": pinned}, form))
        return Exit.DONE
    if found:
        print(view.nodes(obj, output.colour(sys.stdout, no_color)))
    else:
        output.hint(f"the operator has not matched nodes for {name} yet", no_color)
    if len(found) >= NODES_SHOWN:
        output.hint(
            f"of a large cluster {NODES_SHOWN} nodes are shown: some that fit, and one for each reason", no_color
        )
    if pinned:
        print(f"pinned to: {', '.join(map(str, pinned))}")
    return Exit.DONE
