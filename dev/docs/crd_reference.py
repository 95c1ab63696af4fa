"""Writes the tables of docs/reference/crd.md from the CRD's schema, between its two markers.

usage: python dev/docs/crd_reference.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddtree_operator.api.crd import FREE_FORM, RULES, open_api_schema

PAGE = Path(__file__).parents[2] / "docs/reference/crd.md"
BEGIN, END = "<!-- generated: make crd -->", "<!-- end of generated part -->"


def kind(node: dict[str, Any]) -> str:
    """Type of a field in a word or two."""
    if "enum" in node:
        return " \\| ".join(f"`{v}`" for v in node["enum"])
    if node.get("type") == "array":
        return f"list of {kind(node['items'])}"
    if node.get("type") == "object" and "additionalProperties" in node:
        return "map of strings"
    if "type" not in node:
        return "string or object"
    return "free-form object" if node.get(FREE_FORM) and "properties" not in node else str(node["type"])


def bounds(node: dict[str, Any]) -> str:
    """Limits of a value, and the rules that hold for it."""
    said = []
    if "minimum" in node or "maximum" in node:
        said.append(f"{node.get('minimum', '')} to {node.get('maximum', '')}")
    if "maxItems" in node:
        said.append(f"at most {node['maxItems']}")
    said += [rule["message"] for rule in node.get(RULES, [])]
    return "; ".join(said)


def default(node: dict[str, Any]) -> str:
    """Default as it would be written, nothing for empty ones."""
    value = node.get("default")
    if value in (None, {}, []):
        return ""
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def rows(node: dict[str, Any], path: str) -> Iterator[str]:
    """A table row per field, objects before their fields."""
    for name, sub in node.get("properties", {}).items():
        here = f"{path}{name}"
        must = "required" if name in node.get("required", []) else default(sub)
        words = sub.get("description", "")
        limits = bounds(sub)
        limits = f" ({limits})" if limits else ""
        yield f"| `{here}` | {kind(sub)} | {must} | {words}{limits} |"
        yield from rows(sub, f"{here}.")
        if "items" in sub:
            yield from rows(sub["items"], f"{here}[].")


def tables() -> str:
    """Spec and status as Markdown."""
    properties = open_api_schema()["properties"]
    parts = []
    for part in ("spec", "status"):
        parts += [f"## {part}", "", properties[part]["description"], ""]
        parts += ["| field | type | default | meaning |", "|---|---|---|---|", *rows(properties[part], ""), ""]
    return "\n".join(parts)


def page(text: str) -> str:
    """The page with its generated part renewed."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    old = PAGE.read_text()
    new = page(old)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if old == new else f"{PAGE.name} is stale: run `make crd`")
    PAGE.write_text(new)
