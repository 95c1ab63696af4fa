"""What decides, as plain numbers: margins in log-ratio, error budgets, parity tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddtree_operator.api.spec import AcceptLengthGate, AnalysisSpec, ThroughputGate

ACCEPT_LENGTH = "acceptLength"
THROUGHPUT = "throughput"
AGGREGATE = "aggregateThroughput"  # goes with the throughput gate
PARITY = "parity"
RULE = "2"  # changes whenever the same pairs could get another verdict

# How the false-rollback budget is shared out (union bound). Errors take little: an engine that fails every request
# is caught all the same, two or three pairs later.
ERROR_SHARE = 0.1

# Spacing of neighbouring logits in [16, 32), where the best logits of language models lie, per storage type.
# Engines return log-probs, which differ from logits by a constant, so a gap is the same in both; the magnitude is not.
# In float32 only an exact tie is excused: other orders of summation are too close there to swap tokens in practice.
ULP = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 0.0}


@dataclass(frozen=True, slots=True)
class Gate:
    """One compared metric: it passes when canary/baseline is credibly above ``1 + threshold``."""

    metric: str
    threshold: float  # relative: -0.03 for a margin of 3 %, +0.10 for a required gain of 10 %

    @property
    def log_threshold(self) -> float:
        """The threshold as a log-ratio."""
        return math.log1p(self.threshold)


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything ``evaluate`` needs besides the pairs."""

    gates: tuple[Gate, ...]
    false_promote: float = 0.01
    false_rollback: float = 0.01
    min_pairs: int = 10
    max_pairs: int = 2000
    parity_allow: int = 0
    tie_gap: float = 2 * ULP["bfloat16"]  # in log-prob
    pairs_per_error: int = 10  # further usable pairs that an unusable one asks for before anything passes
    clip: float = 0.25  # log-ratio at which one pair's influence ends, on either side of the threshold
    canary_speculates: bool | None = None  # True: a canary answer without verify steps is an error
    baseline_speculates: bool | None = None
    canary_window: int = 0  # tokens verified a step, 0 when not known: said beside the accept length, decides nothing
    baseline_window: int = 0
    rule: str = RULE
    # Where ``tie_gap`` comes from, in words. It decides nothing, so that policies are equal whatever it says.
    tie_gap_from: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.gates:
            raise ValueError("the policy compares no metric")
        for name, value in (("falsePromote", self.false_promote), ("falseRollback", self.false_rollback)):
            if not 0 < value < 0.5:
                raise ValueError(f"errorBudget.{name} is {value * 100:g}%; it must lie between 0% and 50%")
        for gate in self.gates:
            if not -1 < gate.threshold < 100:
                raise ValueError(f"{gate.metric}: threshold {gate.threshold:g} is not a sensible relative change")
        if not 0.01 <= self.clip <= 5:
            raise ValueError(f"clip is {self.clip:g}; it must lie between 0.01 and 5")
        if self.min_pairs < 1:
            raise ValueError(f"min_pairs is {self.min_pairs}; it must be at least 1")

    @property
    def rollback_share(self) -> float:
        """False-rollback budget of one gate."""
        return self.false_rollback * (1 - ERROR_SHARE) / len(self.gates)

    @property
    def error_budget(self) -> float:
        """False-rollback budget of the error test."""
        return self.false_rollback * ERROR_SHARE

    @classmethod
    def from_spec(
        cls,
        spec: AnalysisSpec,
        *,
        dtype: str = "",
        deterministic: bool = False,
        canary_speculates: bool | None = None,
        baseline_speculates: bool | None = None,
        canary_window: int = 0,
        baseline_window: int = 0,
    ) -> Policy:
        """The policy a ``spec.canary.analysis`` asks for.

        ``dtype`` is the engines' compute type (``/server_info``), "" when they did not say; it sets what one ulp of
        ``tieGap`` is worth. Between
        ``deterministic`` engines an ulp is worth nothing.
        Raises ValueError with one sentence when a number makes no sense.
        """
        gates = [Gate(ACCEPT_LENGTH, _threshold("acceptLength", spec.accept_length))]
        if spec.throughput.enabled:
            gates.append(Gate(THROUGHPUT, _threshold("throughput", spec.throughput)))
        return cls(
            gates=tuple(gates),
            false_promote=percent("errorBudget.falsePromote", spec.error_budget.false_promote),
            false_rollback=percent("errorBudget.falseRollback", spec.error_budget.false_rollback),
            min_pairs=spec.min_pairs,
            max_pairs=spec.max_pairs,
            parity_allow=spec.parity.allow,
            tie_gap=tie_gap(spec.parity.tie_gap, dtype, deterministic),
            tie_gap_from=tie_gap_from(spec.parity.tie_gap, dtype, deterministic),
            canary_speculates=canary_speculates,
            baseline_speculates=baseline_speculates,
            canary_window=canary_window,
            baseline_window=baseline_window,
        )


def percent(name: str, text: str) -> float:
    """``"3%"`` or ``"+10%"`` as a fraction. Raises ValueError naming the field."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not text.endswith("%") or not math.isfinite(value):
        raise ValueError(f"{name}: {text!r} is not a percentage such as 3%")
    return value


def tie_gap(text: str, dtype: str = "", deterministic: bool = False) -> float:
    """``"2ulp"`` or ``"0.01"`` as a log-prob gap. An unknown dtype counts as bfloat16, the coarsest."""
    if text.endswith("ulp"):
        if deterministic:
            return 0.0
        return float(text.removesuffix("ulp")) * ULP.get(dtype.removeprefix("torch."), ULP["bfloat16"])
    return float(text)


def tie_gap_from(text: str, dtype: str, deterministic: bool) -> str:
    """Where the gap of :func:`tie_gap` comes from, in words."""
    if not text.endswith("ulp"):
        return "tieGap, in log-prob"
    if deterministic:
        return "both engines say that they are deterministic"
    kind = dtype.removeprefix("torch.")
    if kind in ULP:
        return f"{text} of {kind}, which the canary says it computes in"
    said = f"the canary computes in {kind}, of which it is not known" if kind else "the canary did not say its own"
    return f"{text} of bfloat16, assumed: {said}"


def _threshold(name: str, gate: AcceptLengthGate | ThroughputGate) -> float:
    if gate.at_least is not None:
        return percent(f"{name}.atLeast", gate.at_least)
    margin = percent(f"{name}.nonInferiority", gate.non_inferiority)
    if margin >= 1:
        raise ValueError(f"{name}.nonInferiority: {gate.non_inferiority} would let everything pass; keep it below 100%")
    return -margin
