"""``rollout promote|abort|retry|undo|pause|resume|skip``: commands, sent by one annotation on the resource.

The operator acts on it when it is up, once per id; nothing is lost while it is down. What is plainly senseless is
refused here, from the status, unless the operator has not caught up with the spec yet.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ddtree_operator.api.names import ANNOTATION_ACTION
from ddtreectl import kube, options, output, view
from ddtreectl.exits import CliError, Exit

WAIT_SECONDS = 30.0
RUNNING = ("Building", "Placing", "Starting", "Analyzing", "Paused", "Promoting", "Pending")

Reason = Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; kept in the history.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the operator has taken it, and show what came of it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Have the server check it without doing it.")]


VERBS = {
    "promote": "Go on from a pause, or accept a canary whose analysis was inconclusive.",
    "abort": "End a rollout: the canary goes, the stable set serves on, this spec is blocked.",
    "pause": "Hold a rollout where it is.",
    "resume": "Let a held rollout go on.",
    "skip": "Pass over the current step, an analysis too; needs --reason.",
    "retry": "Try a spec again that was rolled back.",
}


def command(verb: str, help_: str) -> Callable[..., int]:
    """The command of one of VERBS: they differ in nothing but what they ask for."""

    @options.connected
    def run(
        name: options.Name,
        reason: Reason = "",
        wait: Wait = False,
        dry_run: DryRun = False,
        where: options.Where = options.HERE,
    ) -> int:
        if verb == "skip" and not reason:
            raise CliError("skip passes over a check, so it needs --reason TEXT")
        return _act(verb, name, reason, wait, dry_run, where)

    run.__name__, run.__doc__ = verb, help_
    return run


@options.connected
def undo(
    name: options.Name,
    to_revision: Annotated[
        str | None, typer.Option("--to-revision", metavar="REV", help="Number or hash; else the one before.")
    ] = None,
    reason: Reason = "",
    wait: Wait = False,
    dry_run: DryRun = False,
    where: options.Where = options.HERE,
) -> int:
    """Go back to a revision that served before; the present spec is blocked, not changed."""
    to = None if to_revision in (None, "0") else to_revision  # kubectl writes 0 for "the one before"
    return _act("undo", name, reason, wait, dry_run, where, to)


def _act(
    verb: str, name: str, reason: str, wait: bool, dry_run: bool, where: options.Where, to: str | None = None
) -> int:
    cluster = kube.connect(*where)
    obj = cluster.get(name)
    if view.seen(obj):
        refuse_senseless(verb, obj, to)
    if verb == "undo" and to is not None:
        to = _target(obj, to)
    text, id_ = request(verb, obj, reason, cluster.user, to)
    cluster.annotate(name, ANNOTATION_ACTION, text, dry_run)
    if dry_run:
        print(f"{verb} of {name} would be sent (server dry run)")
        return Exit.DONE
    print(f"{verb} of {name} sent")
    if not wait:
        output.hint(f"follow it with: ddtreectl rollout status {name} --watch")
        return Exit.DONE
    return _wait(cluster, name, id_)


def request(verb: str, obj: kube.Object, reason: str, user: str, to: str | None) -> tuple[str, str]:
    """The annotation's value and its id. It names the revision that was looked at, so that no newer one is hit."""
    from pydantic import ValidationError

    from ddtree_operator.api.actions import ActionRequest

    fields: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "verb": verb,
        "by": user[:200],
        "reason": reason,
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if view.seen(obj) and view.status_of(obj).get("revision"):
        fields["revision"] = view.status_of(obj)["revision"]
    if to is not None:
        fields["to"] = to
    try:
        made = ActionRequest.model_validate(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise CliError(f"{first['loc'][0]}: {first['msg'].lower()}") from None
    return made.model_dump_json(exclude_defaults=True), made.id


def refuse_senseless(verb: str, obj: kube.Object, to: str | None) -> None:
    """Raise CliError when the status shows that the command can have no effect."""
    name, status = obj["metadata"]["name"], view.status_of(obj)
    phase = status.get("phase") or "Pending"
    revision = status.get("revision") or ""
    blocked = {b.get("revision") for b in status.get("blocked") or []}
    match verb:
        case "retry":
            if phase != "RolledBack" and revision not in blocked:
                raise CliError(f"nothing to retry: revision {revision} of {name} is not blocked (phase {phase})")
        case "undo":
            past = _past(obj)
            if not past:
                raise CliError(f"nothing to go back to: {name} has no earlier promoted revision")
        case "resume":
            if phase != "Paused":
                raise CliError(f"nothing to resume: {name} is not paused (phase {phase})")
        case _:
            standing = phase == "Invalid" and status.get("canary")  # it can be ended before the spec is corrected
            if (phase not in RUNNING and not standing) or revision in blocked:
                raise CliError(f"nothing to {verb}: {name} has no rollout in progress (phase {phase})")


def _past(obj: kube.Object) -> list[kube.Object]:
    """Promoted revisions other than the one that the spec asks for, newest last."""
    status = view.status_of(obj)
    entries: list[kube.Object] = status.get("history") or []
    return [e for e in entries if e.get("result") == "promoted" and e.get("revision") != status.get("revision")]


def _target(obj: kube.Object, wanted: str) -> str:
    """Hash of the revision that ``--to-revision`` names; it must have served before. Raises CliError."""
    entry = view.find_entry(obj, wanted)
    choices = ", ".join(f"{e.get('number')} ({e.get('revision')})" for e in _past(obj)) or "none"
    if entry is None:
        raise CliError(f"no revision {wanted} in the history; those that served before: {choices}", Exit.NOT_FOUND)
    if entry.get("result") != "promoted":
        raise CliError(f"revision {wanted} never served ({entry.get('result')}); those that did: {choices}")
    return str(entry["revision"])


def _wait(cluster: kube.Cluster, name: str, id_: str) -> int:
    """Until the operator reports this id, or WAIT_SECONDS."""
    end = time.monotonic() + WAIT_SECONDS
    while (left := end - time.monotonic()) > 0:
        for obj in cluster.changes(name, min(left, 10.0)):
            action = view.status_of(obj).get("lastAction") or {}
            if action.get("id") == id_:
                said = action.get("result") or "taken"
                print(said)
                return Exit.ERROR if " refused: " in said else Exit.DONE
    output.hint(f"the operator has not answered within {WAIT_SECONDS:.0f} s; it will act when it is up")
    return Exit.GOING
