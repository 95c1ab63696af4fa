"""The joint gate: pairs and a policy in, a verdict out. Pure; the same pairs always give the same verdict."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from ddtree_operator.analysis.parity import Parity, compare
from ddtree_operator.analysis.policy import ACCEPT_LENGTH, AGGREGATE, PARITY, THROUGHPUT, Gate, Policy
from ddtree_operator.analysis.samples import MAX_ERROR, cut, problem
from ddtree_operator.analysis.sequential import Array, location, log_capital, lower_bound, remaining_pairs, upper_bound
from ddtree_operator.analysis.types import MetricVerdict, Outcome, Pair, Sample, Verdict

UNBOUNDED = 1000.0  # upper end of an interval that has none yet; finite, so that it fits into JSON
FORECAST_AFTER = 5  # pairs
MAX_REASON = 500  # characters; an engine's error page must not end up in a status


def evaluate(pairs: Iterable[Pair], policy: Policy, checks: Sequence[MetricVerdict] = ()) -> Verdict:
    """Judge ``pairs``. ``checks`` are further verdicts (Prometheus) that promotion needs as well.

    May be called after every pair; the error budgets hold for all looks together.
    """
    tally = Tally(policy)
    for pair in pairs:
        tally.add(pair)
    return tally.verdict(checks)


class Tally:
    """Running state of an analysis: ``add`` costs microseconds, ``verdict`` a few milliseconds at 10,000 pairs."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.usable = 0
        self._values = {gate.metric: (array("d"), array("d")) for gate in policy.gates}  # baseline, canary
        self._logs = {gate.metric: array("d") for gate in policy.gates}
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]  # baseline, canary; over usable pairs
        self._one_sided = array("d")  # +1: only the canary failed, -1: only the baseline
        self._both_failed = 0
        self._errors = {"baseline": "", "canary": ""}  # last message of each side
        self._parity = dict.fromkeys(Parity, 0)
        self._first_bug = ""
        self._unresolved = ""

    @property
    def attempted(self) -> int:
        """Pairs seen, usable or not."""
        return self.usable + self.errors

    @property
    def errors(self) -> int:
        """Pairs that could not be used."""
        return len(self._one_sided) + self._both_failed

    def add(self, pair: Pair) -> None:
        """Take in one pair."""
        baseline = problem(pair.baseline, self.policy.baseline_speculates)
        canary = problem(pair.canary, self.policy.canary_speculates)
        if baseline is not None:
            self._errors["baseline"] = cut(baseline, MAX_ERROR)
        if canary is not None:
            self._errors["canary"] = cut(canary, MAX_ERROR)
        if baseline is not None and canary is not None:
            self._both_failed += 1
        elif baseline is not None or canary is not None:
            self._one_sided.append(1.0 if canary is not None else -1.0)
        else:
            self.usable += 1
            for gate in self.policy.gates:
                b, c = _value(gate.metric, pair.baseline), _value(gate.metric, pair.canary)
                values = self._values[gate.metric]
                values[0].append(b)
                values[1].append(c)
                self._logs[gate.metric].append(math.log(c / b))
            for side, sample in enumerate((pair.baseline, pair.canary)):
                self._tokens[side] += sample.completion_tokens
                self._seconds[side] += sample.seconds
            self._add_parity(pair)

    def _add_parity(self, pair: Pair) -> None:
        found = compare(pair, self.policy.tie_gap)
        self._parity[found] += 1
        said = pair.divergence
        if found is Parity.BUG and not self._first_bug:
            self._first_bug = f"prompt {cut(pair.canary.prompt_id, 60)}"
            if said is not None:
                gaps = [f"{g:.3g}" if g is not None else "unknown" for g in (said.baseline_gap, said.canary_gap)]
                self._first_bug += f", token {said.position}, top-2 gaps {gaps[0]} (baseline) and {gaps[1]} (canary)"
        if found is Parity.UNRESOLVED and said is not None and said.error:
            self._unresolved = cut(said.error, MAX_ERROR)

    def verdict(self, checks: Sequence[MetricVerdict] = ()) -> Verdict:
        """The state after the pairs so far."""
        compared = [self._compare(gate) for gate in self.policy.gates]
        compared += [self._aggregate(gate) for gate in self.policy.gates if gate.metric == THROUGHPUT]
        metrics = (*compared, self._parity_verdict(), *checks)
        outcome, reason = self._join(metrics)
        return Verdict(outcome, metrics, self.usable, self.errors, cut(reason, MAX_REASON), rule=self.policy.rule)

    def _join(self, metrics: Sequence[MetricVerdict]) -> tuple[Outcome, str]:
        policy = self.policy
        failed = [m for m in metrics if m.outcome is Outcome.FAIL]
        if failed:
            return Outcome.FAIL, "; ".join(f"{m.metric}: {m.reason}" for m in failed)
        canary_only = sum(1 for x in self._one_sided if x > 0)
        baseline_only = len(self._one_sided) - canary_only
        if log_capital(np.asarray(self._one_sided)) >= math.log(1 / policy.error_budget):
            return Outcome.FAIL, (
                f"the canary alone failed {canary_only} of {self.attempted} requests "
                f"(the baseline alone {baseline_only}); last error: {self._errors['canary']}"
            )
        wanted = policy.min_pairs + policy.pairs_per_error * self.errors
        if self.usable < wanted:
            why = f", {policy.pairs_per_error} more for each of {self.errors} unusable ones" if self.errors else ""
            return Outcome.NOT_YET, f"{self.usable} usable pairs of at least {wanted}{why}{self._last_error()}"
        waiting = [m for m in metrics if m.outcome is not Outcome.PASS]
        if waiting:
            reason = "; ".join(f"{m.metric}: {m.reason}" for m in waiting)
            if self.attempted >= policy.max_pairs:
                reason = f"undecided after {self.attempted} pairs (maxPairs {policy.max_pairs}); {reason}"
            return Outcome.NOT_YET, reason
        return Outcome.PASS, "; ".join(f"{m.metric}: {m.reason}" for m in metrics)

    def _last_error(self) -> str:
        sides = [f"last error of the {side}: {text}" for side, text in self._errors.items() if text]
        return "; " + "; ".join(sides) if sides else ""

    def _compare(self, gate: Gate) -> MetricVerdict:
        policy, n = self.policy, self.usable
        if n == 0:
            return MetricVerdict(
                gate.metric, Outcome.NOT_YET, 0.0, 0.0, 0.0, -1.0, UNBOUNDED, gate.threshold, 0, "no usable pairs"
            )
        logs: Array = np.asarray(self._logs[gate.metric])
        baseline, canary = (float(np.asarray(v).mean()) for v in self._values[gate.metric])
        x = np.clip((logs - gate.log_threshold) / policy.clip, -1.0, 1.0)
        above = log_capital(x) >= math.log(1 / policy.false_promote)
        below = log_capital(-x) >= math.log(1 / policy.rollback_share)
        mean_above = canary / baseline - 1 >= gate.threshold
        low = math.expm1(lower_bound(logs, policy.clip, policy.false_promote))
        high = min(UNBOUNDED, math.expm1(min(upper_bound(logs, policy.clip, policy.rollback_share), 20.0)))
        estimate = math.expm1(location(logs, policy.clip))
        seen = f"{_number(canary)} against {_number(baseline)} ({canary / baseline - 1:+.1%})"
        if gate.metric == ACCEPT_LENGTH and policy.canary_window and policy.baseline_window:
            costs = policy.canary_window / canary, policy.baseline_window / baseline
            seen += f" for {costs[0]:.1f} verified tokens each against {costs[1]:.1f}"
        wanted = f"{gate.threshold:+.1%}"
        if above and mean_above and n >= policy.min_pairs:
            outcome, reason = Outcome.PASS, f"{seen}, credibly above {wanted} after {n} pairs"
        elif below and not mean_above:
            outcome, reason = Outcome.FAIL, f"{seen}, credibly below {wanted} after {n} pairs"
        else:
            outcome = Outcome.NOT_YET
            reason = f"{seen} after {n} pairs, not yet told from {wanted} (between {_side(low)} and {_side(high)})"
            reason += _forecast(x, policy)
            if (above and not mean_above) or (below and mean_above):
                reason = f"{seen} after {n} pairs: most requests lie on the other side of {wanted} than the mean"
        return MetricVerdict(
            gate.metric, outcome, baseline, canary, estimate, low, high, gate.threshold, n, cut(reason, MAX_REASON)
        )

    def _aggregate(self, gate: Gate) -> MetricVerdict:
        """All tokens over all seconds of a side. A rule, not a test: it can hold a promotion back, and no more.

        One stalled request of many hardly moves the mean of single requests; here it counts with all its seconds.
        """
        policy, n = self.policy, self.usable
        if n == 0:
            return MetricVerdict(
                AGGREGATE, Outcome.NOT_YET, 0.0, 0.0, 0.0, 0.0, 0.0, gate.threshold, 0, "no usable pairs"
            )
        baseline, canary = (t / s for t, s in zip(self._tokens, self._seconds, strict=True))
        change = canary / baseline - 1
        seen = f"{_number(canary)} against {_number(baseline)} ({change:+.1%}) over all of {n} pairs"
        if change < gate.threshold:
            outcome, reason = Outcome.NOT_YET, f"{seen}, below {gate.threshold:+.1%}"
        elif n < policy.min_pairs:
            outcome, reason = Outcome.NOT_YET, f"{seen}; at least {policy.min_pairs} pairs are wanted"
        else:
            outcome, reason = Outcome.PASS, f"{seen}, not below {gate.threshold:+.1%}"
        return MetricVerdict(AGGREGATE, outcome, baseline, canary, change, change, change, gate.threshold, n, reason)

    def _parity_verdict(self) -> MetricVerdict:
        policy, count = self.policy, self._parity
        bugs, ties, unresolved = count[Parity.BUG], count[Parity.TIE], count[Parity.UNRESOLVED]
        compared = count[Parity.EQUAL] + ties + bugs
        if bugs > policy.parity_allow:
            outcome = Outcome.FAIL
            reason = f"{bugs} of {compared} outputs differ with no tie to explain it (first: {self._first_bug})"
        elif compared < policy.min_pairs:
            outcome = Outcome.NOT_YET
            reason = f"{compared} compared outputs of at least {policy.min_pairs}"
            if count[Parity.UNKNOWN]:
                reason += f"; {count[Parity.UNKNOWN]} answers came without token ids"
        elif unresolved:
            outcome = Outcome.NOT_YET
            reason = f"{unresolved} differing outputs could not be explained yet: {self._unresolved}"
        else:
            outcome, reason = Outcome.PASS, f"{compared - ties} of {compared} outputs equal"
            if ties:
                reason += f", {ties} differ at a tie"
            if bugs:
                reason += f" ({bugs} unexplained, {policy.parity_allow} allowed)"
        share = float(compared)
        return MetricVerdict(
            PARITY,
            outcome,
            share,
            share,
            float(bugs),
            float(bugs),
            float(bugs),
            float(policy.parity_allow),
            self.usable,
            cut(reason, MAX_REASON),
        )


def _forecast(x: Array, policy: Policy) -> str:
    """How far a decision is, in words; empty when it cannot be said yet."""
    if x.size < FORECAST_AFTER:
        return ""
    ways = (remaining_pairs(x, policy.false_promote), remaining_pairs(-x, policy.rollback_share))
    more = min((n for n in ways if n is not None), default=None)
    return "" if more is None else f", about {more} more pairs at this rate"


def _value(metric: str, sample: Sample) -> float:
    return sample.accept_length if metric == ACCEPT_LENGTH else sample.tokens_per_second


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _side(value: float) -> str:
    return f"{value:+.1%}" if -1 < value < UNBOUNDED else "any"
