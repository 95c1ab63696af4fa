"""What people (or alerts) ask for: each request acted on once, and recorded with who and what came of it."""

from __future__ import annotations

from dataclasses import replace

from ddtree_operator.api.actions import ActionRequest, Verb
from ddtree_operator.core.facts import Progress, Revision
from ddtree_operator.core.rolling import roll_back, verdict_so_far
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip

BACKWARD = {Verb.ABORT, Verb.UNDO, Verb.PAUSE}  # done even while the spec has a mistake


def obey(r: Round, wanted: Revision, serving: Revision | None) -> Revision:
    """Carry out the pending request, if it is new. Returns the wanted revision as it is afterwards."""
    request = r.seen.request
    if request is None or any(request.id == rev.handled for rev in r.revisions.values()):
        return wanted
    if request.revision and request.revision not in {wanted.hash, str(wanted.number)}:
        note = f"{request.verb} refused: it names revision {request.revision}, the current one is {wanted.hash}"
    else:
        note = _do(r, request, wanted, serving)
    refused = " refused: " in note
    r.emit("Warning" if refused else "Normal", "RequestRefused" if refused else "RequestDone", clip(note))
    now = r.revisions[wanted.hash]
    if not refused:
        now = r.log(now, str(request.verb), request.by or "someone", note)
    return r.save(now, handled=request.id, handled_note=clip(note), handled_at=r.now)


def _do(r: Round, request: ActionRequest, wanted: Revision, serving: Revision | None) -> str:
    who = request.by or "someone"
    why = f" ({request.reason})" if request.reason else ""
    verb = request.verb
    if r.mistake and verb not in BACKWARD:
        return f"{verb} refused: the spec has a mistake, correct it first ({r.mistake})"
    open_ = not wanted.blocked and wanted.result != "promoted" and wanted.progress is not None
    if verb is Verb.RETRY:
        if not wanted.blocked:
            return f"retry refused: revision {wanted.number} is not blocked"
        wanted = r.save(wanted, result="", reason="", cause="", by=who, attempt=wanted.attempt + 1, progress=None)
        # The image may have been lost: it is looked for anew.
        r.save(wanted, fallback="", watched="", summary={}, image="")
        return f"retry of revision {wanted.number} by {who}{why}"
    if verb is Verb.UNDO:
        return _undo(r, request, wanted, serving, who, why)
    if not open_:
        return f"{verb} refused: no rollout is in progress"
    progress = wanted.progress
    assert progress is not None
    if verb is Verb.ABORT:
        so_far = r.save(wanted, **verdict_so_far(r, wanted))
        roll_back(r, so_far, f"aborted by {who}{why}", "person", result="aborted", by=who)
        return f"abort of revision {wanted.number} by {who}{why}"
    if verb is Verb.PAUSE:
        r.save(wanted, progress=replace(progress, held=True, note=f"paused by {who}{why}"))
        return f"paused by {who}{why}"
    if verb is Verb.RESUME:
        if not progress.held:
            return "resume refused: the rollout is not paused"
        r.save(wanted, progress=replace(progress, held=False, note="", since=r.now, step_since=r.now))
        return f"resumed by {who}{why}"
    return _pass_step(r, request, wanted, progress, who, why)


def _pass_step(r: Round, request: ActionRequest, wanted: Revision, progress: Progress, who: str, why: str) -> str:
    """promote: end a pause. skip: pass over the current step, an analysis too, for a stated reason."""
    steps = r.spec.canary.steps
    if progress.step >= len(steps):
        if progress.held:
            return f"{request.verb} refused: every step is done; ddtreectl rollout resume lets the promotion go on"
        return f"{request.verb} refused: every step is done, the revision is being promoted"
    step = steps[progress.step]
    if request.verb is Verb.PROMOTE and not progress.held and step.pause is None:
        return "promote refused: the rollout waits for nothing; skip --reason passes over a running analysis"
    if request.verb is Verb.SKIP and not request.reason:
        return "skip refused: it needs a reason"
    r.save(
        wanted,
        progress=replace(progress, step=progress.step + 1, step_since=r.now, since=r.now, held=False, note=""),
        **verdict_so_far(r, wanted),
    )
    return f"step {progress.step + 1} ({step.kind}) passed over by {who}{why}"


def _undo(r: Round, request: ActionRequest, wanted: Revision, serving: Revision | None, who: str, why: str) -> str:
    """Go back to a revision that served before; the wanted one is blocked, the spec stays as it is."""
    leaving = {wanted.hash} | ({serving.hash} if serving and serving.hash == wanted.hash else set())
    past = [p for p in r.promoted() if p.hash not in leaving]
    if request.to:
        past = [p for p in past if request.to in {p.hash, str(p.number)}]
    if not past:
        return f"undo refused: no earlier promoted revision{f' {request.to}' if request.to else ''} is kept"
    to = past[0]
    reason = clip(f"undone by {who}{why}")
    r.save(wanted, result="undone", reason=reason, cause="person", at=r.now, by=who, fallback=to.hash)
    return f"undo to revision {to.number} ({to.hash}) by {who}{why}"
