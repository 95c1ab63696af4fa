"""Options that every verb takes, so that they may stand anywhere on the line, as with kubectl."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ddtreectl.complete import names


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


class View(StrEnum):
    """Output formats of verbs that show a view of one resource."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a DDTreeDeployment.", autocompletion=names)]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Namespace; else the context's.")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Else $KUBECONFIG, else ~/.kube/config.")
]
Context = Annotated[str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text (also with NO_COLOR, and when piped).")]
Output = Annotated[Format, typer.Option("--output", "-o", help="Form of the output.")]
ViewOutput = Annotated[View, typer.Option("--output", "-o", help="Form of the output.")]
