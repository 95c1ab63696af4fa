"""After promotion: is the revision still what its canary showed? The same prompts, against the recorded answers.

Time since promotion is cut into epochs. Each has a test of its own with its share of the false-rollback budget, so that
a fall late in the watch is not diluted by the good hours before it, and so that a restart of the operator, which begins
the epoch anew, spends little. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ddtree_operator.analysis.evaluate import Tally
from ddtree_operator.analysis.policy import ACCEPT_LENGTH, ERROR_SHARE, Gate, Policy, percent
from ddtree_operator.analysis.samples import cut, problem
from ddtree_operator.analysis.sequential import log_capital
from ddtree_operator.analysis.types import Outcome, Pair, Sample
from ddtree_operator.api.spec import AnalysisSpec

EPOCHS = 6  # in a watch
LEAST_ERRORS = 0.05  # share of failing requests below which nothing is said
WORSE = 2.0  # so many times the canary's own share of failures is still no worse


def epoch_of(since: float, watch: float) -> int:
    """Number of the epoch, from 0, ``since`` seconds after promotion."""
    return min(EPOCHS - 1, max(0, int(since * EPOCHS / watch))) if watch > 0 else 0


def expected_of(pairs: Iterable[Pair], speculates: bool | None) -> tuple[dict[str, Sample], float]:
    """The canary's usable answers by prompt, the newest of each, and its share of failures."""
    known: dict[str, Sample] = {}
    failed = seen = 0
    for pair in pairs:
        seen += 1
        if problem(pair.canary, speculates) is None:
            known[pair.canary.prompt_id] = pair.canary
        else:
            failed += 1
    return known, failed / seen if seen else 0.0


def policy_for(spec: AnalysisSpec, speculates: bool | None) -> Policy:
    """Accept length may not fall by more than the canary's own margin (also where promotion asked for a gain)."""
    margin = percent("acceptLength.nonInferiority", spec.accept_length.non_inferiority)
    return Policy(
        gates=(Gate(ACCEPT_LENGTH, -margin),),
        false_rollback=percent("errorBudget.falseRollback", spec.error_budget.false_rollback) / EPOCHS,
        min_pairs=spec.min_pairs,
        canary_speculates=speculates,
        baseline_speculates=speculates,
    )


@dataclass(slots=True)
class Watch:
    """One epoch. ``expected``: recorded answers by prompt; ``failures``: the canary's share of failed requests."""

    policy: Policy
    expected: Mapping[str, Sample]
    failures: float
    epoch: int = 0
    _tally: Tally = field(init=False)
    _failed: list[float] = field(default_factory=list)  # 1.0 for each request that failed, 0.0 for each that did not
    _error: str = ""

    def __post_init__(self) -> None:
        self._tally = Tally(self.policy)

    def add(self, sample: Sample) -> None:
        """Take in an answer to one of the expected prompts."""
        wrong = problem(sample, self.policy.canary_speculates)
        self._failed.append(float(wrong is not None))
        if wrong is not None:
            self._error = cut(wrong, 200)
            return
        # Texts are compared elsewhere: the record keeps only hashes of them.
        before = replace(self.expected[sample.prompt_id], output_ids=())
        self._tally.add(Pair(before, replace(sample, output_ids=()), canary_first=False))

    def state(self) -> tuple[Outcome, str]:
        """FAIL, or NOT_YET, and why."""
        asked, failed = len(self._failed), sum(self._failed)
        tolerated = max(LEAST_ERRORS, WORSE * self.failures)
        budget = self.policy.false_rollback * ERROR_SHARE
        if tolerated < 1 and log_capital(np.array(self._failed) - tolerated) >= math.log(1 / budget):
            share = f"{failed:.0f} of {asked} requests failed, {self.failures:.0%} of the canary's did"
            return Outcome.FAIL, f"{share}; last error: {self._error}"
        metrics = self._tally.verdict().metrics
        accept = next(m for m in metrics if m.metric == ACCEPT_LENGTH)
        text = f"accept length {accept.canary:.2f} on prompts that gave the canary {accept.baseline:.2f}"
        if accept.outcome is Outcome.FAIL:
            return Outcome.FAIL, f"{text} ({accept.estimate:+.1%}, {accept.pairs} prompts)"
        return Outcome.NOT_YET, f"{text} ({accept.pairs} prompts)" if accept.pairs else "nothing asked yet"
