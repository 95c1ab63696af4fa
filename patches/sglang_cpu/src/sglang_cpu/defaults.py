"""What a CPU engine needs where the user gave nothing. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTEXT_LENGTH = 2048  # tokens; a CPU prefills a few hundred tokens a second
MAX_TOTAL_TOKENS = 8192  # KV slots over all requests
MAX_RUNNING_REQUESTS = 8

# field -> (value that means "not given", value on a CPU)
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "device": (None, "cpu"),
    "dtype": ("auto", "float32"),
    "attention_backend": (None, "torch_native"),
    "grammar_backend": (None, "none"),
    "disable_cuda_graph": (False, True),
    "sleep_on_idle": (False, True),
    "max_total_tokens": (None, MAX_TOTAL_TOKENS),
    "max_running_requests": (None, MAX_RUNNING_REQUESTS),
    "mem_fraction_static": (None, 0.3),
}


def cpu_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields to set, from the ones ``given`` (name to value; SGLang's own default means not given)."""
    out = {name: value for name, (unset, value) in _DEFAULTS.items() if name in given and given[name] == unset}
    if given.get("context_length") is None:
        out["context_length"] = min(CONTEXT_LENGTH, _model_limit(str(given.get("model_path", ""))))
    return out


def _model_limit(model_path: str) -> int:
    """``max_position_embeddings`` of a local model folder, else no limit."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
        return int(config.get("max_position_embeddings", CONTEXT_LENGTH))
    except (OSError, ValueError, AttributeError):
        return CONTEXT_LENGTH
