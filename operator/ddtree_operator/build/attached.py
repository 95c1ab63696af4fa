"""Statements about an image, in its registry: attached by the operator, read by ddtreectl."""

from __future__ import annotations

import json
from typing import Any

from . import attest
from .errors import RegistryError
from .reference import Reference, parse_reference
from .registry import RegistryClient


async def attach(registry: RegistryClient, image: str) -> bool:
    """Attach the statements that an image's labels allow; False for an image without a recipe. Done twice is done once.

    ``image`` is repo@sha256:… . Raises RegistryError.
    """
    reference = parse_reference(image)
    labels, size = await registry.labels(image), await registry.size(image)
    if labels is None or size is None:
        raise RegistryError(f"{image} is not in its registry", heals=False)
    subject = attest.Subject(reference.repository, reference.digest, size)
    blobs = [(str(s["predicateType"]), attest.encoded(s)) for s in attest.statements(subject, labels)]
    if not blobs:
        return False
    body = attest.manifest(subject, blobs)
    if any(entry.get("digest") == attest.digest_of(body) for entry in await registry.referrers(image)):
        return True
    for content in (attest.EMPTY, *(content for _, content in blobs)):
        await registry.put_blob(reference.repository, content)
    await registry.put_manifest(f"{reference.repository}@{attest.digest_of(body)}", body, attest.MANIFEST)
    if not await registry.keeps_referrers(image):
        tag = _tagged(reference)
        index = attest.referrers(await registry.document(tag), body)
        await registry.put_manifest(tag, index, attest.INDEX)
    return True


async def read(registry: RegistryClient, image: str) -> dict[str, dict[str, Any]]:
    """Predicate type → statement about an image (repo@sha256:…).

    Raises RegistryError for one about another image, and for one that says something else than the image's labels,
    which its digest covers: anybody who may push can attach one.
    """
    reference = parse_reference(image)
    labels: dict[str, str] | None = None
    found: dict[str, dict[str, Any]] = {}
    for entry in await registry.referrers(image):
        if entry.get("artifactType") != attest.MEDIA_TYPE:
            continue
        manifest = await registry.document(f"{reference.repository}@{entry['digest']}")
        for layer in (manifest or {}).get("layers") or []:
            content = await registry.blob(reference.repository, str(layer.get("digest")))
            statement = _parsed(content, reference)
            labels = labels if labels is not None else await registry.labels(image) or {}
            if not attest.agrees(statement, labels):
                raise RegistryError(
                    f"a statement attached to {reference} says something else than the image's own labels; "
                    "it was not made from them",
                    heals=False,
                )
            found[str(statement.get("predicateType"))] = statement
    return found


def _parsed(content: bytes | None, reference: Reference) -> dict[str, Any]:
    try:
        statement = json.loads(content or b"")
        about = {f"sha256:{subject['digest']['sha256']}" for subject in statement["subject"]}
    except (ValueError, KeyError, TypeError):
        raise RegistryError(
            f"a statement attached to {reference} is lost or no in-toto statement", heals=False
        ) from None
    if about != {reference.digest}:
        raise RegistryError(f"a statement attached to {reference} speaks of another image", heals=False)
    result: dict[str, Any] = statement
    return result


def _tagged(reference: Reference) -> str:
    """Where registries without a referrers API keep the list (OCI distribution 1.1)."""
    return f"{reference.repository}:{reference.digest.replace(':', '-')}"
