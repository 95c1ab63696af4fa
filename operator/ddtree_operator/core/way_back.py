"""Before a canary starts: could what serves now be started again, once the canary has taken its place?"""

from __future__ import annotations

from dataclasses import replace

from ddtree_operator.core.actions import KeepImage
from ddtree_operator.core.facts import Revision
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip


def secured(r: Round, revision: Revision, stable: Revision | None) -> bool | str:
    """True to go on; False when a person was asked; else what to wait for, in words.

    Asked once a rollout: who resumes it goes on without a way back.
    """
    progress, found = revision.progress, r.seen.way_back
    if stable is None or progress is None or r.engines_of(revision) is not None:
        return True
    if progress.asked:
        if progress.held:
            r.report.phase, r.report.message = "Paused", progress.note
        return not progress.held
    if found is None:
        return True
    if found.state == "away":
        r.report.phase, r.report.obstacle = "Starting", "RegistryUnreachable"
        r.report.message = f"the image to go back to cannot be looked for: {found.message}"
        return r.report.message
    if found.state == "lost":
        note = (
            f"revision {stable.number} serves, but its registry has lost {found.message} of {stable.image}: after a "
            "promotion there would be no way back; push it again and say ddtreectl rollout resume (which also goes on "
            "without it), or abort"
        )
        r.save(revision, progress=replace(progress, asked=True, held=True, note=clip(note)))
        r.emit("Warning", "RollbackImageLost", clip(note))
        r.report.phase, r.report.message = "Paused", clip(note)
        return False
    if not found.kept:
        r.actions.append(KeepImage(stable))
    return True
