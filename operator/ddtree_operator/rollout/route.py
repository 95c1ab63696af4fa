"""A user's HTTPRoute: what of it is ours, and the JSON patch that gives our backends their weights. Pure.

Ours are the backendRefs that name the resource's Service, their weights, backendRefs to the canary's Service beside
them, the rules for testers ahead of them, and one annotation that remembers the weights as the user wrote them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ddtree_operator.core.facts import Header, Share

Object = dict[str, Any]
Op = dict[str, Any]

MAX_RULES = 16  # of an HTTPRoute, by its schema
_PREFIX = "route.ddtree.dev/"


def annotation(name: str) -> str:
    """Annotation on the route in which the resource ``name`` keeps what it has to give back."""
    return _PREFIX + name


@dataclass(frozen=True, slots=True)
class Ours:
    """Which part of a route belongs to a resource."""

    name: str  # of the resource, and of its Service
    canary: str  # name of the canary's Service
    namespace: str  # the route's own
    rules: tuple[str, ...] = ()  # only rules of these names; () for every rule with our backend


class RouteError(ValueError):
    """A route that cannot carry the weights; one sentence."""


@dataclass(slots=True)
class _Memory:
    share: Share = field(default_factory=Share)
    weights: dict[str, int] = field(default_factory=dict)  # as the user wrote them, by rule


def share_of(route: Object, ours: Ours) -> Share | None:
    """The share that is in force; None when somebody edited our part, so that it has to be written anew."""
    memory = _memory(route, ours)
    try:
        return memory.share if not patch(route, ours, memory.share) else None
    except RouteError:
        return None


def check(route: Object, ours: Ours) -> None:
    """Raises :class:`RouteError` for a route that cannot carry weights."""
    _targets([rule for rule in _rules(route) if not _is_testers(rule, ours)], ours, strict=True)


def touched(route: Object, ours: Ours) -> bool:
    """Whether anything of ours is in the route."""
    noted = annotation(ours.name) in (route["metadata"].get("annotations") or {})
    return noted or any(_refs(rule, ours.canary, ours) for rule in _rules(route))


def named(route: Object, ours: Ours) -> bool:
    """Whether a rule that is not for testers has the canary as a backend."""
    return any(_refs(rule, ours.canary, ours) for rule in _rules(route) if not _is_testers(rule, ours))


def patch(route: Object, ours: Ours, share: Share) -> list[Op]:
    """JSON patch that gives the canary its share; [] when there is nothing to do. Raises :class:`RouteError`.

    Every element that is replaced or removed is tested first, and so is the version that all this was computed from.
    """
    rules, memory = _rules(route), _memory(route, ours)
    testers = [i for i, rule in enumerate(rules) if _is_testers(rule, ours)]
    plain = [rule for i, rule in enumerate(rules) if i not in testers]
    targets = _targets(plain, ours, strict=share.gives)
    weights: dict[str, int] = {}
    edits: list[Op] = []
    ahead: list[Object] = []
    for index in targets:
        rule = plain[index]
        key = _key(rule, weights)
        weights[key] = _original(rule, ours, memory, key)
        edits += _backends(rule, index, ours, share, weights[key])
        if share.header is not None and weights[key]:
            ahead.append(_for_testers(rule, ours, share.header))
    for index, rule in enumerate(plain):
        if index not in targets:
            edits += _released(rule, index, ours, memory)
    if len(plain) + len(ahead) > MAX_RULES:
        raise RouteError(f"it would have {len(plain) + len(ahead)} rules with those for testers, and may have 16")
    ops: list[Op] = []
    if [rules[i] for i in testers] != ahead:
        for i in reversed(testers):
            ops += [_test(f"/spec/rules/{i}", rules[i]), {"op": "remove", "path": f"/spec/rules/{i}"}]
        ops += edits
        ops += [{"op": "add", "path": "/spec/rules/0", "value": rule} for rule in reversed(ahead)]
    else:  # the indices are those of the whole list
        at = [i for i in range(len(rules)) if i not in testers]
        for op in edits:
            _, _, _, index_, rest = op["path"].split("/", 4)
            ops.append({**op, "path": f"/spec/rules/{at[int(index_)]}/{rest}"})
    ops += _note(route, ours, share, weights)
    return [_test("/metadata/resourceVersion", route["metadata"]["resourceVersion"]), *ops] if ops else []


def _rules(route: Object) -> list[Object]:
    return list(route.get("spec", {}).get("rules") or [])


def _refs(rule: Object, service: str, ours: Ours) -> list[int]:
    """Positions of the backendRefs that name a Service of the route's namespace."""
    return [
        i
        for i, ref in enumerate(rule.get("backendRefs") or [])
        if ref.get("name") == service
        and ref.get("kind", "Service") == "Service"
        and not ref.get("group")
        and ref.get("namespace", ours.namespace) == ours.namespace
    ]


def _is_testers(rule: Object, ours: Ours) -> bool:
    """A rule that was put ahead for testers: the canary is its only backend, and a header leads there."""
    refs = rule.get("backendRefs") or []
    headed = all(m.get("headers") for m in rule.get("matches") or [{}])
    return bool(refs) and headed and len(_refs(rule, ours.canary, ours)) == len(refs)


def _released(rule: Object, index: int, ours: Ours, memory: _Memory) -> list[Op]:
    """Take the canary out of a rule that is not (or no longer) ours to split.

    Where it stands alone, because somebody removed our backend beside it, ours comes back.
    """
    refs, beside = rule.get("backendRefs") or [], _refs(rule, ours.canary, ours)
    if not beside:
        return []
    if len(_refs(rule, ours.name, ours)) == 1:
        return _backends(rule, index, ours, Share(), _original(rule, ours, memory, _key(rule, {})))
    back = {**refs[beside[0]], "name": ours.name, "weight": 1} if len(beside) == len(refs) else None
    base = f"/spec/rules/{index}/backendRefs"
    ops: list[Op] = []
    for i in reversed(beside):
        ops.append(_test(f"{base}/{i}", refs[i]))
        if back is not None and i == beside[0]:
            ops.append({"op": "replace", "path": f"{base}/{i}", "value": back})
        else:
            ops.append({"op": "remove", "path": f"{base}/{i}"})
    return ops


def _targets(plain: list[Object], ours: Ours, *, strict: bool) -> list[int]:
    """Rules whose backend is ours. Taking traffic from the canary (not ``strict``) works on any route it stands in."""
    if not strict:
        return [
            i
            for i, rule in enumerate(plain)
            if len(_refs(rule, ours.name, ours)) == 1 and (not ours.rules or rule.get("name", "") in ours.rules)
        ]
    missing = sorted(set(ours.rules) - {str(rule.get("name", "")) for rule in plain})
    if missing:
        raise RouteError(f"it has no rule named {', '.join(missing)}; correct spec.traffic.gateway.rules")
    found = []
    for i, rule in enumerate(plain):
        refs = _refs(rule, ours.name, ours)
        if not refs or (ours.rules and rule.get("name", "") not in ours.rules):
            continue
        if len(refs) > 1:
            raise RouteError(f"rule {i + 1} names Service {ours.name} {len(refs)} times; keep one of the backendRefs")
        found.append(i)
    if not found:
        where = f"none of the rules {', '.join(ours.rules)} has" if ours.rules else "no rule has"
        raise RouteError(f"{where} a backendRef to Service {ours.name}; add one")
    return found


def _original(rule: Object, ours: Ours, memory: _Memory, key: str) -> int:
    """Our backend's weight as the user wrote it: remembered while the canary stands beside it, else as it is now."""
    refs = rule["backendRefs"]
    now = int(refs[_refs(rule, ours.name, ours)[0]].get("weight", 1))
    split = _refs(rule, ours.canary, ours)
    if not split:
        return now
    if key in memory.weights:
        return memory.weights[key]
    if len(refs) > 1 + len(split):  # beside somebody else's, the sum is kept when it is split
        return now + sum(int(refs[i].get("weight", 1)) for i in split)
    return 1


def _backends(rule: Object, index: int, ours: Ours, share: Share, weight: int) -> list[Op]:
    """Operations on one rule's backendRefs."""
    if not share.named and not _refs(rule, ours.canary, ours):
        return []
    base, refs = f"/spec/rules/{index}/backendRefs", rule["backendRefs"]
    at, beside = _refs(rule, ours.name, ours)[0], _refs(rule, ours.canary, ours)
    alone = len(refs) == 1 + len(beside)
    main, canary = _split(weight, share.weight, index, alone=alone)
    ops: list[Op] = []
    if int(refs[at].get("weight", 1)) != main:
        ops += [_test(f"{base}/{at}", refs[at]), {"op": "add", "path": f"{base}/{at}/weight", "value": main}]
    wanted = {**copy.deepcopy(refs[at]), "name": ours.canary, "weight": canary}
    keep = beside[0] if beside and share.named and refs[beside[0]] == wanted else None
    for i in reversed(beside):
        if i != keep:
            ops += [_test(f"{base}/{i}", refs[i]), {"op": "remove", "path": f"{base}/{i}"}]
    if share.named and keep is None:
        ops.append({"op": "add", "path": f"{base}/-", "value": wanted})
    return ops


def _split(weight: int, percent: int, index: int, *, alone: bool) -> tuple[int, int]:
    """Weights of stable and canary. Beside a foreign backend their sum is the user's weight: it keeps its share."""
    if percent == 0 or weight == 0:
        return weight, 0
    if alone:
        return 100 - percent, percent
    canary, rest = divmod(weight * percent, 100)
    if rest:
        raise RouteError(
            f"rule {index + 1} has other backends, and weight {weight} cannot be split by {percent}%; "
            "multiply all weights of that rule by 100"
        )
    return weight - canary, canary


def _for_testers(rule: Object, ours: Ours, header: Header) -> Object:
    """The same rule for requests that carry the header, to the canary alone: filters and timeouts are the user's."""
    made = copy.deepcopy(rule)
    made.pop("name", None)  # names are unique in a route
    match = {"type": "Exact", "name": header.name, "value": header.value}
    made["matches"] = [
        {**m, "headers": [*(m.get("headers") or []), match]}
        for m in made.get("matches") or [{"path": {"type": "PathPrefix", "value": "/"}}]
    ]
    ref = made["backendRefs"][_refs(rule, ours.name, ours)[0]]
    made["backendRefs"] = [{**ref, "name": ours.canary, "weight": 1}]
    return made


def _key(rule: Object, taken: dict[str, int]) -> str:
    """What a rule is known by when others are put before it."""
    name = rule.get("name")
    text = json.dumps(rule.get("matches"), sort_keys=True)
    key = f"n:{name}" if name else hashlib.sha256(text.encode()).hexdigest()[:8]
    while key in taken:
        key += "+"
    return key


def _memory(route: Object, ours: Ours) -> _Memory:
    text = (route["metadata"].get("annotations") or {}).get(annotation(ours.name))
    if text is None:
        return _Memory()
    try:
        data = json.loads(text)
        header = Header(str(data["header"]["name"]), str(data["header"]["value"])) if data.get("header") else None
        weights = {str(k): int(v) for k, v in data["weights"].items()}
        return _Memory(Share(min(100, max(0, int(data["weight"]))), header, named=True), weights)
    except (AttributeError, KeyError, TypeError, ValueError):
        return _Memory()


def _note(route: Object, ours: Ours, share: Share, weights: dict[str, int]) -> list[Op]:
    """The annotation: there exactly while something of ours is in the route."""
    notes, key = route["metadata"].get("annotations"), annotation(ours.name)
    path = "/metadata/annotations/" + key.replace("~", "~0").replace("/", "~1")
    if share == Share():
        return [{"op": "remove", "path": path}] if key in (notes or {}) else []
    header = {"name": share.header.name, "value": share.header.value} if share.header else None
    text = json.dumps({"weight": share.weight, "header": header, "weights": weights}, sort_keys=True)
    if (notes or {}).get(key) == text:
        return []
    if notes is None:
        return [{"op": "add", "path": "/metadata/annotations", "value": {key: text}}]
    return [{"op": "add", "path": path, "value": text}]


def _test(path: str, value: Any) -> Op:
    return {"op": "test", "path": path, "value": value}


def readiness(route: Object, gateways: dict[tuple[str, str], Object | None]) -> str:
    """Why the route, as it is written now, does not carry traffic yet; "" when it does.

    ``gateways`` by (namespace, name): None for one that does not exist; those that may not be read are left out.
    """
    meta = route["metadata"]
    parents = route.get("spec", {}).get("parentRefs") or []
    if not parents:
        return "it has no parentRefs; name a Gateway"
    told = (route.get("status") or {}).get("parents") or []
    for ref in parents:
        key = (ref.get("namespace", meta["namespace"]), ref["name"])
        if key in gateways:
            gateway = gateways[key]
            if gateway is None:
                return f"Gateway {key[0]}/{key[1]} does not exist"
            bad = _unmet((gateway.get("status") or {}).get("conditions"), "Programmed", gateway["metadata"])
            if bad is not None:
                return f"Gateway {key[0]}/{key[1]} is not programmed{bad}"
        mine = [p for p in told if _same_parent(p.get("parentRef") or {}, ref, meta["namespace"])]
        if not mine:
            return f"no controller has answered for Gateway {key[0]}/{key[1]}"
        for parent in mine:
            for kind, words in (("Accepted", "accepted"), ("ResolvedRefs", "resolved")):
                bad = _unmet(parent.get("conditions"), kind, meta)
                if bad is not None:
                    return f"it is not {words} by Gateway {key[0]}/{key[1]}{bad}"
    return ""


def gateways_of(route: Object) -> list[tuple[str, str]]:
    """(namespace, name) of the Gateways it hangs on."""
    space = route["metadata"]["namespace"]
    refs = route.get("spec", {}).get("parentRefs") or []
    return [(r.get("namespace", space), r["name"]) for r in refs if r.get("kind", "Gateway") == "Gateway"]


def _same_parent(told: Object, ref: Object, space: str) -> bool:
    def ident(x: Object) -> tuple[Any, ...]:
        return x.get("namespace", space), x.get("name"), x.get("sectionName"), x.get("port")

    return ident(told) == ident(ref)


def _unmet(conditions: Any, kind: str, meta: Object) -> str | None:
    """What keeps a condition from being True for this generation, as an ending of a sentence; None when it holds."""
    found = next((c for c in conditions or [] if c.get("type") == kind), None)
    if found is None:
        return " yet"
    if int(found.get("observedGeneration", 0)) < int(meta.get("generation", 0)):
        return " yet, as it was written last"
    if found.get("status") == "True":
        return None
    return f" ({found.get('reason', '')}: {found.get('message', '')})"
