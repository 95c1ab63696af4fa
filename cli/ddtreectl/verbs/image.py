"""``image inspect``: what is inside an engine image, read from its registry; no cluster is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtreectl import options, output
from ddtreectl.exits import CliError, Exit

PROVENANCE, SBOM = "https://slsa.dev/provenance/v1", "https://spdx.dev/Document"  # predicate types


def inspect(
    ref: Annotated[str, typer.Argument(metavar="IMAGE", help="registry/path:tag or registry/path@sha256:…")],
    plain_http: Annotated[bool, typer.Option("--plain-http", help="Speak to the registry without TLS.")] = False,
    sbom: Annotated[bool, typer.Option("--sbom", help="Print the bill of materials (SPDX 2.3, JSON).")] = False,
    provenance: Annotated[bool, typer.Option("--provenance", help="Print the SLSA provenance (JSON).")] = False,
    form: options.ViewOutput = options.View.TABLE,
) -> int:
    """Show the recipe of an image that the operator built, what it needs of a node, and what is attested of it."""
    digest, labels, statements = _read(ref, plain_http)
    if sbom or provenance:
        kind = SBOM if sbom else PROVENANCE
        if kind not in statements:
            raise CliError(f"nothing of that kind is attached to {digest}", Exit.NOT_FOUND)
        print(output.data(statements[kind]["predicate"], "yaml" if form == options.View.YAML else "json"))
        return Exit.DONE
    found = {**describe(digest, labels), "attestations": statements}
    if form != options.View.TABLE:
        print(output.data(found, form))
        return Exit.DONE
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name.ljust(width)}  {text}".rstrip())
    return Exit.DONE


def describe(digest: str, labels: dict[str, str]) -> dict[str, Any]:
    """The labels of an engine image as data. Raises CliError when it carries no recipe."""
    try:
        recipe = json.loads(labels["ddtree.dev/recipe-json"])
        facts = json.loads(labels.get("ddtree.dev/facts") or "{}")
        return {
            "digest": digest,
            "recipe": labels["ddtree.dev/recipe-digest"],
            "device": recipe["device"],
            "platform": recipe["platform"],
            "base": recipe["base"],
            "sglang": recipe["sglang"],
            "plugins": recipe["plugins"],
            "kernels": recipe["kernels"],
            "series": recipe["series"],
            "builder": recipe["builder"],
            "facts": facts,
        }
    except (KeyError, ValueError, TypeError):
        raise CliError("the image carries no recipe: it was not built by the operator (or by an older one)") from None


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    facts, series = found["facts"], found["series"]
    patches = sorted(name for name in series["files"] if name != "series")
    rows = [
        ("digest", found["digest"]),
        ("recipe", f"r-{found['recipe'][:20]}"),
        ("device", f"{found['device']}, {found['platform']}"),
        ("base", found["base"]),
        ("sglang", _wheel(found["sglang"])),
        *(("plugin", _wheel(w)) for w in found["plugins"]),
        *(("kernels", _wheel(w)) for w in found["kernels"]),
        ("series", f"{series['name']}: {', '.join(patches) or 'no patches'}"),
        ("builder", f"{found['builder']['kind']} {found['builder']['version']}"),
    ]
    if facts.get("torch"):
        cuda = f", CUDA {facts['cuda']}" if facts.get("cuda") else ""
        rows.append(("torch", f"{facts['torch']}{cuda}, {facts.get('python', '')}"))
    if facts.get("arch"):
        rows.append(("GPUs", ", ".join(facts["arch"])))
    for name, arch in sorted((facts.get("kernels") or {}).items()):
        rows.append(("", f"{name}: {', '.join(arch)}"))
    rows.append(("attested", "; ".join(_attested(found["attestations"])) or "nothing"))
    return rows


def _attested(statements: dict[str, Any]) -> list[str]:
    out = []
    if PROVENANCE in statements:
        inputs = statements[PROVENANCE]["predicate"]["buildDefinition"]["resolvedDependencies"]
        out.append(f"provenance of {len(inputs)} inputs (--provenance)")
    if SBOM in statements:
        packages = statements[SBOM]["predicate"]["packages"]
        out.append(f"{len(packages) - 1} packages (--sbom)")  # the image itself is one of them
    return out


def _wheel(wheel: dict[str, str]) -> str:
    return f"{wheel['name']}  sha256:{wheel['sha256'][:12]}…"


def _read(ref: str, plain_http: bool) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Digest, labels, and statements by predicate type."""
    import asyncio

    from ddtree_operator.build import BuildError, RegistryClient, RegistryError, credentials_from_docker_config
    from ddtree_operator.build.attached import read as read_attached
    from ddtree_operator.build.reference import parse_reference

    async def ask() -> tuple[str | None, dict[str, str] | None, dict[str, Any]]:
        registry = parse_reference(ref).registry
        insecure = frozenset({registry} if plain_http or registry.partition(":")[0] == "127.0.0.1" else ())
        file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        known = credentials_from_docker_config(file.read_text()) if file.is_file() else None
        async with RegistryClient(insecure=insecure, credentials=known) as client:
            found, told = await client.resolve(ref), await client.labels(ref)
            repository = parse_reference(ref).repository
            return found, told, await read_attached(client, f"{repository}@{found}") if found else {}

    try:
        digest, labels, statements = asyncio.run(ask())
    except (BuildError, RegistryError) as error:
        hint = str(error).replace("add it to the operator's insecureRegistries", "try --plain-http")
        raise CliError(hint) from None
    if digest is None or labels is None:
        raise CliError(f"{ref} is not in its registry", Exit.NOT_FOUND)
    return digest, labels, statements
