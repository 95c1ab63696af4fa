"""The time after a promotion: a revision that is not what its canary showed is taken back, or people are told."""

from __future__ import annotations

from ddtree_operator.core.actions import Watch
from ddtree_operator.core.facts import Revision
from ddtree_operator.core.rolling import roll_back
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip, seconds


def watch(r: Round, revision: Revision) -> None:
    """Keep the watch going while it lasts, and act on what it found, once."""
    length = seconds(r.spec.rollback.watch)
    left = revision.at + length - r.now
    if left <= 0 or revision.returned or revision.progress is None or revision.watched:
        return
    found = r.seen.watch
    if found is not None and (found.revision, found.attempt) == (revision.hash, revision.attempt) and found.failed:
        _fell(r, revision, found.reason)
        return
    engines = r.engines_of(revision)
    if engines is not None:
        r.actions.append(Watch(revision.hash, revision.attempt, engines.name, since=r.now - revision.at, length=length))
    r.wake_in(left)


def _fell(r: Round, revision: Revision, reason: str) -> None:
    past = [p for p in r.promoted() if p.hash != revision.hash]
    text = f"after promotion: {reason}"
    revision = r.log(revision, "watch", "operator", text)
    if past and r.spec.rollback.on_drop == "rollback":
        roll_back(r, r.save(revision, watched="rolledBack"), text, "watch", fallback=past[0].hash)
        return
    why = "rollback.onDrop is alert" if past else "there is no earlier promoted revision to go back to"
    r.save(revision, watched="told")
    r.emit("Warning", "WatchFailed", clip(f"{text}; {why}"))
