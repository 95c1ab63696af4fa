"""Alertmanager's webhook body, version 4, as typed data. Everything in it is distrusted until it has been checked."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddtree_operator.api.names import NAME_MAX, NAME_PATTERN

LABEL_NAMESPACE = "namespace"
LABEL_RESOURCE = "ddtreedeployment"
LABEL_REVISION = "revision"
MAX_ALERTS = 500  # in one notification
MAX_LABELS = 64
KEPT_LABELS = 12
KEPT_CHARS = 120  # of names and values that are recorded
MAX_CHARS = 2000  # of a value that comes in

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(NAME_PATTERN.strip("^$"))
_REVISION = re.compile(r"[0-9a-f]{10}")
_FINGERPRINT = re.compile(r"[0-9a-f]{1,64}")


class NotificationError(ValueError):
    """The body is not a notification of version 4; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert of a notification. ``problem`` says in one sentence why it cannot be about any revision."""

    firing: bool
    fingerprint: str
    starts_at: float  # epoch seconds
    name: str
    summary: str
    labels: dict[str, str]
    problem: str = ""

    @property
    def namespace(self) -> str:
        """Namespace of the resource that it names."""
        return self.labels.get(LABEL_NAMESPACE, "")

    @property
    def resource(self) -> str:
        """Name of the resource."""
        return self.labels.get(LABEL_RESOURCE, "")

    @property
    def revision(self) -> str:
        """Hash of the revision."""
        return self.labels.get(LABEL_REVISION, "")

    @property
    def id(self) -> str:
        """What a repeated notification of the same alert about the same revision has in common."""
        text = f"{self.fingerprint}\n{self.starts_at!r}\n{self.namespace}/{self.resource}/{self.revision}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Notification:
    """A whole notification."""

    alerts: tuple[Alert, ...]
    truncated: int  # alerts that Alertmanager left out (max_alerts)


def parse(body: bytes) -> Notification:
    """Raises NotificationError when the body as a whole is unusable; alerts are judged one by one."""
    try:
        raw = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotificationError("the body is not JSON") from None
    if not isinstance(raw, dict) or raw.get("version") != "4":
        raise NotificationError('the body is not a webhook notification of Alertmanager with version "4"')
    alerts, truncated = raw.get("alerts"), raw.get("truncatedAlerts", 0)
    if not isinstance(alerts, list) or not all(isinstance(a, dict) for a in alerts):
        raise NotificationError("alerts is not a list of alerts")
    if len(alerts) > MAX_ALERTS:
        raise NotificationError(f"{len(alerts)} alerts in one notification; set max_alerts to {MAX_ALERTS} or less")
    if not isinstance(truncated, int) or truncated < 0:
        raise NotificationError("truncatedAlerts is not a number of alerts")
    return Notification(tuple(_alert(a) for a in alerts), int(truncated))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _alert(raw: dict[str, Any]) -> Alert:
    problem = ""
    labels, notes = raw.get("labels"), raw.get("annotations")
    if not _texts(labels):
        labels, problem = {}, "its labels are not texts"
    assert isinstance(labels, dict)
    status, starts_at = raw.get("status"), _time(raw.get("startsAt"))
    if status not in {"firing", "resolved"}:
        problem = problem or "its status is neither firing nor resolved"
    if starts_at is None:
        problem = problem or "its startsAt is not a time"
    fingerprint = raw.get("fingerprint")
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        problem = problem or "its fingerprint is missing"
        fingerprint = ""
    return Alert(
        firing=status == "firing",
        fingerprint=fingerprint,
        starts_at=starts_at or 0.0,
        name=_line(labels.get("alertname", "")) or "without a name",
        summary=_line(notes.get("summary", "")) if isinstance(notes, dict) else "",
        labels=labels,
        problem=problem or _misnamed(labels),
    )


def _misnamed(labels: dict[str, str]) -> str:
    """What is wrong with the three labels that say which revision an alert is about."""
    namespace, resource, revision = (labels.get(x, "") for x in (LABEL_NAMESPACE, LABEL_RESOURCE, LABEL_REVISION))
    missing = [x for x in (LABEL_NAMESPACE, LABEL_RESOURCE, LABEL_REVISION) if not labels.get(x)]
    if missing:
        return f"it has no label {missing[0]}"
    if not _NAMESPACE.fullmatch(namespace):
        return "its label namespace is not the name of a namespace"
    if len(resource) > NAME_MAX or not _NAME.fullmatch(resource):
        return f"its label {LABEL_RESOURCE} is not the name of a DDTreeDeployment"
    if not _REVISION.fullmatch(revision):
        return "its label revision is not a revision's hash (10 hex digits)"
    return ""


def _texts(labels: Any) -> bool:
    return (
        isinstance(labels, dict)
        and len(labels) <= MAX_LABELS
        and all(isinstance(v, str) and len(v) <= MAX_CHARS for v in labels.values())
    )


def _line(value: Any) -> str:
    return " ".join(value.split())[:KEPT_CHARS] if isinstance(value, str) else ""


def _time(value: Any) -> float | None:
    """Epoch seconds of an RFC 3339 time with a zone; None for anything else."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        at = datetime.fromisoformat(value)
        seconds = at.timestamp() if at.tzinfo is not None else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def kept_labels(alert: Alert) -> dict[str, str]:
    """The labels as they are recorded: not more of them, and none longer, than the status has room for."""
    first = (LABEL_NAMESPACE, LABEL_RESOURCE, LABEL_REVISION, "alertname", "severity")
    names = [x for x in first if x in alert.labels] + sorted(x for x in alert.labels if x not in first)
    return {x[:KEPT_CHARS]: alert.labels[x][:KEPT_CHARS] for x in names[:KEPT_LABELS]}
