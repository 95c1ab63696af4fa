"""Says what is wrong with a resource in sentences that name the field and what it takes.

The operator (condition Valid), ``ddtreectl lint`` and the CRD's rules use the same words, so that a mistake reads the
same wherever it is caught.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ddtree_operator.api import names
from ddtree_operator.api.spec import (
    ADDRESS,
    DIGEST_REF,
    DURATION,
    GAIN,
    HEADER,
    PERCENT,
    SHA256,
    TIE_GAP,
    Algorithm,
    DDTreeSpec,
)

# What a pattern means, for people.
PATTERN_WORDS = {
    DURATION: "must be a duration such as 30m, 90s or 1h30m",
    PERCENT: "must be a percentage such as 3%",
    GAIN: "must be a gain such as +10%",
    SHA256: "must be a SHA-256 of 64 lower-case hex digits",
    DIGEST_REF: "must be an image by digest (repository@sha256:<64 hex digits>), because a tag can change",
    HEADER: "must be the name of an HTTP header",
    ADDRESS: "must be an address: http(s)://…, pvc://claim/folder, configmap://name or oci://repository:tag",
    TIE_GAP: "must be a gap in bf16 ulps such as 2ulp, or in log-prob such as 0.01",
}

_KINDS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


class InvalidResourceError(ValueError):
    """A resource that cannot be acted on. ``sentences`` holds one sentence per mistake, each led by its field."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = tuple(sentences)


def parse_spec(spec: Any) -> DDTreeSpec:
    """Return the spec of a resource with defaults filled in. Raises InvalidResourceError.

    As strict as the API server: names are camelCase, ``"2"`` is not a number, and null means left out.
    """
    if not isinstance(spec, Mapping):
        raise InvalidResourceError(["spec: must be an object"])
    given = _without_nulls(dict(spec))
    try:
        return DDTreeSpec.model_validate_json(json.dumps(given), strict=True, by_alias=True, by_name=False)
    except ValidationError as exc:
        raise InvalidResourceError(sentences(exc, given)) from None


def check_resource(resource: Any) -> DDTreeSpec:
    """Validate a whole resource as read from a file. Raises InvalidResourceError, with every mistake it has."""
    if not isinstance(resource, Mapping):
        raise InvalidResourceError(["this is not a Kubernetes object"])
    found: list[str] = []
    if resource.get("apiVersion") != names.API_VERSION or resource.get("kind") != names.KIND:
        raise InvalidResourceError(
            [f"expected {names.API_VERSION} {names.KIND}, not {resource.get('apiVersion')} {resource.get('kind')}"]
        )
    metadata = resource.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name_fits(name):
        found.append(f"metadata.name: {names.NAME_RULE}" if name else "metadata.name: is required")
    for key in resource.keys() - {"apiVersion", "kind", "metadata", "spec", "status"}:
        found.append(f"{key}: unknown field; it belongs under spec")
    if "spec" not in resource:
        raise InvalidResourceError([*found, "spec: is required"])
    try:
        spec = parse_spec(resource["spec"])
    except InvalidResourceError as exc:
        raise InvalidResourceError([*found, *exc.sentences]) from None
    found += not_yet(spec)
    if found:
        raise InvalidResourceError(found)
    return spec


def not_yet(spec: DDTreeSpec) -> list[str]:
    """A sentence for each thing that the spec may ask for by its schema and that nothing here does, or that has a field
    of its own by now.
    """
    found = _moved(spec)
    if spec.engine.kind == "vllm":
        found.append("spec.engine.kind: vllm is not supported yet; use sglang")
    if spec.traffic.gateway is not None:
        found += _gateway(spec)
    else:
        found += [
            f"spec.canary.steps[{i}].{step.kind}: needs spec.traffic.gateway; a Service has no weights of its own"
            for i, step in enumerate(spec.canary.steps)
            if step.canary_replicas is not None or step.header_route is not None
        ]
    return found


def _moved(spec: DDTreeSpec) -> list[str]:
    if spec.engine.speculative.algorithm is not Algorithm.DDTREE and spec.baseline.speculative.draft_block is None:
        return []
    given = dict.fromkeys(a.split("=", 1)[0] for a in spec.engine.args)
    return [
        f"spec.engine.args: {flag} has a field of its own; remove it and set {names.DDTREE_FLAGS[flag]}"
        for flag in given
        if flag in names.DDTREE_FLAGS
    ]


def _gateway(spec: DDTreeSpec) -> list[str]:
    found = []
    assert spec.traffic.gateway is not None
    if spec.traffic.gateway.session_header is not None:
        found.append(
            "spec.traffic.gateway.sessionHeader: sticky sessions are not available (the Gateway API has them as an "
            "experiment that Contour ignores); use a step {headerRoute: {}} for testers"
        )
    if spec.placement.strategy == "swap":
        found.append(
            "spec.placement.strategy: swap promotes by pods that share one Service, which spec.traffic.gateway "
            "does not do; use surge, or leave gateway out"
        )
    return found


def name_fits(name: str) -> bool:
    """Whether a resource may have this name (see ``names.NAME_RULE``)."""
    return len(name) <= names.NAME_MAX and re.fullmatch(names.NAME_PATTERN.strip("^$"), name) is not None


def sentences(exc: ValidationError, data: Mapping[str, Any], root: str = "spec") -> list[str]:
    """Turn pydantic's errors on ``data`` into sentences, one per field, in the order of the errors."""
    by_path: dict[str, list[str]] = {}
    for error in exc.errors(include_url=False):
        path, parents = _path(error, data)
        words = by_path.setdefault(f"{root}{path}", [])
        said = _say(error, parents)
        if said not in words:
            words.append(said)
    # A union complains once per variant: what is said deeper down is more telling, and kinds are said together.
    return [
        f"{path}: {_join(words)}"
        for path, words in by_path.items()
        if not any(other.startswith((path + ".", path + "[")) for other in by_path if path != root)
    ]


def _join(words: list[str]) -> str:
    if len(words) > 1 and all(w.startswith(tuple(_KINDS.values())) for w in words):
        kinds = [w.removeprefix("must be ").split(",")[0] for w in words]
        return f"must be {' or '.join(kinds)},{words[0].partition(',')[2]}"
    return ", and ".join(words)


def _path(error: ErrorDetails, data: Any) -> tuple[str, list[str]]:
    """Path of an error in the user's terms, and the field names above it. Tags of unions are not the user's."""
    path, fields, here = "", [], data
    loc = error["loc"]
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, Mapping) and (part in here or (last and error["type"] == "missing")):
            path += f".{part}"
            fields.append(part)
            here = here.get(part)
    return path, fields


def _say(error: ErrorDetails, fields: list[str]) -> str:
    ctx: Mapping[str, Any] = error.get("ctx", {})
    given = error["input"]
    match error["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(fields[-1], _known_fields(fields[:-1]), n=1)
            return f"unknown field; did you mean {near[0]}?" if near else "unknown field; remove it"
        case "missing":
            return "is required"
        case "value_error":
            return str(ctx["error"])
        case "less_than_equal":
            return f"must be at most {ctx['le']}, not {given}"
        case "greater_than_equal":
            return f"must be at least {ctx['ge']}, not {given}"
        case "string_pattern_mismatch":
            return f"{PATTERN_WORDS.get(ctx['pattern'], 'must match ' + ctx['pattern'])}, not {_short(given)}"
        case "literal_error" | "enum":
            return f"must be {ctx['expected']}".replace("'", "") + f", not {_short(given)}"
        case "string_too_short" | "too_short":
            least = ctx["min_length"]
            return "must not be empty" if least == 1 else f"{_length_words(error)}, not {_short(given)}"
        case "string_too_long" | "too_long":
            most = ctx["max_length"]
            return f"must not have more than {most}{_unit(error)}" if most else "takes no fields; write {}"
        case kind if kind in _KINDS:
            return f"{_KINDS[kind]}, not {_short(given)}"
        case _:
            return error["msg"][:1].lower() + error["msg"][1:]


def _unit(error: ErrorDetails) -> str:
    return " characters" if error["type"].startswith("string") else " entries"


def _length_words(error: ErrorDetails) -> str:
    return f"must have at least {error.get('ctx', {})['min_length']}{_unit(error)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f'"{text}"' if isinstance(value, str) else text


def _known_fields(fields: Iterable[str]) -> list[str]:
    """Field names (as users write them) of the model that ``fields`` lead to from the spec."""
    model: type[BaseModel] | None = DDTreeSpec
    for name in fields:
        by_alias = {f.alias or n: f for n, f in model.model_fields.items()} if model else {}
        model = _model_in(by_alias[name].annotation) if name in by_alias else None
    return [f.alias or n for n, f in model.model_fields.items()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for arg in get_args(annotation) if (m := _model_in(arg))), None)


def _without_nulls(value: Any, path: str = "") -> Any:
    """Drop null fields, as the API server does; inside a pod template null is a wish of its own and stays."""
    if path == ".engine.podTemplate":
        return value
    if isinstance(value, dict):
        return {k: _without_nulls(v, f"{path}.{k}") for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v, path + "[]") for v in value]
    return value
