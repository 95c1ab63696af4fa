"""Statements about images: every input with its hash, every package, and the same bytes each time."""

from __future__ import annotations

import json

import pytest

from ddtree_operator.build.attest import (
    MEDIA_TYPE,
    PROVENANCE,
    SBOM,
    Subject,
    digest_of,
    encoded,
    manifest,
    referrers,
    statements,
)
from ddtree_operator.build.context import LABEL_PACKAGES, LABEL_RECIPE_JSON, labels
from unit.test_build_recipe import KERNEL, PLUGINS, recipe

pytestmark = pytest.mark.unit

SUBJECT = Subject("registry.example/team/engine", "sha256:" + "1" * 64, 1234)
PACKAGES = {"pypi": {"ruamel-yaml": ["0.18.6", "MIT"], "torch": ["2.14.1+cu130"]}, "deb": {"libc6": "2.36-9+deb12u9"}}
LABELS = {**labels(recipe({"kernelWheels": [KERNEL]})), LABEL_PACKAGES: json.dumps(PACKAGES)}


def test_provenance_names_every_input_with_its_hash() -> None:
    made = next(s for s in statements(SUBJECT, LABELS) if s["predicateType"] == PROVENANCE)
    assert made["subject"] == [{"name": SUBJECT.repository, "digest": {"sha256": "1" * 64}}]
    definition = made["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["recipe"] == recipe({"kernelWheels": [KERNEL]}).content()
    inputs = {d["name"]: d["digest"]["sha256"] for d in definition["resolvedDependencies"]}
    assert inputs["base image"] == "a" * 64
    assert inputs["sglang_kernel-0.4.10-cp310-abi3-manylinux2014_x86_64.whl"] == "c" * 64
    assert set(PLUGINS) < set(inputs)
    assert "series sglang-0.5.23/0001-x.patch" in inputs
    assert all(len(digest) == 64 for digest in inputs.values())


def test_the_bill_of_materials_lists_every_package() -> None:
    made = next(s for s in statements(SUBJECT, LABELS) if s["predicateType"] == SBOM)["predicate"]
    locators = {p["externalRefs"][0]["referenceLocator"] for p in made["packages"] if "externalRefs" in p}
    assert locators == {
        "pkg:pypi/ruamel-yaml@0.18.6",
        "pkg:pypi/torch@2.14.1%2Bcu130",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9",
    }
    licences = {p["name"]: p["licenseDeclared"] for p in made["packages"]}
    assert (licences["ruamel-yaml"], licences["torch"]) == ("MIT", "NOASSERTION")
    ids = [p["SPDXID"] for p in made["packages"]]
    assert len(set(ids)) == len(ids)
    related = {r["relatedSpdxElement"] for r in made["relationships"]}
    assert related == set(ids)


def test_the_same_image_gives_the_same_bytes() -> None:
    one, two = ([encoded(s) for s in statements(SUBJECT, dict(order))] for order in (LABELS, reversed(LABELS.items())))
    assert one == two
    assert len(one) == 2


def test_an_image_without_a_recipe_gets_no_statement() -> None:
    for none_of_ours in (
        {},
        {LABEL_RECIPE_JSON: "{}"},
        {**LABELS, LABEL_RECIPE_JSON: "[1]"},
        {**LABELS, LABEL_PACKAGES: "1"},
    ):
        assert statements(SUBJECT, none_of_ours) == []
    assert [s["predicateType"] for s in statements(SUBJECT, labels(recipe()))] == [PROVENANCE]


def test_the_manifest_refers_to_the_image_and_the_index_keeps_others() -> None:
    body = manifest(SUBJECT, [(SBOM, b"x")])
    found = json.loads(body)
    assert found["subject"] == {"mediaType": found["mediaType"], "digest": SUBJECT.digest, "size": 1234}
    assert (found["artifactType"], found["layers"][0]["digest"]) == (MEDIA_TYPE, digest_of(b"x"))
    others = {"manifests": [{"digest": "sha256:other"}]}
    once = json.loads(referrers(others, body))
    assert [m["digest"] for m in once["manifests"]] == ["sha256:other", digest_of(body)]
    assert json.loads(referrers(once, body)) == once
