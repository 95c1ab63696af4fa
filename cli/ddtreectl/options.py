"""Options that every verb takes, so that they may stand anywhere on the line, as with kubectl."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, NamedTuple

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


class Where(NamedTuple):
    """Which cluster and namespace, as ``kube.connect`` takes it."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None


HERE = Where()


def _where(namespace: Namespace = None, kubeconfig: Kubeconfig = None, context: Context = None) -> None:
    """The options behind Where."""


def connected(verb: Callable[..., int]) -> Callable[..., int]:
    """Puts --namespace, --kubeconfig and --context in the place of a verb's parameter ``where``."""
    signature = inspect.signature(verb, eval_str=True)
    shared = inspect.signature(_where, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += shared.values() if name == "where" else [parameter]

    @wraps(verb)
    def run(**given: Any) -> int:
        where = Where(*(given.pop(name) for name in shared))
        return verb(**given, where=where)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    return run
