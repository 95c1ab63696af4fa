"""Analysis records: read from the cluster's ConfigMaps (or a file) and judged again, here."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_operator.api.names import LABEL_REVISION, LIVE_PREFIX

if TYPE_CHECKING:
    from ddtree_operator.analysis.pace import Pace

FILE = "pairs.jsonl.gz"  # key of the ConfigMap that holds a record


@dataclass(frozen=True, slots=True)
class Replay:
    """A record and what comes of judging it again."""

    title: str
    verdict: dict[str, Any]  # as kept, in the status' form
    digest: str
    same: bool | None  # None: it could not be judged again
    note: str
    data: bytes = field(default=b"", repr=False)  # the record as it is kept

    def shown(self) -> dict[str, Any]:
        """All but the record itself, as plain data."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "digest": self.digest,
            "same": self.same,
            "note": self.note,
        }


def of_revision(config_maps: Iterable[dict[str, Any]], revision: str) -> list[Replay]:
    """Replays of the records of one revision, in the order of attempts and steps."""
    found = []
    for obj in config_maps:
        meta = obj["metadata"]
        packed = (obj.get("binaryData") or {}).get(FILE)
        if (meta.get("labels") or {}).get(LABEL_REVISION) == revision and packed:
            found.append((meta["name"], base64.b64decode(packed)))
    return [replay(data, name) for name, data in sorted(found, key=lambda item: _order(item[0]))]


def _order(name: str) -> tuple[int, ...]:
    """Attempt and step of ``<cr>-<revision>-a0-s1``, as numbers."""
    parts = name.rsplit("-", 2)[-2:]
    return tuple(int(p[1:]) if p[1:].isdigit() else 0 for p in parts)


def replay(data: bytes, title: str) -> Replay:
    """Judge one record again with the rules of this version."""
    from ddtree_operator.analysis import record

    try:
        kept = record.load(data)
        digest = record.digest(data)
    except record.RecordError as exc:
        return Replay(title, {}, "", None, str(exc), data)
    verdict = _plain(kept.verdict)
    step = kept.notes.get("step", "")
    title = f"{title} (attempt {int(kept.notes.get('attempt', 0)) + 1}, step {int(step) + 1})" if step else title
    try:
        again = _plain(record.recompute(kept))
    except record.RecordError as exc:
        return Replay(title, verdict, digest, None, str(exc), data)
    same = repr(again) == repr(verdict)
    users = sum(pair.canary.prompt_id.startswith(LIVE_PREFIX) for pair in kept.pairs)
    pairs = f"{len(kept.pairs)} pairs" + (f" ({users} with prompts of users, whose text is not kept)" if users else "")
    note = f"judged again here from {pairs}: " + ("the same verdict" if same else f"now {again['outcome']}")
    if kept.policy.tie_gap_from:
        note += f"; ties: gaps up to {kept.policy.tie_gap:g} ({kept.policy.tie_gap_from})"
    return Replay(title, verdict, digest, same, note, data)


def deciding(replays: list[Replay], digest: str) -> Replay | None:
    """The record with that digest, else the newest that can be read."""
    readable = [r for r in replays if r.verdict]
    return next((r for r in readable if r.digest == digest), readable[-1] if readable else None)


def altered(replays: list[Replay], digest: str) -> str:
    """What is wrong when the verdict that decided had a digest and no kept record has it; "" when all is well."""
    if not digest or not replays or any(r.digest == digest for r in replays):
        return ""
    return f"no kept record has the digest of the verdict that decided ({digest}): the record was altered, or is gone"


def pace_of(data: bytes) -> Pace | None:
    """Seconds and spread of a record's pairs; None with too few. Raises ValueError for a damaged record."""
    from ddtree_operator.analysis import record
    from ddtree_operator.analysis.pace import pace

    return pace(record.load(data).pairs)


def pictures(data: bytes, metrics: list[str], svg: bool) -> str:
    """Intervals over pairs against the thresholds, one below the other. Raises ValueError for an unknown metric."""
    from ddtree_operator.analysis import plot, record

    kept = record.load(data)
    steps = record.timeline(kept)
    if not steps:
        raise ValueError("the record holds no pairs, so there is nothing to draw")
    wanted = metrics or [g.metric for g in kept.policy.gates]
    series = [(plot.metric_series(steps, m), m) for m in wanted]
    if svg:
        return plot.sheet([(s, f"{m}: {s[-1].outcome} after {s[-1].pairs} pairs") for s, m in series])
    return "\n\n".join(f"{m} (canary against baseline, by pairs)\n{plot.text(s)}" for s, m in series)


def _plain(verdict: Any) -> dict[str, Any]:
    """A verdict in the form of ``status.analysis``."""
    out: dict[str, Any] = asdict(verdict)
    out["outcome"] = str(out["outcome"])
    out["metrics"] = [{**m, "outcome": str(m["outcome"])} for m in out["metrics"]]
    return out
