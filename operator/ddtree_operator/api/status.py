"""Models of ``status``: what the operator writes and people, ``kubectl`` and ``ddtreectl`` read.

Everything is optional and unknown fields are kept: status may be empty, wiped, or written by a newer operator, and a
reader must cope with each of these. Numbers that are not finite are left out (JSON has no infinity).
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Phase(StrEnum):
    """Where a resource stands, in one word."""

    PENDING = "Pending"
    BUILDING = "Building"
    PLACING = "Placing"
    STARTING = "Starting"
    ANALYZING = "Analyzing"
    PAUSED = "Paused"
    PROMOTING = "Promoting"
    STABLE = "Stable"
    ROLLED_BACK = "RolledBack"
    INVALID = "Invalid"
    DEGRADED = "Degraded"


class ConditionType(StrEnum):
    """Types of ``status.conditions``."""

    VALID = "Valid"
    BUILT = "Built"
    PLACED = "Placed"
    READY = "Ready"
    PROGRESSING = "Progressing"
    VERDICT = "Verdict"
    ROUTED = "Routed"
    WRITTEN = "Written"


class StatusModel(BaseModel):
    """Base: camelCase outside, nothing required, unknown fields kept."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")


class RevisionState(StatusModel):
    """A set of engines and what it runs."""

    revision: str | None = Field(default=None, description="Hash of the spec this set runs (10 hex digits).")
    image: str | None = Field(default=None, description="Engine image by digest.")
    algorithm: str | None = Field(
        default=None, description="Algorithm, budget and draft block, such as DDTREE/7 block 8."
    )
    accept_length: str | None = Field(default=None, description="Accept length measured when it was promoted.")


class CanaryState(StatusModel):
    """The candidate under judgement."""

    revision: str | None = Field(default=None, description="Hash of the spec this set runs (10 hex digits).")
    image: str | None = Field(default=None, description="Engine image by digest.")
    algorithm: str | None = Field(
        default=None, description="Algorithm, budget and draft block, such as DDTREE/7 block 8."
    )
    step: str | None = Field(default=None, description="What the current step does.")
    step_index: int | None = Field(default=None, description="Current step, counted from 0.")
    step_count: int | None = Field(default=None, description="Number of steps.")
    started_at: str | None = Field(default=None, description="Start of this rollout (UTC).")


class BaselineState(StatusModel):
    """What the canary is held against."""

    revision: str | None = Field(default=None, description="Revision of the baseline engines.")
    kind: str | None = Field(default=None, description="stable: the serving set; spec: engines of their own.")


class MetricState(StatusModel):
    """One metric of the verdict."""

    metric: str | None = Field(
        default=None, description="acceptLength, throughput, aggregateThroughput, parity or prometheus/<name>."
    )
    outcome: str | None = Field(default=None, description="pass, fail or notYet.")
    baseline: float | None = Field(default=None, description="Mean of the baseline; compared outputs for parity.")
    canary: float | None = Field(default=None, description="Mean of the canary.")
    estimate: float | None = Field(default=None, description="Relative difference; unexplained divergences for parity.")
    low: float | None = Field(default=None, description="Lower end of the anytime-valid interval of estimate.")
    high: float | None = Field(default=None, description="Upper end of the anytime-valid interval of estimate.")
    threshold: float | None = Field(default=None, description="What low must exceed to pass.")
    pairs: int | None = Field(default=None, description="Pairs this metric has used.")
    reason: str | None = Field(default=None, description="One sentence.")


class AnalysisState(StatusModel):
    """The verdict so far on the revision under judgement."""

    outcome: str | None = Field(default=None, description="pass, fail or notYet.")
    pairs: int | None = Field(default=None, description="Usable pairs.")
    errors: int | None = Field(default=None, description="Unusable pairs.")
    reason: str | None = Field(default=None, description="One sentence.")
    metrics: list[MetricState] = Field(default_factory=list, description="One entry per metric.")


class BlockedRevision(StatusModel):
    """A spec that was rolled back; it is not tried again until the spec changes or someone asks for a retry."""

    revision: str | None = Field(default=None, description="Hash of the blocked spec.")
    reason: str | None = Field(default=None, description="Why it was rolled back, in one sentence.")
    at: str | None = Field(default=None, description="When (UTC).")


class NodeState(StatusModel):
    """A node and whether an engine fits there."""

    name: str | None = Field(default=None, description="Node name.")
    fits: bool | None = Field(default=None, description="Whether an engine pod can run there now.")
    reason: str | None = Field(default=None, description="Why not, in one sentence.")
    free: int | None = Field(default=None, description="Free GPUs (nvidia.com/gpu).")
    product: str | None = Field(default=None, description="Its label nvidia.com/gpu.product.")


class Condition(StatusModel):
    """A condition in the usual Kubernetes form."""

    type: str | None = Field(
        default=None, description="Valid, Built, Placed, Ready, Progressing, Verdict, Routed or Written."
    )
    status: str | None = Field(default=None, description="True, False or Unknown.")
    reason: str | None = Field(default=None, description="One word for machines.")
    message: str | None = Field(default=None, description="One sentence for people.")
    last_transition_time: str | None = Field(default=None, description="Last change of status (UTC).")
    observed_generation: int | None = Field(default=None, description="metadata.generation this speaks about.")


class LogEntry(StatusModel):
    """Something done to a rollout, by a person or by the operator for want of a verdict."""

    at: str | None = Field(default=None, description="When (UTC).")
    by: str | None = Field(default=None, description="Who; operator when nobody asked.")
    verb: str | None = Field(default=None, description="The command; hold or passOver after an inconclusive analysis.")
    text: str | None = Field(default=None, description="What was done and why, in one sentence.")


class AlertState(StatusModel):
    """The alert that rolled a revision back."""

    name: str | None = Field(default=None, description="alertname.")
    starts_at: str | None = Field(default=None, description="When it began (UTC, by Prometheus' clock).")
    labels: dict[str, str] = Field(default_factory=dict, description="Its labels, cut to what there is room for.")


class HistoryEntry(StatusModel):
    """One rollout and how it ended."""

    revision: str | None = Field(default=None, description="Hash of the spec.")
    number: int | None = Field(default=None, description="Counts up; what undo --to-revision takes.")
    result: str | None = Field(default=None, description="promoted, rolledBack, aborted, superseded, undone, building…")
    reason: str | None = Field(default=None, description="Why, in one sentence.")
    at: str | None = Field(default=None, description="When (UTC).")
    by: str | None = Field(default=None, description="Who asked; empty when the operator decided.")
    image: str | None = Field(default=None, description="Engine image by digest.")
    algorithm: str | None = Field(
        default=None, description="Algorithm, budget and draft block, such as DDTREE/7 block 8."
    )
    accept_length: str | None = Field(default=None, description="Accept length measured.")
    throughput: str | None = Field(default=None, description="Tokens per second measured, single requests.")
    verdict_digest: str | None = Field(default=None, description="Digest of the recorded verdict.")
    cause: str | None = Field(
        default=None, description="Of a rollback: analysis, build, engine, deadline, alert, watch or person."
    )
    went_back_to: str | None = Field(default=None, description="Hash of the revision that serves instead.")
    alert: AlertState | None = Field(default=None, description="The alert that rolled it back.")
    log: list[LogEntry] = Field(default_factory=list, description="Commands to this rollout, newest last, bounded.")


class LastAction(StatusModel):
    """The newest command taken from the annotation ddtree.dev/action."""

    id: str | None = Field(default=None, description="Identifier the sender chose; acted on once.")
    verb: str | None = Field(default=None, description="promote, abort, retry, undo, pause, resume or skip.")
    by: str | None = Field(default=None, description="Who sent it.")
    at: str | None = Field(default=None, description="When it was taken (UTC).")
    result: str | None = Field(default=None, description="What came of it, in one sentence.")


class BuildState(StatusModel):
    """A build under way, or one that failed."""

    job: str | None = Field(default=None, description="Job that builds the image; other resources may share it.")
    log: list[str] | None = Field(default=None, description="Last lines of the builder's log.")


class DDTreeStatus(StatusModel):
    """Observed state, written by the operator."""

    phase: str | None = Field(
        default=None,
        description="Pending, Building, Placing, Starting, Analyzing, Paused, Promoting, Stable, RolledBack, Invalid "
        "or Degraded.",
    )
    message: str | None = Field(default=None, description="What is going on, in one sentence.")
    observed_generation: int | None = Field(default=None, description="metadata.generation last acted on.")
    revision: str | None = Field(default=None, description="Hash of the wanted spec.")
    stable: RevisionState | None = Field(default=None, description="The set that serves.")
    canary: CanaryState | None = Field(default=None, description="Absent when there is none.")
    baseline: BaselineState | None = Field(default=None, description="What the candidate is held against.")
    step: str | None = Field(default=None, description='Position in canary.steps, such as "3/5 analysis".')
    build: BuildState | None = Field(
        default=None, description="Present while the image of the wanted spec is built, and when that failed."
    )
    weight: int | None = Field(default=None, description="Share of traffic the canary has, in percent.")
    analysis: AnalysisState | None = Field(default=None, description="The verdict so far.")
    accept_length: str | None = Field(default=None, description='Newest measured accept length, such as "2.65".')
    blocked: list[BlockedRevision] = Field(default_factory=list, description="Specs that were rolled back.")
    nodes: list[NodeState] = Field(default_factory=list, description="Nodes and whether an engine fits.")
    pinned: list[str] = Field(default_factory=list, description="GPU products or nodes engines are pinned to.")
    conditions: list[Condition] = Field(default_factory=list, description="The usual conditions.")
    history: list[HistoryEntry] = Field(default_factory=list, description="Rollouts so far, newest last, bounded.")
    replicas: int | None = Field(default=None, description="Engine pods of the serving set.")
    ready_replicas: int | None = Field(default=None, description="Those of them that are ready.")
    held_replicas: int | None = Field(
        default=None, description="Size that is kept because an applied manifest left replicas out."
    )
    selector: str | None = Field(default=None, description="Label selector of the serving pods (scale subresource).")
    last_action: LastAction | None = Field(default=None, description="Newest command and its result.")
