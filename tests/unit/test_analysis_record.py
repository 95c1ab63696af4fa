"""Records: the same verdict from the record, bounded, and damage is told."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path

import pytest

from analysis_streams import noisy_pairs, pair, sample
from ddtree_operator.analysis import Divergence, MetricVerdict, Outcome, Pair, Policy, evaluate
from ddtree_operator.analysis.record import Record, RecordError, digest, dump, load, recompute, timeline
from ddtree_operator.api.spec import AnalysisSpec

pytestmark = pytest.mark.unit

POLICY = Policy.from_spec(AnalysisSpec(), dtype="float32", canary_speculates=True)


def make(pairs, checks=()):
    pairs = tuple(pairs)
    return Record(POLICY, pairs, evaluate(pairs, POLICY, checks), tuple(checks), seed=7, notes={"canary": "abc"})


STREAMS = {
    "empty": [],
    "gain": noisy_pairs(0, 60, 0.25, 0.2),
    "errors": [*noisy_pairs(1, 5, 0, 0), *[Pair(sample(), sample(error="boom\n  " + "y " * 500))] * 20],
    "bug": [
        *noisy_pairs(2, 5, 0, 0),
        Pair(sample(ids=(1, 2, 3)), sample(ids=(1, 9, 9)), True, Divergence(1, 0.5, 2.5)),
    ],
    "tie": [
        *noisy_pairs(2, 30, 0.2, 0.2),
        Pair(sample(ids=tuple(range(40))), sample(ids=(*range(30), 99)), True, Divergence(30, 0.0, 1e-7)),
    ],
    "no ids": [Pair(sample(ids=()), sample(ids=()))] * 12,
}


@pytest.mark.parametrize("name", STREAMS)
def test_recomputed_verdict_is_equal(name):
    record = make(STREAMS[name], [MetricVerdict("prometheus/x", Outcome.PASS, 0, 0, 0, -math.inf, 0, 0, 0, "fine")])
    data = dump(record)
    again = load(data)
    assert recompute(again) == record.verdict == again.verdict
    assert again.seed == 7
    assert again.notes == {"canary": "abc"}
    assert [p.canary_first for p in again.pairs] == [p.canary_first for p in record.pairs]
    assert dump(again) is not None
    assert digest(data) == digest(gzip.compress(gzip.decompress(data), compresslevel=1))


def test_two_thousand_pairs_fit_into_a_config_map():
    data = dump(make(noisy_pairs(0, 2000, 0, 0)))
    assert len(data) < 200_000


def test_many_differing_outputs_stay_bounded():
    ids = tuple(range(30000, 30000 + 512))
    tie = Pair(sample(ids=ids), sample(ids=(*ids[:500], 5)), divergence=Divergence(500, 0.0, 0.0))
    record = make([replace(tie, baseline=replace(tie.baseline, prompt_id=str(i))) for i in range(1000)])
    again = load(dump(record))
    assert recompute(again) == record.verdict


def test_too_long_a_record_says_so():
    record = make(noisy_pairs(0, 400, 0, 0))
    data = dump(record, max_bytes=6000)
    assert len(data) <= 6000
    again = load(data)
    assert again.left_out > 0
    assert len(again.pairs) + again.left_out == 400
    with pytest.raises(RecordError, match=r"holds \d+ of 400 pairs"):
        recompute(again)


def test_other_rule_is_refused():
    record = replace(make([pair()]), policy=replace(POLICY, rule="0"))
    with pytest.raises(RecordError, match="rule 0"):
        recompute(record)


def test_records_from_before_the_windows_were_kept_are_read():
    lines = gzip.decompress(dump(make([pair()] * 12)))
    old = lines.replace(b'"canary_window":0,', b"").replace(b'"baseline_window":0,', b"")
    assert len(old) < len(lines)
    kept = load(gzip.compress(old))
    assert recompute(kept) == kept.verdict


def test_policy_of_another_version_is_told():
    lines = gzip.decompress(dump(make([pair()]))).replace(b'"clip"', b'"cut"')
    with pytest.raises(RecordError, match=r"another version .rule 2; clip, cut"):
        load(gzip.compress(lines))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"hello", "not gzip"),
        (gzip.compress(b"hello\n"), "damaged"),
        (gzip.compress(b'{"format": 99}\n{}\n'), "format 99"),
        (gzip.compress(b"[]\n[]\n"), "damaged"),
        (dump(make([pair()]))[:-20], "cut off"),
    ],
)
def test_damage_is_told(data, says):
    with pytest.raises(RecordError, match=says):
        load(data)


def test_timeline_ends_at_the_verdict():
    record = make(noisy_pairs(0, 57, 0.25, 0.2))
    steps = timeline(record, points=10)
    assert len(steps) == 10
    assert steps[-1] == record.verdict
    assert [v.pairs for v in steps] == sorted(v.pairs for v in steps)


RECORDS = sorted((Path(__file__).parents[2] / "docs/benchmarks/records").glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.name)
def test_records_of_real_engines_still_give_their_verdict(path):
    kept = load(path.read_bytes())
    assert len(kept.pairs) > 0
    assert recompute(kept) == kept.verdict


def test_there_are_records_of_real_engines():
    assert RECORDS
