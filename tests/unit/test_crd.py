"""The CRD: generated, current, structural, and saying what the models say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from ddtree_operator.api import crd, names
from ddtree_operator.api.spec import DDTreeSpec

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
CHECKED_IN = ROOT / "charts/ddtree-operator/crds/ddtreedeployments.yaml"
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))


def schema() -> dict[str, Any]:
    return crd.open_api_schema()


def walk(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, sub in node.get("properties", {}).items():
        yield from walk(sub, f"{path}.{name}")
    if "items" in node:
        yield from walk(node["items"], path + "[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(node["additionalProperties"], path + "{}")


def at(path: str) -> dict[str, Any]:
    return dict(walk(schema()))[path]


def test_the_checked_in_crd_is_current() -> None:
    assert CHECKED_IN.read_text() == crd.crd_yaml(), (
        "stale: run `make crd` (python -m ddtree_operator.api.crd > charts/ddtree-operator/crds/ddtreedeployments.yaml)"
    )


def test_the_reference_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "dev/docs/crd_reference.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_schema_is_structural() -> None:
    for path, node in walk(schema()):
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "const"} & node.keys(), path
        assert "type" in node or node.get(crd.FREE_FORM), path


def test_every_field_is_explained() -> None:
    silent = [p for p, n in walk(schema()["properties"]["spec"], ".spec") if p.count(".") and "description" not in n]
    assert [p for p in silent if not p.endswith(("[]", "{}"))] == []


def test_it_is_small_enough_for_client_side_apply() -> None:
    assert len(crd.crd_yaml()) < 200_000  # kubectl keeps a copy in an annotation of at most 262144 bytes


def fill(node: dict[str, Any], value: Any) -> Any:
    """What the API server does with defaults."""
    if isinstance(value, dict):
        for name, sub in node.get("properties", {}).items():
            if name not in value and "default" in sub:
                value[name] = yaml.safe_load(yaml.safe_dump(sub["default"]))
            if name in value:
                value[name] = fill(sub, value[name])
    elif isinstance(value, list):
        value = [fill(node.get("items", {}), v) for v in value]
    return value


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_defaults_filled_by_the_api_server_are_the_models_own(path: Path) -> None:
    given = yaml.safe_load(path.read_text())["spec"]
    ours = DDTreeSpec.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)
    filled = fill(schema()["properties"]["spec"], given)
    jsonschema.validate(filled, schema()["properties"]["spec"])
    assert DDTreeSpec.model_validate(filled).model_dump(mode="json", by_alias=True, exclude_none=True) == ours
    assert filled == ours


def test_the_minimal_example_is_short() -> None:
    lines = (ROOT / "docs/examples/minimal.yaml").read_text().split("\nspec:\n")[1].strip().splitlines()
    assert len(lines) <= 12


def test_free_form_parts_keep_their_fields() -> None:
    assert at(".spec.engine.podTemplate")[crd.FREE_FORM] is True
    assert at(".spec.placement.tolerations[]")[crd.FREE_FORM] is True
    assert crd.FREE_FORM not in at(".spec.engine")
    assert at(".status")[crd.FREE_FORM] is True
    assert crd.FREE_FORM not in at(".spec.canary.steps[].analysis")


def test_series_is_a_name_or_a_config_map() -> None:
    series = at(".spec.engine.build.series")
    assert series["default"] == "sglang-0.5.23"
    assert "configMapRef" in series["properties"]


def test_every_model_validator_has_a_rule_in_its_words() -> None:
    rules = {rule["message"] for _, node in walk(schema()) for rule in node.get(crd.RULES, [])}
    assert {r["message"] for model_rules in crd.CEL.values() for r in model_rules} <= rules
    validated = {
        cls
        for cls in _models(DDTreeSpec)
        if getattr(cls, "__pydantic_decorators__").model_validators  # noqa: B009
    }
    assert validated == set(crd.CEL)


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    from typing import get_args

    found = {model}

    def look(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.update(_models(annotation))
        for arg in get_args(annotation):
            look(arg)

    for field in model.model_fields.values():
        look(field.annotation)
    return found


def test_columns_and_subresources() -> None:
    version = crd.crd()["spec"]["versions"][0]
    shown = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert shown == ["Phase", "Stable", "Canary", "Step", "Accept", "Age"]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    assert crd.crd()["spec"]["names"]["shortNames"] == [names.SHORT]


def test_a_model_that_a_crd_cannot_express_is_noticed() -> None:
    class Odd(BaseModel):
        n: int = Field(multiple_of=3)

    with pytest.raises(TypeError, match="multipleOf has no counterpart"):
        crd.structural(*crd._json_schema(Odd))
