"""Generates the CustomResourceDefinition from the pydantic models.

``python -m ddtree_operator.api.crd`` prints it as YAML; the copy under ``charts/`` is checked in and a test fails when
it is stale. The schema is structural: no references, no unions, unknown fields refused (by ``kubectl``'s strict
validation) or pruned (by the API server), and defaults filled in at every level.

The models' cross-field checks are repeated as CEL rules, in the same words, so that a bad resource is refused at the
door. Where the two can differ (a patch series is a string or an object), the operator's own validation has the last
word and shows in the condition Valid.
"""

from __future__ import annotations

import json
import sys
from itertools import combinations
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ddtree_operator.api import names
from ddtree_operator.api.refusals import PATTERN_WORDS
from ddtree_operator.api.spec import (
    STEP_KINDS,
    AnalysisSpec,
    BuildSpec,
    CanarySpec,
    DDTreeSpec,
    EngineSpec,
    PrometheusCheck,
    PromptsSpec,
    RollbackSpec,
    Speculative,
    Step,
)
from ddtree_operator.api.status import DDTreeStatus

Schema = dict[str, Any]

FREE_FORM = "x-kubernetes-preserve-unknown-fields"
RULES = "x-kubernetes-validations"

_NEEDS_DRAFTER = "['DDTREE', 'DFLASH', 'EAGLE3']"

_ONE_KIND = f"a step has exactly one of {', '.join(STEP_KINDS.values())}"


def _kinds_given() -> str:
    """CEL for the kinds that a step has. Spelled out: joining lists has no cost bound that the API server accepts."""
    kinds = list(STEP_KINDS.values())
    several = (c for size in range(len(kinds), 1, -1) for c in combinations(kinds, size))
    cases = [f"{' && '.join(f'has(self.{k})' for k in case)} ? '{' and '.join(case)}'" for case in several]
    return " : ".join([*cases, "'none'"])


# Model -> CEL rules of its object. ``self`` has its defaults by then, except while the CRD itself is
# checked: the API server holds the default ``{}`` of an object against its rules, hence ``has`` on defaulted fields.
# Messages are those of the model's validators.
CEL: dict[type[BaseModel], list[dict[str, str]]] = {
    DDTreeSpec: [
        {
            "rule": f"has(self.drafter) || !(self.engine.speculative.algorithm in {_NEEDS_DRAFTER})",
            "messageExpression": "self.engine.speculative.algorithm + ' needs a drafter; set spec.drafter.path'",
            "message": "this algorithm needs a drafter; set spec.drafter.path",
            "fieldPath": ".drafter",
        }
    ],
    EngineSpec: [
        {"rule": "!(has(self.image) && has(self.build))", "message": "image and build are both given; keep one"}
    ],
    Speculative: [
        {
            "rule": "!has(self.budget) || self.algorithm == 'DDTREE'",
            "messageExpression": "'budget is only for DDTREE, not ' + self.algorithm + '; remove it'",
            "message": "budget is only for DDTREE; remove it",
            "fieldPath": ".budget",
        },
        {
            "rule": "!has(self.draftBlock) || self.algorithm == 'DDTREE'",
            "messageExpression": "'draftBlock is only for DDTREE, not ' + self.algorithm + '; remove it'",
            "message": "draftBlock is only for DDTREE; remove it",
            "fieldPath": ".draftBlock",
        },
    ],
    Step: [
        {
            "rule": f"[{', '.join(f'has(self.{k})' for k in STEP_KINDS.values())}].exists_one(given, given)",
            "messageExpression": f"'{_ONE_KIND}; this one has ' + ({_kinds_given()})",
            "message": _ONE_KIND,
        }
    ],
    CanarySpec: [
        {
            "rule": "!has(self.steps) || self.steps.exists(step, has(step.analysis))",
            "message": "canary.steps has no analysis step; add {analysis: {}}",
            "fieldPath": ".steps",
        }
    ],
    BuildSpec: [
        {
            "rule": "!has(self.timeout) || self.timeout.matches('[1-9]')",
            "message": "timeout leaves no time for a build; write a time such as 30m",
        },
    ],
    RollbackSpec: [
        {
            "rule": "!has(self.progressDeadline) || self.progressDeadline.matches('[1-9]')",
            "message": "progressDeadline leaves no time for an engine to start; write a time such as 20m",
        },
    ],
    PromptsSpec: [
        {
            "rule": "has(self.configMapRef) || has(self.liveTraffic)",
            "message": "neither configMapRef nor liveTraffic is set; set one of them, or leave prompts out",
        },
    ],
    PrometheusCheck: [
        {
            "rule": "has(self.min) || has(self.max)",
            "message": "neither min nor max is set, so nothing can pass; set one of them",
        },
        {
            "rule": "!has(self.min) || !has(self.max) || self.min <= self.max",
            "message": "min is above max, so nothing can pass",
        },
    ],
    AnalysisSpec: [
        {
            "rule": "!has(self.prometheus) || "
            "self.prometheus.all(one, self.prometheus.exists_one(other, other.name == one.name))",
            "message": "prometheus has two checks of one name; rename one of them",
            "fieldPath": ".prometheus",
        },
        {
            "rule": "!has(self.deadline) || self.deadline.matches('[1-9]')",
            "message": "deadline leaves no time for a pair; write a time such as 30m",
        },
        {
            "rule": "!has(self.onInconclusive) || self.onInconclusive != 'promote' || "
            "has(self.onInconclusiveReason) && size(self.onInconclusiveReason) > 0",
            "message": "onInconclusive: promote needs onInconclusiveReason",
        },
        {
            "rule": "!has(self.maxPairs) || !has(self.minPairs) || self.maxPairs >= self.minPairs",
            "message": "maxPairs is below minPairs",
            "fieldPath": ".maxPairs",
        },
    ],
}

COLUMNS = [
    {"name": "Phase", "type": "string", "jsonPath": ".status.phase", "description": "Where the rollout stands."},
    {"name": "Stable", "type": "string", "jsonPath": ".status.stable.revision", "description": "Serving revision."},
    {"name": "Canary", "type": "string", "jsonPath": ".status.canary.revision", "description": "Judged revision."},
    {"name": "Step", "type": "string", "jsonPath": ".status.step", "description": "Step of the canary."},
    {"name": "Accept", "type": "string", "jsonPath": ".status.acceptLength", "description": "Accept length."},
    {
        "name": "Ready",
        "type": "integer",
        "jsonPath": ".status.readyReplicas",
        "priority": 1,
        "description": "Ready pods.",
    },
    {"name": "Message", "type": "string", "jsonPath": ".status.message", "priority": 1, "description": "What goes on."},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp", "description": "Age."},
]


class _WithFactoryDefaults(GenerateJsonSchema):
    """pydantic leaves defaults made by a factory out; a schema for an API server needs them."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        json_schema = super().default_schema(schema)
        factory = schema.get("default_factory")
        if factory is not None and not schema.get("default_factory_takes_data"):
            json_schema = {**json_schema, "default": _plain(factory())}  # type: ignore[call-arg]
        return json_schema


def _plain(value: Any) -> Any:
    """A default as JSON, without what the schema's own defaults add again: an untouched model is ``{}``."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _json_schema(model: type[BaseModel]) -> tuple[Schema, dict[str, Schema]]:
    top = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_WithFactoryDefaults)
    return top, top.pop("$defs", {})


# Keywords that mean the same on both sides.
_SAME = frozenset(
    {"type", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "minProperties"}
    | {"maxProperties", "required", "enum", "default", "description", "format"}
)


def structural(node: Schema, defs: dict[str, Schema]) -> Schema:
    """Rewrite a pydantic JSON schema as a Kubernetes structural one.

    ``node`` is a (sub)schema and ``defs`` its ``$defs``. Raises TypeError on a keyword with no counterpart, so that a
    model which cannot be said in a CRD is noticed when the CRD is made and not when a resource slips through.
    """
    node = dict(node)
    while "$ref" in node:  # words and default of the field stand before those of the type
        target = defs[node.pop("$ref").removeprefix("#/$defs/")]
        node = {**target, **node, **_both_words(node, target)}
    if "anyOf" in node:
        variants = [v for v in node.pop("anyOf") if v.get("type") != "null"]
        if len(variants) > 1:
            return _union(node, variants, defs)
        field_words = {k: v for k, v in node.items() if k != "title"}
        return structural({**variants[0], **field_words}, defs)

    title = node.pop("title", None)
    out: Schema = {}
    for key, value in node.items():
        match key, value:
            case "properties", dict():
                out["properties"] = {name: structural(sub, defs) for name, sub in value.items()}
            case "items", dict():
                out["items"] = structural(value, defs)
            case "additionalProperties", False:
                pass
            case "additionalProperties", True:
                # Free-form (podTemplate), or a status whose newer fields must survive.
                if node.get("maxProperties") != 0:
                    out[FREE_FORM] = True
            case "additionalProperties", dict():
                out["additionalProperties"] = structural(value, defs)
            case "const", _:
                out["enum"] = [value]
            case "default", None:
                pass
            case "pattern", str() if value in PATTERN_WORDS:  # a rule, because its message is for people
                out[RULES] = [{"rule": f"self.matches({json.dumps(value)})", "message": PATTERN_WORDS[value]}]
            case "description", str():
                out["description"] = " ".join(value.split())
            case _ if key in _SAME:
                out[key] = value
            case _:
                raise TypeError(f"{title or 'schema'}: {key} has no counterpart in a structural schema")
    rules = _RULES_BY_NAME.get(title or "")
    if rules and out.get("type") == "object":
        out[RULES] = rules
    return dict(sorted(out.items(), key=lambda kv: _ORDER.get(kv[0], 50)))


def _both_words(field: Schema, target: Schema) -> Schema:
    """What the field is for here, then what such an object is; `kubectl explain` shows one description only."""
    here, there = field.get("description"), target.get("description")
    if not here or not there or target.get("type") != "object" or there in here:
        return {}
    return {"description": there if here in there else f"{here} {there}"}


def _union(node: Schema, variants: list[Schema], defs: dict[str, Schema]) -> Schema:
    """A string or an object: not sayable in a structural schema, so it is left open and the operator checks it."""
    out: Schema = {FREE_FORM: True}
    for variant in (structural(v, defs) for v in variants):
        if "properties" in variant:
            out["properties"] = variant["properties"]
    out.update({k: v for k, v in node.items() if k in ("description", "default")})
    return dict(sorted(out.items(), key=lambda kv: _ORDER.get(kv[0], 50)))


_RULES_BY_NAME = {model.__name__: rules for model, rules in CEL.items()}
_ORDER = {k: i for i, k in enumerate(("description", "type", "enum", "default", "pattern", "required", RULES))} | {
    "properties": 99,
    "items": 99,
}


def _without_defaults(node: Any) -> Any:
    """A status has no defaults: what the API server filled in would differ from what the operator wrote, forever."""
    if isinstance(node, dict):
        return {k: _without_defaults(v) for k, v in node.items() if k != "default"}
    return [_without_defaults(x) for x in node] if isinstance(node, list) else node


def open_api_schema() -> Schema:
    """Return the schema of a whole DDTreeDeployment."""
    name = "self.metadata.name"
    return {
        "description": "A served model with a speculative drafter, rolled out behind a measured canary.",
        "type": "object",
        "required": ["spec"],
        RULES: [
            {
                "rule": f"size({name}) <= {names.NAME_MAX} && {name}.matches('{names.NAME_PATTERN}')",
                "message": names.NAME_RULE,
            }
        ],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {names.API_VERSION}."},
            "kind": {"type": "string", "description": f"Always {names.KIND}."},
            "metadata": {"type": "object"},
            "spec": structural(*_json_schema(DDTreeSpec)),
            "status": _without_defaults(structural(*_json_schema(DDTreeStatus))),
        },
    }


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition (apiextensions.k8s.io/v1) as a plain manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": COLUMNS,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": open_api_schema()},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_yaml() -> str:
    """Return the CRD as YAML with a line that says where it comes from."""
    head = "# Generated by `python -m ddtree_operator.api.crd` from operator/ddtree_operator/api; do not edit.\n"
    return head + yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())
