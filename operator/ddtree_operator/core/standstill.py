"""While the spec has a mistake: no step is taken and nothing new begins, but what runs can still go back.

In force meanwhile are the settings of the last spec that held. The revision that it asked for remembers them, since
status may be wiped: an alert, an abort or an engine that crashes must not have to wait for somebody's next edit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddtree_operator.api.refusals import InvalidResourceError, not_yet
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.core import gateway, revisions
from ddtree_operator.core.actions import Analyze
from ddtree_operator.core.facts import EngineSet, Revision
from ddtree_operator.core.meanwhile import relieve, uphold
from ddtree_operator.core.rolling import analysis_failed, crashed
from ddtree_operator.core.round import Round


def in_force(
    raw: dict[str, Any], known: tuple[Revision, ...], sets: tuple[EngineSet, ...]
) -> tuple[DDTreeSpec | None, str]:
    """The settings to act by, and the mistake in the spec, "" where there is none.

    With a mistake they are those of the last spec that held, None when none is on record. ``replicas`` is followed as
    long as it holds by itself, so that an autoscaler goes on; else the size stays as it is.
    """
    try:
        parsed = revisions.parse(raw)
        if missing := not_yet(parsed):
            raise InvalidResourceError(missing)
    except ValueError as error:
        return _last(raw, known, sets), str(error)
    return parsed, ""


def _last(raw: dict[str, Any], known: tuple[Revision, ...], sets: tuple[EngineSet, ...]) -> DDTreeSpec | None:
    wanted = _wanted(known)
    if wanted is None:
        return None
    sizes = [s.replicas for s in sets if s.revision == wanted.hash and not s.baseline]
    for replicas in (raw.get("replicas"), max(sizes, default=None)):
        try:
            spec = revisions.parse({**wanted.settings, **wanted.spec, "replicas": replicas})
        except (TypeError, ValueError):
            continue
        # Another hash: it was recorded by an operator that read specs differently, and is not what would be acted on.
        return spec if revisions.revision_hash(spec) == wanted.hash else None
    return None


def _wanted(known: tuple[Revision, ...]) -> Revision | None:
    """The revision that the last spec which held asked for; None where no operator has noted it yet."""
    return max((rev for rev in known if rev.turn), key=lambda rev: rev.turn, default=None)


def remember(r: Round, wanted: Revision) -> Revision:
    """Keep with the revision that the spec asks for that it does, and the settings that are in force for it."""
    settings = revisions.settings_part(r.spec)
    newest = max((rev.turn for rev in r.revisions.values()), default=0)
    turn = wanted.turn if wanted.turn and wanted.turn == newest else newest + 1
    if (wanted.settings, wanted.turn) == (settings, turn):
        return wanted
    return r.save(wanted, settings=settings, turn=turn)


def stand_still(r: Round, revision: Revision, stable: Revision | None) -> None:
    """Hold a rollout where it is. Engines that fail and an analysis that fails end it as ever; a pass has to wait."""
    r.report.phase, r.report.canary = "Paused", revision.hash
    progress = revision.progress
    if progress is None:
        return
    if not progress.stuck:  # this time counts for no deadline
        revision = r.save(revision, progress=replace(progress, stuck=True))
    gateway.tidy(r, revision)
    relieve(r, revision, stable)
    uphold(r, revision, stable)
    canary, apart = r.engines_of(revision), r.engines_of(revision, baseline=True)
    if canary is None or crashed(r, revision, canary, "canary") or (apart and crashed(r, revision, apart, "baseline")):
        return
    baseline = apart or (r.engines_of(stable) if stable else None)
    found = r.seen.analysis
    if found is None or (found.revision, found.attempt, found.step) != (revision.hash, revision.attempt, progress.step):
        return
    if found.outcome == "fail":
        analysis_failed(r, revision, found)
    elif found.outcome == "notYet" and not found.exhausted and not (progress.held or progress.note) and baseline:
        r.actions.append(Analyze(revision.hash, revision.attempt, progress.step, baseline.name, canary.name))
