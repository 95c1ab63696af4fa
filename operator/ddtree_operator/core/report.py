"""The status: a projection of what is known, never the place where anything is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_POOL, NODES_SHOWN
from ddtree_operator.api.status import Phase
from ddtree_operator.core import gateway
from ddtree_operator.core.actions import Action, Emit
from ddtree_operator.core.facts import EngineSet, Revision
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip, iso
from ddtree_operator.core.waiting import lost_node

HISTORY = 20  # entries kept in status
LOG_SHOWN = 2  # entries of the log of past revisions; the wanted one's is shown whole
BUILD_FAILED = "build failed: "  # how the reason of such a rollback begins
ALERT_LABELS = 8  # of an alert shown in a row of the history

# Fields and conditions that go on changing while a rollout stands still.
_FRESH = {"history", "lastAction", "replicas", "readyReplicas", "Ready", "Routed"}

# Conditions that become Events when they turn False, with the reasons that are no news or have an Event of their own.
_QUIET: dict[str, set[str]] = {
    "Valid": set(),
    "Placed": set(),
    "Routed": {"NotInForce", "Edited"},
    "Ready": {"EnginesNotReady"},
    "Built": {"Building", "BuildFailed"},
    "Progressing": {str(p) for p in Phase if p is not Phase.DEGRADED},
}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    """A condition without its times; :func:`stamp` adds them."""
    return {"type": kind, "status": status, "reason": reason, "message": clip(message)}


def stamp(new: list[dict[str, Any]], old: list[dict[str, Any]], now: float, generation: int) -> list[dict[str, Any]]:
    """Times change only when a condition's status does."""
    before = {c.get("type"): c for c in old}
    out = []
    for c in new:
        was = before.get(c["type"], {})
        at = was.get("lastTransitionTime") if was.get("status") == c["status"] else None
        out.append({**c, "lastTransitionTime": at or iso(now), "observedGeneration": generation})
    return out


def _speculative(rev: Revision) -> str:
    spec = rev.spec.get("engine", {}).get("speculative", {})
    algorithm = str(spec.get("algorithm", "DDTREE"))
    budget = f"/{spec['budget']}" if spec.get("budget") else ""
    return f"{algorithm}{budget} block {spec['draftBlock']}" if spec.get("draftBlock") else algorithm + budget


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else ""


def _history(r: Round, wanted: str) -> list[dict[str, Any]]:
    rows = []
    for rev in sorted(r.revisions.values(), key=lambda x: x.number)[-HISTORY:]:
        row: dict[str, Any] = {
            "revision": rev.hash,
            "number": rev.number,
            "result": rev.result or "inProgress",
            "algorithm": _speculative(rev),
        }
        optional = {
            "reason": clip(rev.reason, 300),
            "at": iso(rev.at) if rev.at else "",
            "by": rev.by,
            "image": rev.image,
            "acceptLength": _short(rev.summary.get("acceptLength")),
            "throughput": _short(rev.summary.get("throughput")),
            "verdictDigest": rev.summary.get("digest", ""),
            "cause": rev.cause if rev.blocked else "",
            "wentBackTo": rev.fallback if rev.blocked else "",
            "alert": _alert(rev),
        }
        shown = list(rev.log if rev.hash == wanted else rev.log[-LOG_SHOWN:])
        rows.append(row | {k: v for k, v in optional.items() if v} | ({"log": shown} if shown else {}))
    return rows


def _alert(rev: Revision) -> dict[str, Any]:
    """The alert that rolled a revision back; {} when none did."""
    acted = [x for x in rev.alarms if x.get("outcome") == "rolledBack"] if rev.cause == "alert" else []
    if not acted:
        return {}
    labels = dict(list(acted[-1].get("labels", {}).items())[:ALERT_LABELS])
    return {"name": acted[-1].get("name", ""), "startsAt": acted[-1].get("startsAt", ""), "labels": labels}


def _brief(rev: Revision) -> dict[str, Any]:
    out = {"revision": rev.hash, "number": rev.number, "algorithm": _speculative(rev)}
    if rev.image:
        out["image"] = rev.image
    accept = _short(rev.summary.get("acceptLength"))
    return out | ({"acceptLength": accept} if accept else {})


def _analysis(r: Round, wanted: Revision) -> dict[str, Any]:
    found = r.seen.analysis
    if found is not None and found.revision == wanted.hash and found.attempt == wanted.attempt:
        return {"outcome": found.outcome, "reason": clip(found.reason), **found.summary.get("view", {})}
    if wanted.summary.get("view"):
        view: dict[str, Any] = wanted.summary["view"]
        return {"outcome": wanted.summary.get("outcome", ""), "reason": clip(wanted.summary.get("reason", "")), **view}
    return {}


def _kept_build(rev: Revision) -> tuple[str, str, str] | None:
    """Condition Built of a blocked revision; what serves instead has its own image and is not what is asked about."""
    if not rev.blocked:
        return None
    if rev.image:
        return "True", "Built", rev.image
    failed = rev.result == "rolledBack" and rev.reason.startswith(BUILD_FAILED)
    return ("False", "BuildFailed", rev.reason) if failed else ("Unknown", "NotNeeded", "")


def _kept_verdict(rev: Revision) -> tuple[str, str, str] | None:
    """Condition Verdict from what a revision keeps: a rollback for whatever reason is one, analysed or not."""
    outcome, reason = rev.summary.get("outcome"), rev.summary.get("reason", "")
    if rev.result == "rolledBack" and outcome != "fail":
        return "False", "RolledBack", rev.reason
    known = {"pass": ("True", "Passed"), "fail": ("False", "Failed"), "notYet": ("Unknown", "NotYet")}
    return (*known[outcome], reason) if outcome in known else None


def status(
    r: Round, wanted: Revision, serving: Revision | None, generation: int, old: dict[str, Any]
) -> dict[str, Any]:
    """The whole status, ready to be written where it differs from ``old``."""
    rep = r.report
    serving = r.revisions.get(serving.hash) if serving else None
    engines = r.engines_of(serving) if serving else None
    ready = len(engines.ready) if engines else 0
    problems = [(p.reason, p.message) for p in r.seen.problems] if wanted.result == "" else []
    valid = (
        condition("Valid", "False", problems[0][0], problems[0][1])
        if problems
        else condition("Valid", "True", "Valid", r.seen.outlook)
    )
    rolling_now = rep.phase in {"Building", "Placing", "Starting", "Analyzing", "Paused", "Promoting", "Pending"}
    progressing = "True" if rolling_now and not rep.obstacle else "False"
    told = rolling_now or rep.phase == "Degraded"
    verdict = rep.verdict if rep.verdict[0] != "Unknown" else _kept_verdict(wanted) or rep.verdict
    pinned = _pinned(wanted)
    stands = _table_stands(r, wanted, old, pinned)
    conditions = [
        valid,
        condition("Built", *(_kept_build(wanted) or rep.built)),
        condition("Placed", *(_as_before(rep.placed, old) if stands else rep.placed)),
        condition("Ready", *_ready(engines, r.spec.replicas)),
        condition("Progressing", progressing, rep.obstacle or rep.phase, rep.message if told else ""),
        condition("Verdict", *verdict),
    ]
    if routed := gateway.told(r):
        conditions.append(condition("Routed", *routed))
    out: dict[str, Any] = {
        "phase": rep.phase,
        "message": rep.message,
        "observedGeneration": generation,
        "revision": wanted.hash,
        "step": rep.step,
        "weight": rep.weight,
        "replicas": engines.replicas if engines else 0,
        "readyReplicas": ready,
        "selector": f"{LABEL_DEPLOYMENT}={r.name},{LABEL_POOL}=serving",
        "conditions": stamp(conditions, old.get("conditions", []), r.now, generation),
        "history": _history(r, wanted.hash),
    }
    if serving is not None:
        out["stable"] = _brief(serving)
        out["acceptLength"] = _short(serving.summary.get("acceptLength"))
    if rep.canary and rolling_now and (wanted.progress is not None):
        canary = r.revisions[rep.canary]
        out["canary"] = _brief(canary) | {
            "step": rep.step,
            "stepIndex": wanted.progress.step,
            "stepCount": len(r.spec.canary.steps),
            "startedAt": iso(wanted.progress.started_at),
        }
        if rep.baseline:
            stable = serving.hash if serving and rep.baseline == "stable" else wanted.hash
            out["baseline"] = {"kind": rep.baseline, "revision": stable}
    analysis = _analysis(r, wanted)
    if analysis:
        out["analysis"] = analysis
    build = {"job": r.seen.build.job} if r.seen.build is not None and r.seen.build.job else {}
    log = {"log": str(wanted.summary["buildLog"]).splitlines()} if wanted.summary.get("buildLog") else {}
    if build or log:
        out["build"] = build | log
    blocked = [
        {"revision": x.hash, "number": x.number, "result": x.result, "reason": clip(x.reason, 300), "at": iso(x.at)}
        for x in sorted(r.revisions.values(), key=lambda x: x.number)[-HISTORY:]
        if x.blocked
    ]
    if blocked:
        out["blocked"] = blocked
    if r.seen.placement is not None and not stands:
        out["nodes"] = list(r.seen.placement.nodes)
    elif old.get("nodes"):
        out["nodes"] = old["nodes"]  # looked at while a revision is placed
    if pinned:
        out["pinned"] = pinned
    if wanted.handled:
        request = r.seen.request
        who = {"verb": str(request.verb), "by": request.by} if request and request.id == wanted.handled else {}
        at = {"at": iso(wanted.handled_at)} if wanted.handled_at else {}  # an older operator did not keep it
        out["lastAction"] = {"id": wanted.handled, "result": wanted.handled_note, **at, **who}
    return out


def _ready(engines: EngineSet | None, replicas: int) -> tuple[str, str, str]:
    ready = len(engines.ready) if engines else 0
    text = f"{ready}/{replicas} engines ready"
    if ready and ready >= replicas:
        return "True", "EnginesReady", text
    lost = lost_node(engines) if engines else ""
    return ("False", "NodeLost", f"{text}; {lost}") if lost else ("False", "EnginesNotReady", text)


def _pinned(rev: Revision) -> list[str]:
    pins = ((k, ",".join(v[:NODES_SHOWN]) if isinstance(v, list) else v) for k, v in sorted(rev.pins.items()))
    return [f"{k}={v}" for k, v in pins]


def _table_stands(r: Round, wanted: Revision, old: dict[str, Any], pinned: list[str]) -> bool:
    """Whether the node table that was written stays: each pod that comes or goes anywhere changes the free GPUs, and
    while a revision has room nobody acts on them. It is written anew while the revision lacks room, for another
    revision, for other pins, and, until there are engines, when another set of nodes fits.
    """
    place, before = r.seen.placement, old.get("nodes")
    if place is None or not place.fits or not before:
        return False
    if old.get("revision") != wanted.hash or (old.get("pinned") or []) != pinned:
        return False
    return r.engines_of(wanted) is not None or _fitting(before) == _fitting(place.nodes)


def _fitting(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row.get("name"), row.get("fits"), row.get("product")) for row in rows]


def _as_before(placed: tuple[str, str, str], old: dict[str, Any]) -> tuple[str, str, str]:
    """Condition Placed in the words it had, which count free GPUs, while its status and reason are the same."""
    was: dict[str, Any] = next((c for c in old.get("conditions", []) if c.get("type") == "Placed"), {})
    same = placed[:2] == (was.get("status"), was.get("reason"))
    return (*placed[:2], str(was.get("message", ""))) if same else placed


def invalid(message: str, decided: dict[str, Any], now: float, generation: int, old: dict[str, Any]) -> dict[str, Any]:
    """Status while the spec has a mistake. ``decided`` is what it would be without, {} when nothing could be decided.

    Of a rollout that stands still (Paused) nothing new is learnt, and what was said of it stays.
    """
    before, after = ({c.get("type"): c for c in x.get("conditions", [])} for x in (old, decided))
    known, conditions = decided, after
    if decided.get("phase", "Paused") == "Paused":
        known = {**decided, **{k: v for k, v in old.items() if k not in decided or k not in _FRESH}}
        conditions = {**after, **before, **{k: c for k, c in after.items() if k in _FRESH}}
    valid = stamp([condition("Valid", "False", "InvalidSpec", message)], old.get("conditions", []), now, generation)
    moving = decided.get("phase") in {"Promoting", "RolledBack", "Degraded"}
    return {
        **known,
        "phase": "Invalid",
        "message": clip(f"{message}; meanwhile: {decided['message']}") if moving else clip(message),
        "observedGeneration": generation,
        "conditions": valid + [c for kind, c in conditions.items() if kind != "Valid"],
    }


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Action]:
    """Events for conditions that turned bad, or are bad for another reason than before.

    What is wrong with a spec is said anew when the words change; in other conditions the words count and age.
    """

    def news(c: dict[str, Any]) -> tuple[Any, ...]:
        return c.get("status"), c.get("reason"), c.get("message") if c.get("type") == "Valid" else ""

    before = {c.get("type"): news(c) for c in old.get("conditions", [])}
    out: list[Action] = []
    for c in new.get("conditions", []):
        watched = c["status"] == "False" and c["reason"] not in _QUIET.get(c["type"], {c["reason"]})
        if watched and before.get(c["type"]) != news(c):
            out.append(Emit("Warning", c["reason"], c["message"]))
    return out
