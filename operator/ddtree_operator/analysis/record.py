"""What a verdict was made of, small enough for a ConfigMap, complete enough to make the verdict again.

JSON lines, gzipped: a head (format, rule version, policy, seed, notes), one line a pair in order, a tail (checks,
verdict). Equal outputs are kept as their length and a hash, since all that counts is that they were equal; differing
ones are kept as ids. The digest is over the lines, so it does not depend on the compressor.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ddtree_operator.analysis.evaluate import evaluate
from ddtree_operator.analysis.policy import RULE, Gate, Policy
from ddtree_operator.analysis.samples import MAX_ERROR, cut
from ddtree_operator.analysis.types import Divergence, MetricVerdict, Outcome, Pair, Sample, Verdict

FORMAT = 1
MAX_BYTES = 700_000  # gzipped: base64 of it fits into a ConfigMap
MAX_LINES_BYTES = 64 << 20  # unpacked; a guard against gzip bombs
MAX_OUTPUTS = 100  # differing pairs whose ids are kept; of later ones the ids around the difference
_AROUND = 8
_LATER = {
    "canary_window",
    "baseline_window",
    "tie_gap_from",
}  # of the policy: what came without another rule, and has a neutral default


@dataclass(frozen=True, slots=True)
class Record:
    """A verdict with its inputs. ``notes``: who, when, which revisions; free text, no part of the verdict."""

    policy: Policy
    pairs: tuple[Pair, ...]
    verdict: Verdict
    checks: tuple[MetricVerdict, ...] = ()
    seed: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0  # pairs that did not fit; then the verdict cannot be made again


class RecordError(ValueError):
    """A record cannot be read or judged again; the message is one sentence."""


def dump(record: Record, max_bytes: int = MAX_BYTES) -> bytes:
    """Gzipped record, at most ``max_bytes``: the last pairs are left out when it would be longer, and counted."""
    pairs = list(record.pairs)
    left_out = record.left_out
    while True:
        data = gzip.compress(_lines(record, pairs, left_out), compresslevel=6, mtime=0)
        if len(data) <= max_bytes or not pairs:
            return data
        keep = min(len(pairs) - 1, int(len(pairs) * max_bytes / len(data) * 0.98))
        left_out += len(pairs) - keep
        del pairs[keep:]


def load(data: bytes) -> Record:
    """Inverse of ``dump``, up to the ids of equal outputs. Raises RecordError."""
    lines = _unpack(data).decode("utf-8", "replace").splitlines()
    try:
        head, *rows, tail = (json.loads(line) for line in lines)
        if head["format"] != FORMAT:
            raise RecordError(f"the record has format {head['format']}; this version reads format {FORMAT}")
        return Record(
            policy=_policy(head["policy"]),
            pairs=tuple(_pair(row) for row in rows),
            verdict=_verdict(tail["verdict"]),
            checks=tuple(_metric(m) for m in tail["checks"]),
            seed=head["seed"],
            notes=head["notes"],
            left_out=tail["leftOut"],
        )
    except RecordError:
        raise
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise RecordError(f"the record is damaged: {type(e).__name__} {str(e)[:100]}") from None


def digest(data: bytes) -> str:
    """``sha256:…`` of the record's lines. Raises RecordError when they cannot be unpacked."""
    return f"sha256:{hashlib.sha256(_unpack(data)).hexdigest()}"


def recompute(record: Record) -> Verdict:
    """Judge the record's pairs again. Raises RecordError when this version cannot give the same answer."""
    if record.left_out:
        raise RecordError(
            f"the record holds {len(record.pairs)} of {len(record.pairs) + record.left_out} pairs; "
            "the verdict cannot be made again from it"
        )
    if record.policy.rule != RULE:
        raise RecordError(f"the record was judged by rule {record.policy.rule}; this version knows rule {RULE}")
    return evaluate(record.pairs, record.policy, record.checks)


def timeline(record: Record, points: int = 100) -> list[Verdict]:
    """Verdicts after growing numbers of pairs (about ``points`` of them, the last included), for a plot."""
    count = len(record.pairs)
    ends = sorted({round(count * (i + 1) / points) for i in range(points)} - {0}) if count else []
    return [evaluate(record.pairs[:n], record.policy) for n in ends]


def _lines(record: Record, pairs: Sequence[Pair], left_out: int) -> bytes:
    head = {
        "format": FORMAT,
        "policy": asdict(record.policy),
        "seed": record.seed,
        "notes": dict(record.notes),
    }
    full = MAX_OUTPUTS
    rows: list[object] = []
    for pair in pairs:
        differ = pair.baseline.output_ids != pair.canary.output_ids
        rows.append(_row(pair, differ, full > 0))
        full -= differ
    tail = {
        "checks": [asdict(m) for m in record.checks],
        "verdict": asdict(record.verdict),
        "leftOut": left_out,
    }
    return "".join(
        json.dumps(x, ensure_ascii=False, separators=(",", ":"), sort_keys=True) + "\n" for x in (head, *rows, tail)
    ).encode()


def _row(pair: Pair, differ: bool, full: bool) -> list[object]:
    a, b = pair.baseline.output_ids, pair.canary.output_ids
    outputs: object
    if not differ:
        outputs = [len(a), hashlib.sha256(repr(a).encode()).hexdigest()[:8]] if a else None
    elif full or pair.divergence is None:
        outputs = [0, list(a), list(b)]
    else:
        start, end = max(0, pair.divergence.position - _AROUND), pair.divergence.position + _AROUND
        outputs = [start, list(a[start:end]), list(b[start:end])]
    said = pair.divergence
    return [
        int(pair.canary_first),
        _sample_row(pair.baseline),
        _sample_row(pair.canary),
        outputs,
        None if said is None else [said.position, said.baseline_gap, said.canary_gap, said.error],
    ]


def _sample_row(s: Sample) -> list[object]:
    row: list[object] = [s.prompt_id, s.completion_tokens, s.verify_steps, s.accepted_drafts, s.seconds]
    if s.error is not None or s.proposed_drafts or s.top2_gaps:
        row += [s.proposed_drafts, None if s.error is None else cut(s.error, MAX_ERROR), list(s.top2_gaps)]
    return row


def _pair(row: list[Any]) -> Pair:
    first, baseline, canary, outputs, said = row
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()
    if outputs is not None and isinstance(outputs[1], str):
        a = b = (int(outputs[1], 16),) * outputs[0]  # stands for equal outputs of that length
    elif outputs is not None:
        common = (0,) * outputs[0]
        a, b = common + tuple(outputs[1]), common + tuple(outputs[2])
    return Pair(_sample(baseline, a), _sample(canary, b), bool(first), None if said is None else Divergence(*said))


def _sample(row: list[Any], output_ids: tuple[int, ...]) -> Sample:
    prompt_id, tokens, steps, accepted, seconds, *more = row
    proposed, error, gaps = more or (0, None, [])
    return Sample(prompt_id, tokens, steps, accepted, seconds, output_ids, tuple(gaps), error, proposed)


def _policy(data: dict[str, Any]) -> Policy:
    other = ({*data} ^ {f.name for f in fields(Policy)}) - _LATER
    if other:
        rule = data.get("rule")
        raise RecordError(f"the record's policy is that of another version (rule {rule}; {', '.join(sorted(other))})")
    return Policy(**{**data, "gates": tuple(Gate(**g) for g in data["gates"])})


def _metric(data: dict[str, Any]) -> MetricVerdict:
    return MetricVerdict(**{**data, "outcome": Outcome(data["outcome"])})


def _verdict(data: dict[str, Any]) -> Verdict:
    metrics = tuple(_metric(m) for m in data["metrics"])
    return Verdict(**{**data, "outcome": Outcome(data["outcome"]), "metrics": metrics})


def _unpack(data: bytes) -> bytes:
    try:
        unpacker = zlib.decompressobj(wbits=31)
        lines = unpacker.decompress(data, MAX_LINES_BYTES)
    except zlib.error:
        raise RecordError("the record is not gzip data") from None
    if unpacker.unconsumed_tail:
        raise RecordError(f"the record unpacks to more than {MAX_LINES_BYTES >> 20} MiB")
    if not unpacker.eof:
        raise RecordError("the record is cut off")
    return lines
