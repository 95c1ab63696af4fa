"""Analysis records: read from the cluster's ConfigMaps (or a file) and judged again, here."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ddtree_operator.api.names import LABEL_REVISION

FILE = "pairs.jsonl.gz"  # key of the ConfigMap that holds a record


@dataclass(frozen=True, slots=True)
class Replay:
    """A record and what comes of judging it again."""

    title: str
    verdict: dict[str, Any]  # as kept, in the status' form
    digest: str
    same: bool | None  # None: it could not be judged again
    note: str


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
        return Replay(title, {}, "", None, str(exc))
    verdict = _plain(kept.verdict)
    step = kept.notes.get("step", "")
    title = f"{title} (attempt {int(kept.notes.get('attempt', 0)) + 1}, step {int(step) + 1})" if step else title
    try:
        again = _plain(record.recompute(kept))
    except record.RecordError as exc:
        return Replay(title, verdict, digest, None, str(exc))
    same = repr(again) == repr(verdict)
    pairs = len(kept.pairs)
    note = f"judged again here from {pairs} pairs: " + ("the same verdict" if same else f"now {again['outcome']}")
    return Replay(title, verdict, digest, same, note)


def _plain(verdict: Any) -> dict[str, Any]:
    """A verdict in the form of ``status.analysis``."""
    out: dict[str, Any] = asdict(verdict)
    out["outcome"] = str(out["outcome"])
    out["metrics"] = [{**m, "outcome": str(m["outcome"])} for m in out["metrics"]]
    return out
