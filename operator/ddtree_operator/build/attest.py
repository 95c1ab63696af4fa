"""Statements about a built image: how it was made (SLSA provenance), what is in it (SPDX bill of materials). Pure.

Made from the image's own labels, without any time: whoever makes them again gets the same bytes. They are not signed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from .context import LABEL_PACKAGES, LABEL_RECIPE_JSON

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
SBOM = "https://spdx.dev/Document"
MEDIA_TYPE = "application/vnd.in-toto+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
PREDICATE = "in-toto.io/predicate-type"
LONG_AGO = "1980-01-01T00:00:00Z"  # as SOURCE_DATE_EPOCH: the same each time

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """The image that is spoken of: repository, digest (sha256:…) and size of its manifest in bytes."""

    repository: str
    digest: str
    size: int


def statements(subject: Subject, labels: Mapping[str, str]) -> list[Json]:
    """Provenance, and the bill of materials where the labels list packages; [] for an image without a recipe."""
    try:
        out = [_statement(subject, PROVENANCE, provenance(json.loads(labels[LABEL_RECIPE_JSON])))]
        packages = json.loads(labels.get(LABEL_PACKAGES) or "null")
        if packages is not None:
            out.append(_statement(subject, SBOM, sbom(subject, packages)))
    except (KeyError, ValueError, TypeError, AttributeError):
        return []  # labels that are none of ours
    return out


def _statement(subject: Subject, kind: str, predicate: Json) -> Json:
    about = {"name": subject.repository, "digest": {"sha256": subject.digest.removeprefix("sha256:")}}
    return {"_type": STATEMENT, "subject": [about], "predicateType": kind, "predicate": predicate}


def agrees(statement: Json, labels: Mapping[str, str]) -> bool:
    """Whether a statement of ours says what the image's labels say: its recipe, its packages. True for other kinds."""
    try:
        predicate: Any = statement.get("predicate")
        if statement.get("predicateType") == PROVENANCE:
            given = json.loads(labels[LABEL_RECIPE_JSON])
            told = predicate["buildDefinition"]["externalParameters"]["recipe"]
            return bool(told == given)
        if statement.get("predicateType") == SBOM:
            packages = json.loads(labels[LABEL_PACKAGES])
            listed = {(n, v[0]) for n, v in packages.get("pypi", {}).items()} | set(packages.get("deb", {}).items())
            found = {(p["name"], p["versionInfo"]) for p in predicate["packages"]}
            return {package for package in found if not package[1].startswith("sha256:")} == listed
    except (KeyError, ValueError, TypeError, AttributeError, IndexError):
        return False
    return True


def provenance(recipe: Json) -> Json:
    """SLSA provenance of a recipe (see Recipe.content): every input with its hash."""
    inputs = [{"name": "base image", "digest": _sha256(recipe["base"])}]
    inputs += [
        {"name": wheel["name"], "digest": _sha256(wheel["sha256"])}
        for wheel in (recipe["sglang"], *recipe["plugins"], *recipe["kernels"])
    ]
    series = recipe["series"]
    inputs += [
        {"name": f"series {series['name']}/{name}", "digest": _sha256(digest)}
        for name, digest in sorted(series["files"].items())
    ]
    builder = recipe["builder"]
    return {
        "buildDefinition": {
            "buildType": f"https://ddtree.dev/build/template-{recipe['template']}",
            "externalParameters": {"recipe": recipe},
            "resolvedDependencies": inputs,
        },
        "runDetails": {
            "builder": {"id": f"https://ddtree.dev/builder/{builder['kind']}", "version": {"it": builder["version"]}}
        },
    }


def _sha256(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def sbom(subject: Subject, packages: Mapping[str, Any]) -> Json:
    """SPDX 2.3 document; ``packages`` as files/facts.py writes: {"pypi": {name: [version, licence?]}, "deb": …}."""
    image = {
        "SPDXID": "SPDXRef-image",
        "name": subject.repository,
        "versionInfo": subject.digest,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": "NOASSERTION",
    }
    listed = [_package("pypi", name, *found) for name, found in sorted(packages.get("pypi", {}).items())]
    listed += [_package("deb", name, version) for name, version in sorted(packages.get("deb", {}).items())]
    related = [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image")]
    related += [("SPDXRef-image", "CONTAINS", str(package["SPDXID"])) for package in listed]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{subject.repository}@{subject.digest}",
        "documentNamespace": f"https://ddtree.dev/spdx/{subject.digest.removeprefix('sha256:')}",
        "creationInfo": {"created": LONG_AGO, "creators": ["Tool: ddtree-operator"]},
        "packages": [image, *listed],
        "relationships": [
            {"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b} for a, kind, b in related
        ],
    }


def _package(kind: str, name: str, version: str = "", licence: str = "NOASSERTION") -> Json:
    where = "deb/debian/" if kind == "deb" else "pypi/"
    return {
        "SPDXID": f"SPDXRef-{kind}-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": licence,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:{where}{quote(name, safe='')}@{quote(version, safe='')}",
            }
        ],
    }


def encoded(value: Json) -> bytes:
    """The bytes of a JSON document: always the same."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def manifest(subject: Subject, blobs: list[tuple[str, bytes]]) -> bytes:
    """OCI manifest that attaches statements, (predicate type, bytes) each, to an image."""
    return encoded(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": MEDIA_TYPE,
            "config": {"mediaType": EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY)},
            "layers": [
                {
                    "mediaType": MEDIA_TYPE,
                    "digest": digest_of(content),
                    "size": len(content),
                    "annotations": {PREDICATE: kind},
                }
                for kind, content in blobs
            ],
            "subject": {"mediaType": MANIFEST, "digest": subject.digest, "size": subject.size},
        }
    )


def referrers(known: Json | None, attached: bytes) -> bytes:
    """Index of what refers to an image, with one manifest more: for registries that keep none by themselves."""
    entry = {"mediaType": MANIFEST, "digest": digest_of(attached), "size": len(attached), "artifactType": MEDIA_TYPE}
    others = [m for m in (known or {}).get("manifests") or [] if m.get("digest") != entry["digest"]]
    return encoded({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*others, entry]})


def digest_of(content: bytes) -> str:
    """sha256:…"""
    return "sha256:" + hashlib.sha256(content).hexdigest()
