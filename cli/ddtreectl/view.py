"""From a resource to what people read. Pure: dictionaries in, text and exit codes out; any field may be missing."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from ddtreectl.exits import Exit
from ddtreectl.output import age, paint, table

UNBOUNDED = 1000.0  # upper end of an interval that has none yet (analysis.evaluate)
Object = dict[str, Any]

PHASE_STYLES = {
    "Stable": "green",
    "Analyzing": "cyan",
    "Building": "cyan",
    "Placing": "cyan",
    "Starting": "cyan",
    "Promoting": "cyan",
    "Pending": "yellow",
    "Paused": "yellow",
    "Degraded": "red",
    "Invalid": "red",
    "RolledBack": "red",
}
OUTCOME_STYLES = {"pass": "green", "fail": "red", "not yet": "yellow"}
RESULT_STYLES = {
    "promoted": "green",
    "rolledBack": "red",
    "aborted": "red",
    "undone": "red",
    "inProgress": "cyan",
    "superseded": "dim",
}


def status_of(obj: Object) -> Object:
    """The status, empty when there is none yet."""
    return obj.get("status") or {}


def seen(obj: Object) -> bool:
    """Whether the operator has looked at the spec as it stands."""
    return bool((status_of(obj).get("observedGeneration") or 0) >= obj["metadata"].get("generation", 0))


def outcome(obj: Object) -> tuple[Exit, str]:
    """How the rollout stands: exit code and one sentence."""
    name, status = obj["metadata"]["name"], status_of(obj)
    phase = status.get("phase") or "Pending"
    message = status.get("message") or ""
    if not seen(obj):
        return Exit.GOING, f"{name}: the operator has not looked at this spec yet"
    sentence = f"{name}: {phase}" + (f", {message}" if message else "")
    match phase:
        case "Stable":
            return Exit.DONE, sentence
        case "RolledBack":
            return Exit.ROLLED_BACK, sentence
        case "Invalid" | "Degraded":
            return Exit.ERROR, sentence
        case _:
            return Exit.GOING, sentence


def line(obj: Object) -> str:
    """The state on one line; two states that read the same are the same to a watcher."""
    status = status_of(obj)
    _, sentence = outcome(obj)
    analysis = status.get("analysis") or {}
    parts = [sentence]
    if status.get("step"):
        parts.append(f"step {status['step']}")
    if status.get("canary") and status.get("weight"):
        parts.append(f"weight {status['weight']}%")
    if status.get("phase") == "Analyzing" and analysis.get("pairs"):
        parts.append(f"{analysis['pairs']} pairs")
    return " | ".join(parts)


def listing(objects: list[Object], everywhere: bool, wide: bool, color: bool, now: datetime | None = None) -> str:
    """Table of resources."""
    head = ["NAME", "PHASE", "STABLE", "CANARY", "STEP", "ACCEPT", "READY", "AGE"]
    rows = []
    for obj in objects:
        status, meta = status_of(obj), obj["metadata"]
        row = [
            meta["name"],
            status.get("phase") or "",
            (status.get("stable") or {}).get("revision") or "",
            (status.get("canary") or {}).get("revision") or "",
            status.get("step") or "",
            status.get("acceptLength") or "",
            f"{status.get('readyReplicas') or 0}/{(obj.get('spec') or {}).get('replicas', 1)}",
            age(meta.get("creationTimestamp"), now),
        ]
        if wide:
            row.append(status.get("message") or "")
        rows.append([meta.get("namespace", ""), *row] if everywhere else row)
    head = (["NAMESPACE"] if everywhere else []) + head + (["MESSAGE"] if wide else [])
    return table(head, rows, PHASE_STYLES if color else None)


def rollout(obj: Object, color: bool, now: datetime | None = None) -> str:
    """The rollout of one resource: where it stands, its sets, its verdict, what is blocked."""
    meta, status = obj["metadata"], status_of(obj)
    phase = status.get("phase") or "Pending"
    canary = status.get("canary") or {}
    lines = [f"{paint(meta['name'], 'bold', color)} in namespace {meta.get('namespace', 'default')}"]

    def row(label: str, *cells: str) -> None:
        text = "   ".join(c for c in cells if c)
        if text:
            lines.append(f"  {label:<9} {text}")

    row("phase", paint(phase, PHASE_STYLES.get(phase, ""), color), status.get("message") or "")
    if not seen(obj):
        old = "; what follows is from before" if status else ""
        row("", f"the operator has not looked at this spec yet{old}")
    step = status.get("step") or ""
    since = age(canary.get("startedAt"), now)
    if step:
        row("step", step, f"weight {status.get('weight') or 0}%", f"started {since} ago" if since else "")
    elif since:
        row("started", f"{since} ago")
    routed: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "Routed"), {})
    row("route", "" if routed.get("status") == "True" else routed.get("reason") or "", routed.get("message") or "")
    row("stable", *_set(status.get("stable")))
    row("canary", *_set(canary))
    baseline = status.get("baseline") or {}
    row("baseline", baseline.get("revision") or "", baseline.get("kind") or "")
    ready = status.get("readyReplicas")
    if ready is not None:
        row("ready", f"{ready}/{(obj.get('spec') or {}).get('replicas', 1)} engines serve")
    for blocked in status.get("blocked") or []:
        when = age(blocked.get("at"), now)
        row("blocked", blocked.get("revision") or "", f"{when} ago" if when else "", blocked.get("reason") or "")
    action = status.get("lastAction") or {}
    row("last ask", action.get("result") or "")
    verdict = analysis(status.get("analysis") or {}, color)
    if verdict:
        lines += ["", verdict]
    return "\n".join(lines)


def _set(state: Object | None) -> list[str]:
    if not state:
        return []
    accept = state.get("acceptLength")
    return [
        state.get("revision") or "",
        state.get("algorithm") or "",
        f"accept length {accept}" if accept else "",
        short_image(state.get("image") or ""),
    ]


def short_image(image: str) -> str:
    """Repository's last part and twelve digits of the digest: enough to recognise, short enough for a row."""
    repository, _, digest = image.partition("@sha256:")
    return f"{repository.rpartition('/')[2]}@{digest[:12]}" if digest else image


def analysis(state: Object, color: bool) -> str:
    """A verdict as a table and its sentence; empty without one."""
    metrics = state.get("metrics") or []
    if not metrics and not state.get("reason"):
        return ""
    lines = []
    if metrics:
        head = ["METRIC", "BASELINE", "CANARY", "DIFFERENCE", "INTERVAL", "NEEDS", "PAIRS", "OUTCOME"]
        lines.append(table(head, [_metric(m) for m in metrics], OUTCOME_STYLES if color else None))
    word = _outcome(state.get("outcome"))
    counts = f"{state.get('pairs') or 0} pairs" + (f", {state['errors']} unusable" if state.get("errors") else "")
    said = f": {state['reason']}" if state.get("reason") else ""
    lines.append(f"verdict: {paint(word, OUTCOME_STYLES.get(word, ''), color)} ({counts}){said}")
    return "\n".join(lines)


def _outcome(word: str | None) -> str:
    return {"notYet": "not yet", None: "none", "": "none"}.get(word, word or "none")


def _metric(m: Object) -> list[str]:
    kind = m.get("metric") or ""
    low, high, needs = m.get("low"), m.get("high"), m.get("threshold")
    pairs = str(m.get("pairs") or 0)
    if kind == "parity":
        found = m.get("estimate")
        return [
            kind,
            _number(m.get("baseline"), 0),
            _number(m.get("canary"), 0),
            f"{_number(found, 0)} unexplained" if found is not None else "",
            "",
            f"at most {_number(needs, 0)}" if needs is not None else "",
            pairs,
            _outcome(m.get("outcome")),
        ]
    if kind.startswith("prometheus/"):
        return [kind, "", _number(m.get("canary")), "", "", _between(low, high), "", _outcome(m.get("outcome"))]
    tested = kind != "aggregateThroughput"  # a rule has no interval
    return [
        kind,
        _number(m.get("baseline")),
        _number(m.get("canary")),
        _percent(m.get("estimate")),
        _interval(low, high) if tested else "",
        f"above {_percent(needs)}" if needs is not None else "",
        pairs,
        _outcome(m.get("outcome")),
    ]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any, digits: int | None = None) -> str:
    if not _finite(value):
        return ""
    if digits is None:
        digits = 2 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"


def _percent(value: Any) -> str:
    return f"{value * 100:+.1f}%" if _finite(value) else ""


def _interval(low: Any, high: Any) -> str:
    """The interval of a relative difference. Ends that mean nothing yet (a loss of all, a gain of a thousandfold)
    read "any".
    """
    if low is None and high is None:
        return ""
    below = _percent(low) if _finite(low) and low > -1 else ""
    above = _percent(high) if _finite(high) and high < UNBOUNDED else ""
    return f"{below or 'any'} to {above or 'any'}"


def _between(low: Any, high: Any) -> str:
    if _finite(low) and _finite(high):
        return f"{low:g} to {high:g}"
    if _finite(low):
        return f"at least {low:g}"
    return f"at most {high:g}" if _finite(high) else ""


def history(obj: Object, color: bool, now: datetime | None = None) -> str:
    """Table of past rollouts, newest last."""
    head = ["NUMBER", "REVISION", "RESULT", "ALGORITHM", "ACCEPT", "TOK/S", "AGE", "BY", "REASON"]
    rows = [
        [
            str(e.get("number") or ""),
            e.get("revision") or "",
            e.get("result") or "",
            e.get("algorithm") or "",
            e.get("acceptLength") or "",
            e.get("throughput") or "",
            age(e.get("at"), now),
            e.get("by") or "",
            e.get("reason") or "",
        ]
        for e in status_of(obj).get("history") or []
    ]
    return table(head, rows, RESULT_STYLES if color else None)


def history_entry(entry: Object) -> str:
    """Everything that the history says of one revision, in rows."""
    names = {
        "number": "number",
        "revision": "revision",
        "result": "result",
        "reason": "reason",
        "cause": "cause",
        "by": "by",
        "at": "at",
        "algorithm": "algorithm",
        "image": "image",
        "acceptLength": "accept length",
        "throughput": "tok/s",
        "verdictDigest": "verdict",
        "wentBackTo": "went back to",
    }
    rows = [(label, str(entry[key])) for key, label in names.items() if entry.get(key)]
    alert = entry.get("alert") or {}
    if alert:
        labels = ", ".join(f"{k}={v}" for k, v in sorted((alert.get("labels") or {}).items()))
        rows.append(("alert", f"{alert.get('name')}, since {alert.get('startsAt')}"))
        rows.append(("", labels))
    rows += [("log", f"{e.get('at')}  {e.get('by')}: {e.get('text')}") for e in entry.get("log") or []]
    return "\n".join(f"{label:<14}{value}".rstrip() for label, value in rows)


def nodes(obj: Object, color: bool) -> str:
    """Table of nodes and why each does or does not fit."""
    rows = [
        [
            n.get("name") or "",
            "yes" if n.get("fits") else "no",
            str(n.get("free", "")),
            n.get("product") or "",
            n.get("reason") or "",
        ]
        for n in status_of(obj).get("nodes") or []
    ]
    return table(["NODE", "FITS", "FREE", "PRODUCT", "REASON"], rows, {"yes": "green", "no": "red"} if color else None)


def find_entry(obj: Object, wanted: str | None) -> Object | None:
    """A history entry by number, hash or the hash's beginning; the newest when none is named."""
    entries: list[Object] = status_of(obj).get("history") or []
    if wanted is None:
        return entries[-1] if entries else None
    by_number = [e for e in entries if str(e.get("number")) == wanted]
    by_hash = [e for e in entries if str(e.get("revision") or "").startswith(wanted)] if len(wanted) >= 4 else []
    return next(iter(by_number or by_hash[::-1]), None)
