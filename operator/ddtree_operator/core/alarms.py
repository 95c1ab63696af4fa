"""What alerts ask for: each is judged once, for the revision it names, and recorded with what came of it.

An alert can only take back the step that the spec last made: the canary in progress, or a promotion that is still
watched. It never moves away from a revision that was gone back to, so it cannot revert a revert.
"""

from __future__ import annotations

from typing import Any

from ddtree_operator.core.facts import AlertFact, Revision
from ddtree_operator.core.rolling import roll_back
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip, iso, seconds

SKEW = 60.0  # seconds that Prometheus' clock may be behind ours
STALE = 3600.0  # seconds after which a recorded alert says nothing about now: the operator was away
KEPT = 20  # judged alerts that a revision remembers

ACTED, DRY, IGNORED = "rolledBack", "dryRun", "ignored"


def heed(r: Round, wanted: Revision) -> Revision:
    """Judge the recorded alerts that were not judged yet. Returns the wanted revision as it is afterwards."""
    for alert in sorted(r.seen.alerts, key=lambda a: (a.at, a.id)):
        named = r.revisions.get(alert.revision)
        if named is None or any(x.get("id") == alert.id for x in named.alarms):
            continue
        outcome, note = _judge(r, alert, named, r.revisions[wanted.hash])
        entry: dict[str, Any] = {
            "id": alert.id,
            "name": alert.name,
            "at": alert.at,
            "startsAt": iso(alert.starts_at),
            "outcome": outcome,
            "note": clip(note, 300),
            "labels": alert.labels,
        }
        named = r.revisions[named.hash]
        named = r.save(named, alarms=(*named.alarms, entry)[-KEPT:])
        if outcome == ACTED:  # its Event is that of the rollback
            r.log(named, "alert", f"alert {alert.name}", note)
        else:
            r.emit("Warning", "AlertDryRun" if outcome == DRY else "AlertIgnored", clip(f"alert {alert.name}: {note}"))
    return r.revisions[wanted.hash]


def _judge(r: Round, alert: AlertFact, named: Revision, wanted: Revision) -> tuple[str, str]:
    """What comes of one alert, and why. Does it, when it is to be done."""
    policy, number = r.spec.rollback.alerts, f"revision {named.number} ({named.hash})"
    if not policy.enabled:
        return IGNORED, "spec.rollback.alerts.enabled is false"
    if named.blocked:
        return IGNORED, f"{number} is {named.result} already"
    if named.hash != wanted.hash:
        return IGNORED, f"it names {number}, the spec asks for revision {wanted.number} ({wanted.hash})"
    if named.progress is None:
        return IGNORED, f"{number} has not been started"
    if alert.starts_at < named.progress.started_at - SKEW:
        return IGNORED, f"it began at {iso(alert.starts_at)}, before this attempt at {number}"
    if r.now - alert.at > STALE:
        return IGNORED, f"it was recorded at {iso(alert.at)}, too long ago to say anything about now"
    why = f"alert {alert.name}" + (f": {alert.summary}" if alert.summary else "")
    if named.result != "promoted":
        if policy.dry_run:
            return DRY, f"would remove the canary of {number}, but spec.rollback.alerts.dryRun is true"
        roll_back(r, named, why, "alert", by=f"alert {alert.name}")
        return ACTED, f"the canary of {number} was removed"
    if named.returned:
        return IGNORED, f"{number} is what was gone back to, and an alert never reverts a revert"
    if alert.at > named.at + seconds(r.spec.rollback.watch):
        return (
            IGNORED,
            f"{number} was promoted at {iso(named.at)}, more than rollback.watch ({r.spec.rollback.watch}) ago",
        )
    past = [p for p in r.promoted() if p.hash != named.hash]
    if not past:
        return IGNORED, f"there is no earlier promoted revision to go back to from {number}"
    if policy.dry_run:
        return DRY, f"would go back from {number} to revision {past[0].number}, but spec.rollback.alerts.dryRun is true"
    roll_back(r, named, why, "alert", by=f"alert {alert.name}", fallback=past[0].hash)
    return ACTED, f"went back from {number} to revision {past[0].number} ({past[0].hash})"
