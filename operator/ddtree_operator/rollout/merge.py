"""Strategic merge for pod templates: lists of named things merge by name, everything else as JSON merge patch."""

from __future__ import annotations

from typing import Any

# Merge keys of the lists that users patch, as the Kubernetes API declares them.
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "claims": ("name",),
}


def merge(base: Any, over: Any, field: str = "") -> Any:
    """``over`` laid over ``base``. None in a mapping removes the key; lists without a merge key are replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        out = dict(base)
        for key, value in over.items():
            if value is None:
                out.pop(key, None)
            else:
                out[key] = merge(base.get(key), value, key)
        return out
    if isinstance(base, list) and isinstance(over, list) and field in _KEYS:
        return _merge_named(base, over, _KEYS[field])
    return over


def _merge_named(base: list[Any], over: list[Any], keys: tuple[str, ...]) -> list[Any]:
    def ident(item: Any) -> tuple[Any, ...] | None:
        return tuple(item.get(k) for k in keys) if isinstance(item, dict) else None

    out = list(base)
    at = {ident(item): i for i, item in enumerate(out)}
    for item in over:
        found = at.get(ident(item))
        if found is None:
            out.append(item)
        else:
            out[found] = merge(out[found], item)
    return out


def contains(live: Any, wanted: Any) -> bool:
    """True when ``live`` has everything that ``wanted`` says; what the API server adds does not count."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(k in live and contains(live[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(live) == len(wanted)
            and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
        )
    return bool(live == wanted)


def difference(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """Merge patch that turns ``old`` into ``new``; {} when nothing differs."""
    before = old if isinstance(old, dict) else {}
    patch: dict[str, Any] = {key: None for key in before if key not in new}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            inner = difference(before[key], value)
            if inner:
                patch[key] = inner
        elif key not in before or before[key] != value:
            patch[key] = value
    return patch
