"""The alerts recorded on a revision: one annotation of its ControllerRevision, written by the receiver alone."""

from __future__ import annotations

import json
from typing import Any

from ddtree_operator.alerts.notification import Alert, kept_labels
from ddtree_operator.core.facts import AlertFact

ANNOTATION_ALERTS = "ddtree.dev/alerts"
KEPT = 10  # alerts recorded on one revision, the newest of them


def read(text: str | None, revision: str) -> tuple[AlertFact, ...]:
    """Recorded alerts, oldest first. What cannot be read counts as not recorded: the next notification brings it."""
    try:
        rows = json.loads(text or "[]")
        return tuple(_fact(row, revision) for row in rows[-KEPT:])
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def _fact(row: dict[str, Any], revision: str) -> AlertFact:
    labels = {str(k): str(v) for k, v in row.get("labels", {}).items()}
    return AlertFact(
        id=str(row["id"]),
        revision=revision,
        name=str(row["name"]),
        starts_at=float(row["startsAt"]),
        at=float(row["at"]),
        summary=str(row.get("summary", "")),
        labels=labels,
    )


def add(known: tuple[AlertFact, ...], alerts: list[Alert], now: float) -> str | None:
    """The annotation with these alerts in it; None when every one of them is recorded already."""
    ids = {k.id for k in known}
    new = [a for a in alerts if a.id not in ids]
    if not new:
        return None
    facts = [*known, *(_new(a, now) for a in {a.id: a for a in new}.values())]
    rows = [
        {"id": f.id, "name": f.name, "startsAt": f.starts_at, "at": f.at, "labels": f.labels}
        | ({"summary": f.summary} if f.summary else {})
        for f in facts[-KEPT:]
    ]
    return json.dumps(rows, sort_keys=True, separators=(",", ":"))


def _new(alert: Alert, now: float) -> AlertFact:
    return AlertFact(alert.id, alert.revision, alert.name, alert.starts_at, now, alert.summary, kept_labels(alert))
