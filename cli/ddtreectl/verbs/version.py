"""``version``: of this command, of the API that the cluster serves, and of Kubernetes."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_operator import __version__
from ddtree_operator.api.names import API_VERSION, GROUP
from ddtreectl import kube, options, output
from ddtreectl.exits import Exit


def version(
    client: Annotated[bool, typer.Option("--client", help="Only this command's version; asks no cluster.")] = False,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    form: options.ViewOutput = options.View.TABLE,
) -> int:
    """Show versions."""
    found: dict[str, object] = {"client": __version__, "speaks": API_VERSION}
    if not client:
        found |= kube.connect(None, kubeconfig, context).versions()
    if form != options.View.TABLE:
        print(output.data(found, form))
        return Exit.DONE
    print(f"ddtreectl {__version__} ({API_VERSION})")
    if not client:
        served = found["api"]
        assert isinstance(served, list)
        print(f"cluster: Kubernetes {found['kubernetes']}, {', '.join(served) or f'{GROUP} is not installed'}")
        if served and API_VERSION not in served:
            output.hint(
                f"the cluster does not serve {API_VERSION}: this command and the chart are of different versions"
            )
    return Exit.DONE
