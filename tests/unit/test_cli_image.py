"""``image inspect`` without a registry: labels in, text out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_operator.build.attest import Subject, statements
from ddtree_operator.build.context import labels as image_labels
from ddtreectl import __main__
from ddtreectl.verbs import image
from unit.test_build_recipe import KERNEL, recipe

pytestmark = pytest.mark.unit

DIGEST = "sha256:" + "1" * 64
FACTS = {
    "torch": "2.14.1+cu130",
    "cuda": "13.0",
    "python": "cp311",
    "arch": ["sm_80", "sm_90"],
    "kernels": {"k": ["sm_90a"]},
}
SUBJECT = Subject("r.example/x", DIGEST, 1234)
PACKAGES = {"pypi": {"torch": ["2.14.1+cu130", "BSD-3-Clause"], "sglang": ["0.5.23"]}, "deb": {"libc6": "2.36-9"}}
STATEMENTS = {
    s["predicateType"]: s
    for s in statements(SUBJECT, {**image_labels(recipe()), "ddtree.dev/packages": json.dumps(PACKAGES)})
}


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    made = {**image_labels(recipe({"kernelWheels": [KERNEL]})), "ddtree.dev/facts": json.dumps(FACTS)}
    monkeypatch.setattr(image, "_read", lambda ref, plain: (DIGEST, made, STATEMENTS))
    return made


def test_the_table_names_every_input(labels: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["image", "inspect", "r.example/x:y"]) == 0
    out = capsys.readouterr().out
    for words in (
        DIGEST,
        f"r-{labels['ddtree.dev/recipe-digest'][:20]}",
        "sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",
        "sglang_ddtree-0.1.0-py3-none-any.whl",
        "sglang_kernel-0.4.10",
        "sglang-0.5.23: 0001-x.patch",
        "2.14.1+cu130, CUDA 13.0, cp311",
        "sm_80, sm_90",
        "k: sm_90a",
        "provenance of 6 inputs (--provenance); 3 packages (--sbom)",
    ):
        assert words in out


def test_json_is_the_whole_recipe(labels: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["image", "inspect", "r.example/x:y", "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["facts"] == FACTS
    assert found["kernels"] == json.loads(labels["ddtree.dev/recipe-json"])["kernels"]


def test_statements_are_printed_whole(labels: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["image", "inspect", "r.example/x:y", "--sbom"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {p["name"]: p["versionInfo"] for p in found["packages"]}["torch"] == "2.14.1+cu130"
    assert __main__.run(["image", "inspect", "r.example/x:y", "--provenance"]) == 0
    assert "buildDefinition" in json.loads(capsys.readouterr().out)


def test_an_image_without_statements_says_so(
    labels: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(image, "_read", lambda ref, plain: (DIGEST, labels, {}))
    assert __main__.run(["image", "inspect", "r.example/x:y"]) == 0
    assert "attested  nothing\n" in capsys.readouterr().out
    assert __main__.run(["image", "inspect", "r.example/x:y", "--sbom"]) == 4


def test_an_image_of_others_says_so(labels: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    labels.clear()
    assert __main__.run(["image", "inspect", "r.example/x:y"]) == 1
    assert "carries no recipe" in capsys.readouterr().err


def test_what_is_no_reference_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["image", "inspect", "engine"]) == 1
    assert capsys.readouterr().err.startswith("error: image 'engine' names no registry")
