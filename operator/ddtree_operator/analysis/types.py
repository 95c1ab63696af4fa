"""What goes into a decision and what comes out: samples, pairs, verdicts. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Sample:
    """One request answered by one engine. Counts are the engine's own, per request (SGLang ``meta_info``).

    ``error`` holds one sentence and makes the sample unusable; everything else is then zero or empty.
    """

    prompt_id: str
    completion_tokens: int = 0
    verify_steps: int = 0  # 0 when the engine does not speculate
    accepted_drafts: int = 0
    seconds: float = 0.0  # wall time of the request at the client
    output_ids: tuple[int, ...] = ()
    top2_gaps: tuple[float, ...] = ()  # log-prob gap of the two best tokens per output position, when asked for
    error: str | None = None
    proposed_drafts: int = 0  # as the engine counts them; 0 when it does not say
    unreached: str = field(default="", compare=False)  # base URL that gave no HTTP answer at all; not recorded

    @property
    def accept_length(self) -> float:
        """Accepted drafts + 1 per verify step; 1.0 for an engine that does not speculate."""
        if self.verify_steps <= 0:
            return 1.0
        return self.accepted_drafts / self.verify_steps + 1.0

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over wall seconds; 0.0 when nothing was timed."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Divergence:
    """What both engines say about the first position where their greedy outputs differ.

    A gap is the log-prob of the best token less that of the second best, given the prompt and the common outputs;
    None when that engine could not be asked, and then ``error`` says why in one sentence.
    """

    position: int
    baseline_gap: float | None = None
    canary_gap: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt on both sides, sent one after the other in a random order.

    ``divergence`` is filled in by the prober when the outputs differ.
    """

    baseline: Sample
    canary: Sample
    canary_first: bool = False
    divergence: Divergence | None = None


class Outcome(StrEnum):
    """Three outcomes: a test that has not seen enough says so."""

    PASS = "pass"
    FAIL = "fail"
    NOT_YET = "notYet"


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """One metric's state after the pairs seen so far."""

    metric: str  # acceptLength | throughput | aggregateThroughput | parity | prometheus/<name>
    outcome: Outcome
    baseline: float  # mean over usable pairs (accept length, tok/s); number of compared outputs for parity
    canary: float
    estimate: float  # relative difference (canary/baseline - 1); unexplained divergences for parity
    low: float  # anytime-valid interval of the estimate; the estimate itself where a rule decides and no test; the
    # bounds of a PromQL check, infinite where there is none
    high: float
    threshold: float  # what low must exceed to pass
    pairs: int
    reason: str  # one sentence


@dataclass(frozen=True, slots=True)
class Verdict:
    """The joint gate: pass needs every metric, one clear failure is enough to fail."""

    outcome: Outcome
    metrics: tuple[MetricVerdict, ...]
    pairs: int  # usable pairs
    errors: int  # unusable pairs
    reason: str  # one sentence, fit for a condition
    rule: str = field(default="2")  # version of the rules that produced it
