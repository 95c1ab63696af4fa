"""Models of ``spec``: what a user writes. The CRD's schema is generated from these (see ``api.crd``)."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from ddtree_operator.api.names import MANAGED_FLAGS

DURATION = r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"
PERCENT = r"^[0-9]+(\.[0-9]+)?%$"
GAIN = r"^\+[0-9]+(\.[0-9]+)?%$"
ADDRESS = r"^(https?|pvc|configmap|oci)://[^\s]+$"  # of a folder of wheels
SHA256 = r"^[0-9a-f]{64}$"
DIGEST_REF = r"^[^@\s]+@sha256:[0-9a-f]{64}$"
HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
TIE_GAP = r"^[0-9]+(\.[0-9]+)?(ulp)?$"

STEP_KINDS = {
    "weight": "weight",
    "pause": "pause",
    "analysis": "analysis",
    "canary_replicas": "canaryReplicas",
    "header_route": "headerRoute",
}

Duration = Annotated[str, Field(pattern=DURATION, min_length=2, max_length=20)]
Percent = Annotated[str, Field(pattern=PERCENT, max_length=12)]


def _some_time(field: str, duration: str, what: str, such_as: str) -> None:
    """Raises ValueError for a limit of no time at all, which would end everything at once."""
    if not re.search("[1-9]", duration):
        raise ValueError(f"{field} {duration} leaves no time {what}; write a time such as {such_as}")


class Model(BaseModel):
    """Base: camelCase outside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class ModelRef(Model):
    """A checkpoint: a hub id with a revision, or a path mounted into the engine."""

    path: str = Field(min_length=1, max_length=500, description="Hub id (org/name) or absolute path inside the pod.")
    revision: str | None = Field(default=None, max_length=100, description="Hub commit; leave out for a path.")


class Algorithm(StrEnum):
    """Speculative algorithms an engine may run."""

    NONE = "NONE"
    NGRAM = "NGRAM"
    DFLASH = "DFLASH"
    DDTREE = "DDTREE"
    EAGLE3 = "EAGLE3"


class Speculative(Model):
    """How tokens are drafted and verified."""

    algorithm: Algorithm = Field(default=Algorithm.DDTREE, description="NONE, NGRAM, DFLASH (chain), DDTREE, EAGLE3.")
    budget: int | None = Field(
        default=None, ge=1, le=255, description="Draft budget: nodes of the tree besides its root (DDTREE only)."
    )
    draft_block: int | None = Field(
        default=None,
        ge=2,
        le=32,
        description="Positions the drafter drafts, root included; as it was trained when left out (DDTREE only).",
    )

    @model_validator(mode="after")
    def _tree_only(self) -> Speculative:
        given = [n for n, v in (("budget", self.budget), ("draftBlock", self.draft_block)) if v is not None]
        if given and self.algorithm is not Algorithm.DDTREE:
            are, them = ("is", "it") if len(given) == 1 else ("are", "them")
            raise ValueError(f"{' and '.join(given)} {are} only for DDTREE, not {self.algorithm}; remove {them}")
        return self


class Wheel(Model):
    """A wheel by address and content."""

    url: str = Field(
        min_length=1,
        max_length=1000,
        description="Address (http, https, pvc, configmap, oci), or a file name under the wheelhouse.",
    )
    sha256: str = Field(pattern=SHA256, max_length=64, description="SHA-256 of the file, 64 hex digits.")


class SeriesRef(Model):
    """A patch series kept in a ConfigMap: a key ``series`` (one file name a line) and one key per patch."""

    config_map_ref: str = Field(min_length=1, max_length=253, description="Name of the ConfigMap.")


class Push(Model):
    """Where built images go."""

    repository: str = Field(min_length=1, max_length=500, description="registry/host/path without tag or digest.")
    secret_ref: str | None = Field(default=None, max_length=253, description="Secret of type dockerconfigjson.")


class BuildSpec(Model):
    """An engine image made in the cluster from pinned, hashed inputs. What is left out comes from the operator."""

    sglang: Literal["0.5.23"] = Field(default="0.5.23", description="Version of the stock SGLang wheel.")
    sglang_wheel: Wheel | None = Field(default=None, description="Another address (and hash) of that wheel.")
    series: str | SeriesRef = Field(
        default="sglang-0.5.23", description="Patch series shipped with the operator, by name; or configMapRef."
    )
    kernel_wheels: list[Wheel] = Field(
        default_factory=list, max_length=20, description="Kernel wheels, checked against torch and CUDA of the image."
    )
    base_image: str | None = Field(
        default=None, pattern=DIGEST_REF, max_length=600, description="repo@sha256:… with Python and torch."
    )
    push: Push | None = Field(default=None, description="The operator's own setting when left out.")
    wheelhouse: str | None = Field(
        default=None,
        pattern=ADDRESS,
        max_length=1000,
        description="Where bare wheel names are: http(s)://…, pvc://claim/folder, configmap://name, oci://repository:tag.",
    )
    builder: Literal["buildkit", "buildah"] = Field(
        default="buildkit",
        description="What runs the build: the buildkitd of the cluster, or buildah in the Job's own pod.",
    )
    timeout: Duration = Field(default="30m", description="Longest time a build may take, such as 30m.")

    @model_validator(mode="after")
    def _takes_time(self) -> BuildSpec:
        _some_time("timeout", self.timeout, "for a build", "30m")
        return self


class EngineSpec(Model):
    """The engine: its image (given, or built), its speculation and its flags."""

    kind: Literal["sglang", "vllm"] = Field(default="sglang", description="Engine adapter; vllm is refused for now.")
    image: str | None = Field(
        default=None, pattern=DIGEST_REF, max_length=600, description="Ready image by digest; excludes build."
    )
    build: BuildSpec | None = Field(default=None, description="Build the image in the cluster; excludes image.")
    speculative: Speculative = Field(default_factory=Speculative, description="How tokens are drafted and verified.")
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="GPUs one engine spans (--tp-size).")
    args: list[Annotated[str, Field(max_length=2000)]] = Field(
        default_factory=list, max_length=100, description="Further engine flags; those the operator sets are refused."
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict, description="Pod template merged over ours (strategic merge; container name: engine)."
    )

    @model_validator(mode="after")
    def _one_image(self) -> EngineSpec:
        if self.image and self.build:
            raise ValueError("image and build are both given; keep one")
        managed = sorted({a.split("=", 1)[0] for a in self.args} & MANAGED_FLAGS)
        if managed:
            raise ValueError(f"args has {', '.join(managed)}, which the operator sets; use the fields of spec instead")
        return self


class GpuSpec(Model):
    """Which GPUs fit."""

    product: list[str] = Field(default_factory=list, max_length=20, description="Values of nvidia.com/gpu.product.")
    per_replica: int = Field(default=1, ge=0, le=64, description="nvidia.com/gpu each engine pod takes; 0 for a CPU.")
    min_memory_gi_b: int | None = Field(
        default=None, ge=1, le=10000, alias="minMemoryGiB", description="Least memory per GPU, in GiB."
    )
    sharing: Literal["forbid", "allow"] = Field(default="forbid", description="Time-sliced or MPS GPUs.")
    mig: Literal["forbid", "allow"] = Field(default="forbid", description="MIG slices.")


class PlacementSpec(Model):
    """Where engines run."""

    gpu: GpuSpec = Field(default_factory=GpuSpec, description="Which GPUs fit.")
    pin: Literal["product", "nodes", "none"] = Field(
        default="product",
        description="Keep canary and baseline on alike GPUs: same product, same nodes, or not at all.",
    )
    strategy: Literal["surge", "swap"] = Field(
        default="surge",
        description="surge: the canary takes free GPUs; swap: it takes a serving pod's GPU when none is free.",
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels a node must have.")
    tolerations: list[dict[str, Any]] = Field(
        default_factory=list, max_length=50, description="Tolerations of the engine pods, as in a pod's spec."
    )


class BaselineSpec(Model):
    """What the canary is held against."""

    from_: Literal["stable", "spec"] = Field(
        default="stable",
        alias="from",
        description="stable: the set that serves; spec: engines started for the comparison.",
    )
    speculative: Speculative = Field(
        default_factory=lambda: Speculative(algorithm=Algorithm.DFLASH),
        description="Used when from is spec, and for a first rollout (NONE when the canary itself is DFLASH).",
    )


class AcceptLengthGate(Model):
    """Accept length = accepted drafts + 1 per verify step, mean over requests."""

    non_inferiority: Percent = Field(default="3%", description="Largest loss against the baseline that may pass.")
    at_least: Annotated[str, Field(pattern=GAIN, max_length=12)] | None = Field(
        default=None, description="Required gain, such as +10%; replaces nonInferiority."
    )


class ThroughputGate(Model):
    """Tokens per second of single requests, compared pair by pair."""

    non_inferiority: Percent = Field(default="5%", description="Largest loss against the baseline that may pass.")
    at_least: Annotated[str, Field(pattern=GAIN, max_length=12)] | None = Field(
        default=None, description="Required gain, such as +10%; replaces nonInferiority."
    )
    enabled: bool = Field(default=True, description="Whether this gate decides.")


class ParityGate(Model):
    """Greedy outputs compared token by token."""

    allow: int = Field(default=0, ge=0, le=1000, description="Unexplained divergences that may pass.")
    tie_gap: Annotated[str, Field(pattern=TIE_GAP, max_length=12)] = Field(
        default="2ulp", description="Top-2 gap up to which a divergence is a tie: bf16 ulps (2ulp) or log-prob (0.01)."
    )


class PrometheusCheck(Model):
    """A PromQL check beside the pairs: exactly one finite, fresh series, or it is an error."""

    name: str = Field(min_length=1, max_length=63, description="Name of the check in verdicts.")
    address: str = Field(min_length=1, max_length=500, description="Prometheus, such as http://prometheus:9090.")
    query: str = Field(min_length=1, max_length=4000, description="PromQL that gives exactly one series.")
    max: float | None = Field(default=None, description="Largest value that passes.")
    min: float | None = Field(default=None, description="Smallest value that passes.")
    activity: str | None = Field(
        default=None,
        max_length=4000,
        description="PromQL that must be above 0, else the reading is an error: a gauge of an idle engine keeps its "
        "last value.",
    )
    interval: Duration = Field(default="15s", description="Time between two readings; not below the scrape interval.")
    max_age: Duration = Field(default="2m", description="Samples older than this do not count.")
    error_limit: int = Field(
        default=10, ge=1, le=1000, description="Errors in a row after which the analysis is inconclusive."
    )

    @model_validator(mode="after")
    def _bounded(self) -> PrometheusCheck:
        if self.max is None and self.min is None:
            raise ValueError("neither min nor max is set, so nothing can pass; set one of them")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so nothing can pass")
        return self


class ErrorBudget(Model):
    """Chances of a wrong decision that the sequential test holds, however often it is looked at."""

    false_rollback: Percent = Field(default="1%", description="Chance of rolling back a canary that is good enough.")
    false_promote: Percent = Field(default="1%", description="Chance of promoting a canary that is not.")


class LiveTrafficSpec(Model):
    """Users' prompts, taken from the engines that serve; needs a Secret <name>-live-prompts with a key token."""

    when_quiet: Literal["wait", "set"] = Field(
        default="wait",
        description="While users send nothing new: wait (until the deadline), or go on with the prompt set.",
    )
    longest: int = Field(default=2048, ge=1, le=16384, description="Longest prompt that is taken, in tokens.")


class PromptsSpec(Model):
    """Where prompts come from."""

    config_map_ref: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Prompts of your own: name of a ConfigMap in the same namespace; its key is prompts.jsonl.",
    )
    live_traffic: LiveTrafficSpec | None = Field(
        default=None,
        description="Opt-in: users' prompts first. They are kept in memory only, sent once to each side, and no text "
        "or token of them or of the answers is recorded.",
    )

    @model_validator(mode="after")
    def _named(self) -> PromptsSpec:
        if self.config_map_ref is None and self.live_traffic is None:
            raise ValueError("neither configMapRef nor liveTraffic is set; set one of them, or leave prompts out")
        return self


class AnalysisSpec(Model):
    """What decides."""

    prompts: PromptsSpec | None = Field(default=None, description="The shipped set when left out.")
    max_tokens: int = Field(default=64, ge=4, le=4096, description="Tokens generated per prompt.")
    concurrency: int = Field(default=1, ge=1, le=64, description="Pairs in flight.")
    min_pairs: int = Field(default=10, ge=2, le=100000, description="Never pass with fewer pairs.")
    max_pairs: int = Field(
        default=2000, ge=2, le=100000, description="Inconclusive after this many; not below minPairs."
    )
    accept_length: AcceptLengthGate = Field(default_factory=AcceptLengthGate, description="Gate on accept length.")
    throughput: ThroughputGate = Field(default_factory=ThroughputGate, description="Gate on tokens per second.")
    parity: ParityGate = Field(default_factory=ParityGate, description="Gate on equal greedy outputs.")
    prometheus: list[PrometheusCheck] = Field(
        default_factory=list, max_length=20, description="PromQL checks beside the pairs."
    )
    error_budget: ErrorBudget = Field(default_factory=ErrorBudget, description="Chances of a wrong decision.")
    deadline: Duration = Field(default="30m", description="Inconclusive after this time, such as 30m.")
    on_inconclusive: Literal["pause", "rollback", "promote"] = Field(
        default="pause", description="What to do then; promote needs onInconclusiveReason."
    )
    on_inconclusive_reason: str | None = Field(
        default=None, max_length=500, description="Why an inconclusive canary may be promoted."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Orders the prompts and the sides of each pair.")

    @model_validator(mode="after")
    def _sensible(self) -> AnalysisSpec:
        if self.on_inconclusive == "promote" and not self.on_inconclusive_reason:
            raise ValueError("onInconclusive: promote needs onInconclusiveReason")
        names = [check.name for check in self.prometheus]
        if len({*names}) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"prometheus has two checks of the name {twice}; rename one of them")
        _some_time("deadline", self.deadline, "for a pair", "30m")
        if self.max_pairs < self.min_pairs:
            raise ValueError(f"maxPairs {self.max_pairs} is below minPairs {self.min_pairs}")
        return self


class Pause(Model):
    """Wait for a time, or for a person when no duration is given."""

    duration: Duration | None = Field(default=None, description="Such as 10m; waits for resume when left out.")


class HeaderRoute(Model):
    """Requests with this header go to the canary, whatever its weight."""

    name: str = Field(default="x-ddtree-canary", pattern=HEADER, max_length=100, description="Name of the header.")
    value: str = Field(default="true", min_length=1, max_length=100, description="Its value, exactly.")


class Step(Model):
    """One step; exactly one of its fields is set."""

    weight: int | None = Field(default=None, ge=0, le=100, description="Share of traffic for the canary, in percent.")
    pause: Pause | None = Field(default=None, description="Wait: {duration: 10m}, or {} for a person.")
    canary_replicas: int | None = Field(
        default=None, ge=1, le=100, description="Canary engine pods from here on, whatever the weight (gateway only)."
    )
    header_route: HeaderRoute | None = Field(
        default=None, description="From here on testers reach the canary by a header (gateway only)."
    )
    analysis: dict[str, Any] | None = Field(default=None, description="Run the analysis: {}.", max_length=0)

    @model_validator(mode="after")
    def _one(self) -> Step:
        given = [word for name, word in STEP_KINDS.items() if getattr(self, name) is not None]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise ValueError(f"a step has exactly one of {', '.join(STEP_KINDS.values())}; this one has {has}")
        return self

    @property
    def kind(self) -> str:
        """Which of its fields is set, as users write it."""
        return next(word for name, word in STEP_KINDS.items() if getattr(self, name) is not None)


def _default_steps() -> list[Step]:
    return [Step(weight=0), Step(analysis={})]


class CanarySpec(Model):
    """The canary and the way to promotion."""

    replicas: int = Field(default=1, ge=1, le=100, description="Canary engine pods.")
    steps: list[Step] = Field(
        default_factory=_default_steps, min_length=1, max_length=50, description="Done in order; then it is promoted."
    )
    analysis: AnalysisSpec = Field(default_factory=AnalysisSpec, description="What decides, at every analysis step.")

    @model_validator(mode="after")
    def _analysed(self) -> CanarySpec:
        if not any(s.analysis is not None for s in self.steps):
            raise ValueError("canary.steps has no analysis step; add {analysis: {}}")
        return self


class AlertsSpec(Model):
    """Rollback by alert."""

    enabled: bool = Field(default=True, description="Whether alerts may roll this resource back.")
    dry_run: bool = Field(default=False, description="Only say what an alert would have done.")


class RollbackSpec(Model):
    """How far back one can go, and how long a start may take."""

    alerts: AlertsSpec = Field(default_factory=AlertsSpec, description="Rollback by alert.")
    watch: Duration = Field(
        default="1h", description="How long after its promotion a revision is watched, and alerts may take it back."
    )
    on_drop: Literal["rollback", "alert"] = Field(
        default="rollback",
        description="What less acceptance or more errors within the watch lead to: going back, or an Event.",
    )
    keep: int = Field(default=5, ge=1, le=50, description="Revisions kept for undo.")
    progress_deadline: Duration = Field(default="20m", description="Longest time without progress before rollback.")

    @model_validator(mode="after")
    def _takes_time(self) -> RollbackSpec:
        _some_time("progressDeadline", self.progress_deadline, "for an engine to start", "20m")
        return self


class GatewayTraffic(Model):
    """An HTTPRoute of the user's that carries the weights, where it names our Service."""

    http_route: str = Field(min_length=1, max_length=253, description="Name of the HTTPRoute, in the same namespace.")
    rules: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list,
        max_length=16,
        description="Only rules of these names; all with our Service if empty.",
    )
    settle: Duration = Field(
        default="2s",
        description="How long the route names the canary with weight 0 first, until every proxy knows the backend.",
    )
    session_header: str | None = Field(
        default=None, max_length=100, description="Refused: no route keeps sessions by header and weights, too."
    )


class TrafficSpec(Model):
    """How traffic reaches the engines. Without gateway: a Service of the resource's name, weights by replica ratio."""

    gateway: GatewayTraffic | None = Field(default=None, description="Gateway API route that carries the weights.")
    drain: Duration = Field(
        default="30s", description="Time the old set keeps for requests in flight, and each engine again after SIGTERM."
    )


class DDTreeSpec(Model):
    """Desired state of one served model: its engine, where it runs, and how a change of it is judged."""

    replicas: int = Field(default=1, ge=0, le=1000, description="Engine pods that serve.")
    model: ModelRef = Field(description="The target model.")
    drafter: ModelRef | None = Field(default=None, description="Needed by DFLASH, DDTREE and EAGLE3.")
    engine: EngineSpec = Field(default_factory=EngineSpec)
    placement: PlacementSpec = Field(default_factory=PlacementSpec, description="Where engines run.")
    baseline: BaselineSpec = Field(default_factory=BaselineSpec, description="What a canary is held against.")
    canary: CanarySpec = Field(default_factory=CanarySpec, description="The canary and the way to promotion.")
    rollback: RollbackSpec = Field(default_factory=RollbackSpec, description="Undo depth, deadlines and alerts.")
    traffic: TrafficSpec = Field(default_factory=TrafficSpec, description="How traffic reaches the engines.")
    paused: bool = Field(default=False, description="Freeze the rollout where it is.")

    @model_validator(mode="after")
    def _drafter_given(self) -> DDTreeSpec:
        needs = {Algorithm.DFLASH, Algorithm.DDTREE, Algorithm.EAGLE3}
        if self.engine.speculative.algorithm in needs and self.drafter is None:
            raise ValueError(f"{self.engine.speculative.algorithm} needs a drafter; set spec.drafter.path")
        return self
