"""Reads the state of a build from its Job and pods. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .failure import diagnose
from .fetching import CONTAINER as FETCH
from .job import CONTAINER

State = Literal["running", "done", "failed"]

_STUCK = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where a build stands.

    ``digest`` (sha256:…) is set when done, unless the pods are already gone: then ask the registry for the tag.
    ``sentence`` says why it failed, or what a running build waits for. ``heals``: a new attempt later may succeed.
    """

    state: State
    digest: str | None = None
    sentence: str = ""
    heals: bool = False
    attempts: int = 0


def job_result(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()
) -> BuildResult:
    """State of the build from its Job object, the pods that belong to it and events on these (in any order).

    Only events tell why a Job gets no pod (quota, admission), or why a pod waits for a volume.
    """
    status = job.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or [] if c.get("status") == "True"}
    newest_first = sorted(pods, key=_created, reverse=True)
    attempts = int(status.get("failed") or 0) + int(status.get("succeeded") or 0) + int(status.get("active") or 0)
    attempts = max(attempts, len(newest_first))
    if status.get("succeeded") or "Complete" in conditions:
        digests = [d for pod in newest_first if (d := _digest(pod))]
        return BuildResult("done", digest=digests[0] if digests else None, attempts=attempts)
    ended = conditions.get("Failed") or conditions.get("FailureTarget")
    failures = [f for pod in newest_first if (f := _terminated(pod)) and f.get("exitCode") != 0]
    if ended is None:
        waiting = next((w for pod in newest_first if (w := _waiting(pod))), "")
        if not waiting and not any(_started(pod) for pod in newest_first):
            waiting = _event(events)
        if not waiting and failures:
            waiting = f"attempt {len(failures)} failed, trying again: " + _diagnose(failures[0]).sentence
        return BuildResult("running", sentence=waiting, heals=True, attempts=attempts)
    if ended.get("reason") == "DeadlineExceeded":
        limit = (job.get("spec") or {}).get("activeDeadlineSeconds")
        sentence = f"the build took longer than its timeout of {limit} s (spec.engine.build.timeout)"
        waiting = next((w for pod in newest_first if (w := _waiting(pod))), "")
        if waiting:
            sentence += f"; it waited: {waiting}"
        elif failures:
            sentence += f"; its last attempt: {_diagnose(failures[0]).sentence}"
        return BuildResult("failed", sentence=sentence, heals=True, attempts=attempts)
    if failures:
        failure = _diagnose(failures[0])
        tried = f" (tried {len(failures)} times)" if len(failures) > 1 else ""
        return BuildResult("failed", sentence=failure.sentence + tried, heals=failure.heals, attempts=attempts)
    message = ended.get("message") or ended.get("reason") or "no reason given"
    return BuildResult("failed", sentence=f"the build Job failed: {message}", heals=True, attempts=attempts)


def _diagnose(terminated: Mapping[str, Any]) -> Any:
    return diagnose(str(terminated.get("message") or ""), terminated.get("exitCode"))


def _created(pod: Mapping[str, Any]) -> str:
    return str((pod.get("metadata") or {}).get("creationTimestamp") or "")


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The builder's container; the one before it, which fetches wheels, while that is not done or when it failed."""
    status = pod.get("status") or {}
    for first in status.get("initContainerStatuses") or []:
        ended = (first.get("state") or {}).get("terminated")
        if first.get("name") == FETCH and (ended is None or ended.get("exitCode") != 0):
            found: Mapping[str, Any] = first
            return found
    statuses = status.get("containerStatuses") or []
    return next((s for s in statuses if s.get("name") == CONTAINER), {})


def _terminated(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = (_container(pod).get("state") or {}).get("terminated")
    if found is None and (pod.get("status") or {}).get("phase") == "Failed":
        status = pod["status"]
        reason = " ".join(str(status[k]) for k in ("reason", "message") if status.get(k))
        return {"exitCode": None, "message": f"error: the builder's pod failed: {reason or 'no reason given'}"}
    return found


def _digest(pod: Mapping[str, Any]) -> str | None:
    found = re.search(r"digest: (sha256:[0-9a-f]{64})", str((_terminated(pod) or {}).get("message") or ""))
    return found[1] if found else None


def _started(pod: Mapping[str, Any]) -> bool:
    state = _container(pod).get("state") or {}
    return "running" in state or "terminated" in state


def _event(events: Sequence[Mapping[str, Any]]) -> str:
    """The newest warning that explains why nothing starts."""
    told = {
        "FailedCreate": "the builder's pod cannot be created",
        "FailedMount": "the builder's pod does not start",
        "FailedScheduling": "the builder's pod is not scheduled",
    }
    warnings = [e for e in events if e.get("reason") in told]
    if not warnings:
        return ""
    last = max(warnings, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))
    message = re.sub(r"\s+", " ", str(last.get("message") or "")).removeprefix("Error creating: ")
    return f"{told[str(last['reason'])]}: {message[:300]}"


def needs_events(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the Job runs without a container that ever started, so that only events can say what it waits for."""
    conditions = {c.get("type") for c in (job.get("status") or {}).get("conditions") or []}
    return not conditions & {"Complete", "Failed"} and not any(_started(pod) for pod in pods)


def _waiting(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    waiting = (_container(pod).get("state") or {}).get("waiting") or {}
    if waiting.get("reason") in _STUCK:
        return f"the builder's pod does not start: {waiting['reason']}: {str(waiting.get('message') or '')[:300]}"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"the builder's pod is not scheduled: {str(condition.get('message') or '')[:300]}"
    return ""
