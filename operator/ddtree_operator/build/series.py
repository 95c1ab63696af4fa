"""Patch series and plugin wheels: where they come from, and whether they are whole."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BuildError

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SERIES_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,100}")
MAX_PATCH_FILES = 200


def patch_names(series: str) -> list[str]:
    """File names of a ``series`` file in order; blank lines and ``#`` comments do not count."""
    lines = (line.split("#", 1)[0].strip() for line in series.splitlines())
    return [line for line in lines if line]


def check_series(files: Mapping[str, bytes], *, where: str) -> tuple[tuple[str, str], ...]:
    """Check that a series is whole and return its used files, sorted by name, as (name, text).

    Files that the series does not name are left out, so that a README beside the patches changes no digest.
    Raises BuildError with one sentence that starts with ``where``.
    """
    texts: dict[str, str] = {}
    if "series" not in files:
        raise BuildError(f"{where} has no file 'series' (one patch file name a line); add it, empty for no patches")
    texts["series"] = _text(files["series"], f"{where}: file 'series'")
    names = patch_names(texts["series"])
    if len(names) > MAX_PATCH_FILES:
        raise BuildError(f"{where} names {len(names)} patches; at most {MAX_PATCH_FILES} are taken")
    for name in names:
        if not _FILE.fullmatch(name) or name == "series":
            raise BuildError(f"{where} names {name!r}, which is not a plain file name (letters, digits, . _ -)")
        if names.count(name) > 1:
            raise BuildError(f"{where} names {name} twice; keep one line")
        if name not in files:
            others = ", ".join(sorted(set(files) - {"series"})) or "none"
            raise BuildError(f"{where} names {name}, which is missing (files there: {others[:300]})")
        texts[name] = _text(files[name], f"{where}: patch {name}")
        if not re.search(r"^--- .+\n\+\+\+ ", texts[name], re.M):
            raise BuildError(f"{where}: {name} is not a unified diff (no '---'/'+++' lines); make it with git diff")
    return tuple(sorted(texts.items()))


def series_from_config_map(config_map: Mapping[str, Any]) -> dict[str, bytes]:
    """File name → content of a ConfigMap object (``data`` and ``binaryData``)."""
    files = {str(k): str(v).encode() for k, v in (config_map.get("data") or {}).items()}
    for key, value in (config_map.get("binaryData") or {}).items():
        try:
            files[str(key)] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise BuildError(f"the ConfigMap's binaryData {key!r} is not base64") from None
    return files


def known_series(artefacts: str) -> list[str]:
    """Names of the series shipped with the operator, sorted."""
    folder = Path(artefacts) / "series"
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if (p / "series").is_file())


def load_series(name: str, artefacts: str) -> dict[str, bytes]:
    """Files of a shipped series by name. Raises BuildError listing the known ones."""
    known = known_series(artefacts)
    if not _SERIES_NAME.fullmatch(name) or name not in known:
        raise BuildError(f"spec.engine.build.series {name!r} is not known (known: {', '.join(known) or 'none'})")
    folder = Path(artefacts) / "series" / name
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def load_plugins(artefacts: str) -> dict[str, bytes]:
    """Wheel file name → content of the wheels shipped with the operator."""
    folder = Path(artefacts) / "wheels"
    if not folder.is_dir():
        return {}
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.whl"))}


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BuildError(f"{where} is not UTF-8 text") from None
