"""What makes a revision: the part of the spec that changes what an engine computes or where it runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ddtree_operator.api.refusals import parse_spec
from ddtree_operator.api.spec import Algorithm, DDTreeSpec, Speculative

# Fields whose change needs a new canary. Replicas, canary policy, traffic and rollback settings do not.
REVISION_FIELDS = ("model", "drafter", "engine", "placement")


def revision_part(spec: DDTreeSpec) -> dict[str, Any]:
    """The fields that make the revision, without defaults: an operator with new defaults keeps old hashes."""
    full = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {k: full[k] for k in REVISION_FIELDS if k in full}


def settings_part(spec: DDTreeSpec) -> dict[str, Any]:
    """The other fields, without defaults and without ``replicas``, which an autoscaler may change at any time."""
    full = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {k: v for k, v in full.items() if k not in {*REVISION_FIELDS, "replicas"}}


def revision_hash(spec: DDTreeSpec) -> str:
    """Ten hex digits over :func:`revision_part`."""
    text = json.dumps(revision_part(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def engine_set_name(deployment: str, revision: str, *, baseline: bool = False) -> str:
    """Name of the Deployment that runs a revision, or of its dedicated baseline."""
    return f"{deployment}-base-{revision}" if baseline else f"{deployment}-{revision}"


def baseline_speculative(spec: DDTreeSpec) -> Speculative:
    """What a dedicated baseline runs: as the spec says, or plain decoding where that would equal the canary, where
    there is no drafter to run it with, or where the canary itself is plain (any drafting beats it on acceptance).
    """
    wanted, canary = spec.baseline.speculative, spec.engine.speculative
    if wanted == canary or spec.drafter is None or canary.algorithm is Algorithm.NONE:
        return Speculative(algorithm=Algorithm.NONE)
    return wanted


def parse(raw: dict[str, Any]) -> DDTreeSpec:
    """The spec as a model. Raises ValueError with one sentence per mistake."""
    return parse_spec(raw)
