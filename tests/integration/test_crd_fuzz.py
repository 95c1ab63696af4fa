"""The API server and the operator agree on what a good spec is: random specs, most of them wrong somewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from ddtree_operator.api import names
from ddtree_operator.api.crd import open_api_schema
from ddtree_operator.api.refusals import InvalidResourceError, parse_spec
from integration.ddt_api import Api, open_api

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CASES = 250
SCHEMA = open_api_schema()["properties"]["spec"]
TEXTS = ["", "x", "30m", "1h30m", "m", "90", "3%", "+10%", "10", "2ulp", "0.01", "a" * 64, "r/i@sha256:" + "a" * 64]
ODD: list[Any] = [None, "", -1, 10**6, 2.5, True, [], {}, "text", {"unknown": 1}, [None]]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with open_api("fuzz") as found:
        yield found


class Maker:
    """Random values of a structural schema; with a chance of ``odd`` per value, one that does not belong there."""

    def __init__(self, seed: int, odd: float) -> None:
        self._random = random.Random(seed)
        self._odd = odd

    def value(self, node: dict[str, Any]) -> Any:
        pick = self._random
        if "type" not in node:  # the patch series, a string or an object: only the operator tells them from the rest
            return "sglang-0.5.23"
        if pick.random() < self._odd:
            return pick.choice(ODD)
        if "enum" in node:
            return pick.choice(node["enum"])
        match node["type"]:
            case "object":
                return self._object(node)
            case "array":
                return [self.value(node["items"]) for _ in range(pick.randint(0, 3))]
            case "integer":
                low, high = node.get("minimum", 0), node.get("maximum", 1000)
                off = pick.random() < self._odd
                return pick.choice([low - 1, high + 1]) if off else pick.choice([low, high, pick.randint(low, high)])
            case "number":
                return pick.choice([0, 0.5, -3])
            case "boolean":
                return pick.random() < 0.5
            case _:
                return self._text(node)

    def _object(self, node: dict[str, Any]) -> dict[str, Any]:
        pick = self._random
        out = {}
        for name, sub in node.get("properties", {}).items():
            chance = 0.95 if name in node.get("required", []) else 0.4
            if pick.random() < chance:
                out[name] = self.value(sub)
        if pick.random() < self._odd:
            out["unknownField"] = 1
        return out

    def _text(self, node: dict[str, Any]) -> str:
        """Mostly one that the field's rule takes."""
        rules = str(node)
        fitting = [
            (words, text)
            for words, text in {
                "duration": "1h30m",
                "percentage": "2.5%",
                "a gain": "+10%",
                "64 lower-case": "a" * 64,
                "image by digest": "r/i@sha256:" + "a" * 64,
                "bf16 ulps": "2ulp",
            }.items()
            if words in rules
        ]
        if fitting and self._random.random() > self._odd:
            return fitting[0][1]
        return self._random.choice(TEXTS if self._odd else ["text"])


def spec(seed: int) -> dict[str, Any]:
    """A spec that has a chance: model and drafter are mostly there, and steps mostly have one field each."""
    maker = Maker(seed, odd=(seed % 4) * 0.02)
    out: dict[str, Any] = maker._object(SCHEMA)
    if seed % 5:
        out["model"], out["drafter"] = {"path": "/m"}, {"path": "/d"}
    canary = out.get("canary")
    if seed % 3 and isinstance(canary, dict):
        canary["steps"] = [{"weight": seed % 100}, {"analysis": {}}]
    engine = out.get("engine")
    if seed % 3 and isinstance(engine, dict):
        engine.pop("image", None)
        engine["speculative"] = {"algorithm": "DDTREE", "budget": seed % 255 + 1}
    return out


def test_the_api_server_and_the_operator_agree(api: Api) -> None:
    specs = [spec(seed) for seed in range(CASES)]
    ours = [refusal(s) for s in specs]
    theirs = server_refusals(api, specs)
    taken = sum(not r for r in theirs)
    assert CASES // 10 < taken < CASES * 9 // 10, f"{taken} of {CASES} were good: such a test says little"
    named = "operator {}; server {}"
    differ = [
        f"seed {seed}: {named.format(ours[seed] or 'accepts', theirs[seed] or 'accepts')}\n{json.dumps(specs[seed])}"
        for seed in range(CASES)
        if bool(ours[seed]) != bool(theirs[seed])
    ]
    assert not differ, f"{len(differ)} of {CASES} differ; the first:\n" + "\n\n".join(differ[:3])


def refusal(s: dict[str, Any]) -> str:
    try:
        parse_spec(s)
    except InvalidResourceError as exc:
        return str(exc)
    return ""


def server_refusals(api: Api, specs: list[dict[str, Any]]) -> list[str]:
    """What the API server says of each spec, "" where it would take it. One connection for all."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(config_file=api.env["KUBECONFIG"], client_configuration=settings)
    out = []
    with client.ApiClient(settings) as connection:
        objects = client.CustomObjectsApi(connection)
        for number, s in enumerate(specs):
            body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": f"f{number}"}, "spec": s}
            try:
                objects.create_namespaced_custom_object(
                    names.GROUP, names.VERSION, api.namespace, names.PLURAL, body, dry_run="All",
                    field_validation="Strict",
                )  # fmt: skip
                out.append("")
            except client.ApiException as exc:
                out.append(str(yaml.safe_load(exc.body)["message"]))
    return out
