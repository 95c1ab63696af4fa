"""A revision on its way from spec to promotion: build, place, start, steps, promote, or roll back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddtree_operator.api.spec import BuildSpec, Step
from ddtree_operator.core import gateway, swap
from ddtree_operator.core.actions import Analyze, StartBuild
from ddtree_operator.core.engine_errors import error_line, refusal
from ddtree_operator.core.facts import AnalysisFact, EngineSet, Progress, Revision
from ddtree_operator.core.meanwhile import relieve, unstuck, uphold
from ddtree_operator.core.report import BUILD_FAILED
from ddtree_operator.core.revisions import baseline_speculative, engine_set_name
from ddtree_operator.core.round import Round
from ddtree_operator.core.units import clip, seconds
from ddtree_operator.core.waiting import obstacle, waiting_for
from ddtree_operator.core.way_back import secured

SPEC_PAUSED = "spec.paused is true"
CRASHES = 3  # restarts of one engine after which it counts as looping; a refusal counts at once


def roll(r: Round, revision: Revision, stable: Revision | None) -> None:
    """Take the next step of a rollout. ``stable`` serves meanwhile, None on a first rollout."""
    if revision.progress is None:
        revision = r.save(revision, progress=Progress(started_at=r.now, since=r.now, step_since=r.now))
        r.emit("Normal", "RolloutStarted", f"revision {revision.number} ({revision.hash}) started")
    r.report.canary = revision.hash
    gateway.tidy(r, revision)
    relieve(r, revision, stable)
    revision = unstuck(r, revision)
    if not _prepared(r, revision, stable):
        uphold(r, revision, stable)
        return
    revision = r.revisions[revision.hash]
    started = _engines(r, revision, stable)
    if started is None:
        r.report.phase = "Placing"
        r.report.message = f"a serving engine gives its GPU to the canary: {_placement(r)}"
        _late(r, revision, r.report.message)
        return
    canary, baseline, enough = started
    gateway.hold_back(r, revision, canary)
    if crashed(r, revision, canary, "canary") or (baseline.baseline and crashed(r, revision, baseline, "baseline")):
        return
    progress = revision.progress
    assert progress is not None
    if _paused(r, revision, progress):
        return
    if progress.step >= len(r.spec.canary.steps):
        _promote(r, revision, canary, stable, enough)
        return
    if not _started(r, revision, canary, baseline, enough):
        return
    _step(r, revision, canary, baseline, stable)


def _prepared(r: Round, revision: Revision, stable: Revision | None) -> bool:
    """True when there is nothing that engines of this revision have to wait for."""
    if r.seen.problems:
        r.report.phase, r.report.message = "Pending", r.seen.problems[0].message
        return False
    if not _image(r, revision) or not _placed(r, revision, stable):
        return False
    revision = r.revisions[revision.hash]
    if not revision.image or r.again:
        r.report.phase, r.report.message = "Starting", "image and nodes are known, the engines come next"
        return False
    way = secured(r, revision, stable)
    if isinstance(way, str):
        _late(r, revision, way)
    return way is True


def _paused(r: Round, revision: Revision, progress: Progress) -> bool:
    """Whether somebody holds the rollout. Time spent so counts for no deadline."""
    by_spec = progress.note == SPEC_PAUSED
    if r.spec.paused and not progress.held and not by_spec:
        revision = r.log(revision, "pause", "spec", SPEC_PAUSED)
        r.save(revision, progress=replace(progress, note=SPEC_PAUSED))
    elif by_spec and not r.spec.paused:
        revision = r.log(revision, "resume", "spec", "spec.paused is false again")
        r.save(revision, progress=replace(progress, note="", since=r.now, step_since=r.now))
    if not r.spec.paused and not progress.held:
        return by_spec  # just resumed: look again
    r.report.phase = "Paused"
    r.report.message = progress.note or SPEC_PAUSED
    _describe(r, progress)
    return True


def roll_back(
    r: Round,
    revision: Revision,
    reason: str,
    cause: str,
    *,
    result: str = "rolledBack",
    by: str = "operator",
    fallback: str = "",
) -> None:
    """Block the revision and say why; the next look tears its engines down. ``fallback`` is the hash of the revision
    to serve instead, for one that was promoted already.
    """
    if r.report.verdict[0] == "Unknown":
        r.report.verdict = ("False", "RolledBack", clip(reason))
    r.save(revision, result=result, reason=clip(reason), cause=cause, at=r.now, by=by, fallback=fallback)
    r.emit("Warning", "RolledBack" if result == "rolledBack" else result.capitalize(), clip(reason))
    r.report.phase, r.report.message = "RolledBack", clip(reason)


def _moved(r: Round, revision: Revision, **fields: object) -> Revision:
    """Record that something moved, so that the progress deadline starts anew."""
    assert revision.progress is not None
    return r.save(revision, progress=replace(revision.progress, since=r.now), **fields)


def _late(r: Round, revision: Revision, what: str) -> bool:
    """Roll back when nothing moved for the progress deadline."""
    assert revision.progress is not None
    limit = seconds(r.spec.rollback.progress_deadline)
    if r.now - revision.progress.since <= limit:
        return False
    roll_back(r, revision, f"no progress for {r.spec.rollback.progress_deadline}: {what}", "deadline")
    return True


def _image(r: Round, revision: Revision) -> bool:
    """True when the revision's image is known by digest."""
    given = r.spec.engine.image
    if given:
        r.report.built = ("True", "ImageGiven", given)
        if revision.image != given:
            _moved(r, revision, image=given)
        return True
    if revision.image:
        r.report.built = ("True", "Built", revision.image)
        return True
    build = r.seen.build
    if build is not None and build.state == "done":
        _moved(r, revision, image=build.image)
        r.report.built = ("True", "Built", build.image)
        r.emit("Normal", "Built", f"engine image {build.image}")
        return True
    if build is not None and build.state == "failed":
        r.report.built = ("False", "BuildFailed", clip(build.message))
        revision = r.save(revision, summary={"buildLog": build.log[-1500:]} if build.log else {})
        roll_back(r, revision, f"{BUILD_FAILED}{build.message}", "build")
        return False
    r.report.phase = "Building"
    r.report.message = (build.message if build else "") or "the engine image is being built"
    r.report.built = ("False", (build.obstacle if build else "") or "Building", r.report.message)
    if build is None or build.state == "none":
        r.actions.append(StartBuild(revision.hash, revision.attempt))
    limit = (r.spec.engine.build or BuildSpec()).timeout
    if r.now - _since(revision) > seconds(limit) + 60:
        roll_back(r, revision, f"{BUILD_FAILED}not done after {limit}: {r.report.message}", "build")
    return False


def _since(revision: Revision) -> float:
    return revision.progress.since if revision.progress else 0.0


def _placed(r: Round, revision: Revision, stable: Revision | None) -> bool:
    """True when nodes fit, or serving engines may make room; the choice is remembered so that a restart keeps it."""
    place = r.seen.placement
    if place is None:
        return True
    if not place.fits and not swap.possible(r, stable):
        why = place.message
        if place.room is not None and stable is not None:
            last = "; swap never gives up the last serving engine"
            why += last if r.spec.placement.strategy == "swap" else "; placement.strategy swap takes a serving engine's"
        r.report.phase, r.report.message = "Placing", clip(why)
        r.report.placed = ("False", "NoNodeFits" if place.room is None else "GPUsMissing", clip(why))
        current = r.revisions[revision.hash]
        if r.spec.paused or (current.progress is not None and current.progress.held):
            return False  # this counts for no deadline
        if r.engines_of(revision) is not None:  # its node went: it has the whole deadline to come back
            current = _short(r, current)
        _late(r, current, why)
        return False
    r.report.placed = ("True", "Placed", clip(place.message)) if place.fits else ("True", "Swapping", _placement(r))
    current = r.revisions[revision.hash]
    if place.pins != current.pins:
        _moved(r, current, pins=place.pins)
    return True


def _placement(r: Round) -> str:
    return clip(r.seen.placement.message) if r.seen.placement else ""


def _engines(r: Round, revision: Revision, stable: Revision | None) -> tuple[EngineSet, EngineSet, int | None] | None:
    """Canary and baseline, side by side, and how many canary engines are enough (see :class:`swap.Sizes`).

    None while a serving engine still has to make room for the first one.
    """
    assert revision.progress is not None
    wanted = _canary_replicas(r, revision, stable)
    r.report.compared = revision.progress.step >= len(r.spec.canary.steps)
    r.report.baseline = "spec" if stable is None or r.spec.baseline.from_ == "spec" else "stable"
    apart: EngineSet | None = None  # a baseline of its own
    if r.report.baseline == "spec" and not r.report.compared:  # its GPUs may be needed by what is promoted
        name = engine_set_name(r.name, revision.hash, baseline=True)
        apart = r.seen.set(name) or EngineSet(name, revision.hash, True)
    size = swap.sizes(r, revision, stable, wanted, apart)
    serving = r.have_engines(stable, size.stable) if stable is not None else None
    if size.stable < r.spec.replicas:
        lent = r.spec.replicas - size.stable
        text = f"no GPU is free: {lent} of {r.spec.replicas} serving engines gave way to the canary"
        r.report.placed = ("True", "Swapped", text)
    if size.canary <= 0 < wanted:
        return None
    canary = r.have_engines(revision, size.canary)
    if apart is None:
        return canary, serving or canary, size.enough
    speculative = baseline_speculative(r.spec).model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = {**revision.spec, "engine": {**revision.spec.get("engine", {}), "speculative": speculative}}
    return canary, r.have_engines(revision, 1, baseline=True, spec=spec), size.enough


def _canary_replicas(r: Round, revision: Revision, stable: Revision | None) -> int:
    """Canary size: its own, more where the current weight needs it, all of them once every step is done."""
    assert revision.progress is not None
    if revision.progress.step >= len(r.spec.canary.steps):
        return r.spec.replicas
    weight = _weight(r.spec.canary.steps, revision.progress.step)
    asked = gateway.replicas(r.spec.canary.steps, revision.progress.step)
    if asked is not None and stable is not None:
        return asked
    if stable is None or weight == 0:
        return r.spec.canary.replicas
    if weight >= 100:
        return max(r.spec.canary.replicas, r.spec.replicas)
    share = round(r.spec.replicas * weight / (100 - weight))
    return max(r.spec.canary.replicas, min(share, r.spec.replicas))


def _weight(steps: list[Step], index: int) -> int:
    """The weight in force at a step: the last one set up to and including it."""
    return next((s.weight for s in reversed(steps[: index + 1]) if s.weight is not None), 0)


def crashed(r: Round, revision: Revision, engines: EngineSet, who: str) -> bool:
    """Roll back for an engine that refuses to serve or keeps crashing, in its own words."""
    for pod in engines.pods:
        if pod.lost:
            continue
        said = refusal(pod.exit_message)
        if said:
            roll_back(r, revision, f"the {who} engine refused to serve: {said}", "engine")
            return True
        if pod.restarts >= CRASHES and not pod.ready:
            line = error_line(pod.exit_message) or pod.message or "it left no message"
            code = f" (exit code {pod.exit_code})" if pod.exit_code is not None else ""
            roll_back(r, revision, f"the {who} engine crashed {pod.restarts} times{code}: {line}", "engine")
            return True
    return False


def _started(r: Round, revision: Revision, canary: EngineSet, baseline: EngineSet, enough: int | None) -> bool:
    """True when both sides are ready to be measured."""
    short = [
        (who, engines, need)
        for who, engines, need in (
            ("canary", canary, canary.replicas if enough is None else enough),
            ("baseline", baseline, min(1, baseline.replicas)),
        )
        if len(engines.ready) < need
    ]
    progress = revision.progress
    assert progress is not None
    if not short:
        if progress.short:
            r.save(revision, progress=replace(progress, short=False))
            r.report.phase, r.report.message = "Starting", "the engines are ready"
        return not progress.short
    revision = _short(r, revision)  # engines that went, in a long pause say, have the whole deadline to come back
    r.report.phase = "Starting"
    found = [obstacle(engines) for _, engines, _ in short]
    first = found[0]
    if first is not None and len(found) > 1 and found[1] == first:
        counts = " and ".join(f"{who} {len(engines.ready)}/{need}" for who, engines, need in short)
        r.report.message = f"{counts} engines ready, {first[1]}"
    else:
        r.report.message = "; ".join(waiting_for(*item) for item in short)
    r.report.obstacle = next((x[0] for x in found if x), "")
    assert revision.progress is not None
    _describe(r, revision.progress)
    _late(r, revision, r.report.message)
    return False


def _short(r: Round, revision: Revision) -> Revision:
    """Note since when engines are missing."""
    progress = revision.progress
    assert progress is not None
    return revision if progress.short else r.save(revision, progress=replace(progress, short=True, since=r.now))


def _describe(r: Round, progress: Progress) -> None:
    """Fill in the step column."""
    steps = r.spec.canary.steps
    if progress.step < len(steps):
        r.report.step = f"{progress.step + 1}/{len(steps)} {steps[progress.step].kind}"
    else:
        r.report.step = f"{len(steps)}/{len(steps)} promote"
    r.report.weight = _weight(steps, min(progress.step, len(steps) - 1))


def _advance(r: Round, revision: Revision, **fields: object) -> None:
    progress = revision.progress
    assert progress is not None
    r.save(
        revision,
        progress=replace(progress, step=progress.step + 1, step_since=r.now, since=r.now, held=False, note=""),
        **fields,
    )


def _hold(r: Round, revision: Revision, note: str) -> None:
    assert revision.progress is not None
    r.save(revision, progress=replace(revision.progress, held=True, note=clip(note)))
    r.emit("Warning", "Paused", clip(note))
    r.report.phase, r.report.message = "Paused", clip(note)


def _step(r: Round, revision: Revision, canary: EngineSet, baseline: EngineSet, stable: Revision | None) -> None:
    progress = revision.progress
    assert progress is not None
    _describe(r, progress)
    step = r.spec.canary.steps[progress.step]
    if not _traffic(r, revision, stable, canary):
        if gateway.used(r) and step.pause is None and step.analysis is None:
            _late(r, revision, r.report.message)
        return
    if step.pause is not None:
        _pause(r, revision, step)
    elif step.analysis is not None:
        _analyse(r, revision, canary, baseline)
    else:
        r.report.phase = "Analyzing"
        _advance(r, revision)


def _pause(r: Round, revision: Revision, step: Step) -> None:
    assert revision.progress is not None
    assert step.pause is not None
    r.report.phase = "Paused"
    if step.pause.duration is None:
        r.report.message = "waiting for promote"
        return
    left = seconds(step.pause.duration) - (r.now - revision.progress.step_since)
    r.report.message = f"pause of {step.pause.duration}"
    if left <= 0:
        _advance(r, revision)
    else:
        r.wake_in(left)


def _traffic(r: Round, revision: Revision, stable: Revision | None, canary: EngineSet) -> bool:
    """Give the canary the weight of this step; True once it is so."""
    assert revision.progress is not None
    weight = _weight(r.spec.canary.steps, revision.progress.step)
    if stable is None:
        return r.point_service(r.only(None)) or True
    if gateway.used(r):
        r.report.phase = "Starting"
        if canary.replicas != _canary_replicas(r, revision, stable):
            return False  # asked for in this look
        share = gateway.wanted(r.spec.canary.steps, revision.progress.step)
        return r.point_service(r.only(stable)) and gateway.give(r, revision, share, canary)
    if weight == 0:
        return r.point_service(r.only(stable))
    if weight >= 100:
        return r.point_service(r.only(revision))
    return _share(r, revision, stable)


def _share(r: Round, revision: Revision, stable: Revision) -> bool:
    """Let stable and canary serve together; True once it is so."""
    strangers = [s.name for s in r.seen.sets if not s.baseline and s.revision not in {stable.hash, revision.hash}]
    if strangers:
        r.report.phase, r.report.message = "Starting", f"waiting for {', '.join(strangers)} to leave"
        return False
    return r.point_service(r.shared())


def _analyse(r: Round, revision: Revision, canary: EngineSet, baseline: EngineSet) -> None:
    progress = revision.progress
    assert progress is not None
    r.report.phase = "Analyzing"
    found = r.seen.analysis
    if found is None or (found.revision, found.attempt, found.step) != (revision.hash, revision.attempt, progress.step):
        if not baseline.ready:
            _unmatched(r, revision)
            return
        r.actions.append(Analyze(revision.hash, revision.attempt, progress.step, baseline.name, canary.name))
        r.report.message = "sending prompts to baseline and canary in pairs"
        return
    r.report.message = clip(found.reason)
    if found.outcome == "pass":
        r.report.verdict = ("True", "Passed", clip(found.reason))
        r.emit("Normal", "AnalysisPassed", clip(found.reason))
        _advance(r, revision, summary=found.summary)
        return
    if found.outcome == "fail":
        analysis_failed(r, revision, found)
        return
    r.report.verdict = ("Unknown", "NotYet", clip(found.reason))
    policy = r.spec.canary.analysis
    late = r.now - progress.step_since > seconds(policy.deadline)
    if late or found.exhausted:
        why = found.exhausted or f"no verdict within {policy.deadline}"
        _inconclusive(r, revision, f"{why}: {found.reason}")
        return
    r.actions.append(Analyze(revision.hash, revision.attempt, progress.step, baseline.name, canary.name))


def analysis_failed(r: Round, revision: Revision, found: AnalysisFact) -> None:
    """Roll back for what an analysis found."""
    r.report.verdict = ("False", "Failed", clip(found.reason))
    failed = r.save(revision, summary=found.summary)
    roll_back(r, failed, f"analysis failed: {found.reason}", "analysis")


def _unmatched(r: Round, revision: Revision) -> None:
    """An analysis cannot begin: the serving set is scaled to nothing."""
    assert revision.progress is not None
    deadline = r.spec.canary.analysis.deadline
    r.report.message = f"the baseline has 0 engines to send prompts to; spec.replicas is {r.spec.replicas}"
    if r.now - revision.progress.step_since > seconds(deadline):
        _inconclusive(r, revision, f"no verdict within {deadline}: {r.report.message}")


def verdict_so_far(r: Round, revision: Revision) -> dict[str, Any]:
    """What a revision is to keep of an analysis that ends without a verdict; {} when there is none under way."""
    found = r.seen.analysis
    step = revision.progress.step if revision.progress else -1
    if found is None or (found.revision, found.attempt, found.step) != (revision.hash, revision.attempt, step):
        return {}
    summary = found.kept or found.summary
    return {"summary": summary} if summary else {}


def _inconclusive(r: Round, revision: Revision, why: str) -> None:
    policy = r.spec.canary.analysis
    revision = r.save(revision, **verdict_so_far(r, revision))
    if policy.on_inconclusive == "rollback":
        roll_back(r, revision, f"analysis inconclusive, {why}", "analysis")
    elif policy.on_inconclusive == "promote":
        note = f"analysis inconclusive ({why}), passed over because: {policy.on_inconclusive_reason}"
        r.emit("Warning", "InconclusivePassedOver", clip(note))
        _advance(r, r.log(revision, "passOver", "operator", note))
    else:
        revision = r.log(revision, "hold", "operator", f"analysis inconclusive, {why}")
        _hold(r, revision, f"analysis inconclusive, {why}; ddtreectl rollout promote, resume or abort decides")


def _promote(r: Round, revision: Revision, canary: EngineSet, stable: Revision | None, enough: int | None) -> None:
    """Every step is done: grow the canary to full size, then point the Service at it. What was measured stays.

    Where it grows by what the serving set gives up, both serve until one engine of the old set is left.
    """
    assert revision.progress is not None
    _describe(r, revision.progress)
    r.report.phase = "Promoting"
    need = r.spec.replicas if enough is None else enough
    if enough is not None and stable is not None and not _share(r, revision, stable):
        return
    if len(canary.ready) < need:
        r.report.message = waiting_for("canary", canary, need)
        r.report.obstacle = (obstacle(canary) or ("",))[0]
        _late(r, revision, r.report.message)
        return
    r.report.message = f"revision {revision.number} takes the traffic"
    r.point_service(r.only(revision))
    r.save(revision, result="promoted", at=r.now, returned=False, **promotion(revision))
    r.emit("Normal", "Promoted", f"revision {revision.number} ({revision.hash}) serves")


def promotion(revision: Revision) -> dict[str, str]:
    """By whom and why a revision is promoted: its steps, or whoever passed over one of them."""
    begins = [i for i, entry in enumerate(revision.log) if entry["verb"] in {"retry", "reopen"}]
    current = revision.log[begins[-1] :] if begins else revision.log
    passed = [entry for entry in current if entry["verb"] in {"skip", "promote", "passOver"}]
    if not passed:
        return {"by": "operator", "reason": "every step passed"}
    return {"by": passed[-1]["by"], "reason": clip("; ".join(entry["text"] for entry in passed))}
