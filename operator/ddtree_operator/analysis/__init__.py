"""What decides: samples, sequential tests, parity, verdicts. Pure; see docs/reference/decisions.md."""

from ddtree_operator.analysis.evaluate import Tally, evaluate
from ddtree_operator.analysis.policy import Gate, Policy
from ddtree_operator.analysis.prompts import Prompt, load_prompts, shipped_prompts
from ddtree_operator.analysis.record import Record, RecordError, recompute
from ddtree_operator.analysis.types import Divergence, MetricVerdict, Outcome, Pair, Sample, Verdict

__all__ = [
    "Divergence",
    "Gate",
    "MetricVerdict",
    "Outcome",
    "Pair",
    "Policy",
    "Prompt",
    "Record",
    "RecordError",
    "Sample",
    "Tally",
    "Verdict",
    "evaluate",
    "load_prompts",
    "recompute",
    "shipped_prompts",
]
