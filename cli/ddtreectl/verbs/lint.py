"""``lint``: find mistakes in files without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtreectl.exits import CliError, Exit

if TYPE_CHECKING:
    from yaml import SafeLoader


def lint(
    files: Annotated[
        list[str], typer.Option("--file", "-f", metavar="FILE", help="YAML or JSON; - for stdin. May be repeated.")
    ],
) -> int:
    """Check resources against the same rules as the operator, offline. Other kinds in the files are passed over."""
    from ddtree_operator.analysis.power import outlook
    from ddtree_operator.api.names import KIND
    from ddtree_operator.api.refusals import InvalidResourceError, check_resource

    bad = checked = 0
    for file in files:
        for number, document in enumerate(documents(file), start=1):
            if not ours(document):
                continue
            checked += 1
            metadata = document.get("metadata") or {}
            name = metadata.get("name") if isinstance(metadata, dict) else None
            where = f"{file}: {KIND} {name or f'(document {number})'}"
            try:
                analysis = check_resource(document).canary.analysis
                try:
                    problem = outlook(analysis).problem
                except ValueError as exc:
                    problem = f"spec.canary.analysis: {exc}"
                if problem:
                    raise InvalidResourceError([problem])
            except InvalidResourceError as exc:
                bad += 1
                for sentence in exc.sentences:
                    print(f"{where}: {sentence}")
            else:
                print(f"{where}: ok")
    if not checked:
        raise CliError(f"no {KIND} in {', '.join(files)}")
    return Exit.ERROR if bad else Exit.DONE


def ours(document: Any) -> bool:
    """Whether a document is, or means to be, a DDTreeDeployment."""
    from ddtree_operator.api.names import GROUP, KIND

    if not isinstance(document, dict):
        return False
    return document.get("kind") == KIND or str(document.get("apiVersion", "")).startswith(f"{GROUP}/")


def documents(file: str) -> list[Any]:
    """Documents of a file, those in Lists too. Raises CliError."""
    import yaml

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        found = [d for d in yaml.load_all(text, _loader()) if d is not None]
    except (OSError, UnicodeDecodeError) as exc:
        raise CliError(f"cannot read {file}: {getattr(exc, 'strerror', None) or exc}") from None
    except yaml.YAMLError as exc:
        raise CliError(f"{file} is not YAML: {' '.join(str(exc).split())}") from None
    flat: list[Any] = []
    for d in found:
        items = d.get("items") if isinstance(d, dict) and d.get("kind") == "List" else None
        flat += items if isinstance(items, list) else [d]
    return flat


def _loader() -> type[SafeLoader]:
    """Safe YAML in which a date is text, as it is for kubectl."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader
