"""``ddtreectl explain``: kept verdicts, judged again."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from xml.dom import minidom

import pytest

from ddtree_operator.analysis import Outcome, evaluate, record
from unit.conftest import Run
from unit.ddt_records import recorded, with_record

pytestmark = pytest.mark.unit


def test_explain_judges_the_record_again(run: Run) -> None:
    code, out, _ = run("explain qwen3-8b", with_record(recorded()))
    assert code == 0
    assert "record qwen3-8b-8c1d2e3f40-a0-s1 (attempt 1, step 2)" in out
    assert out.count("judged again here from 30 pairs: the same verdict") == 1
    assert "(the one that decided)" in out
    assert out.split("acceptLength")[1].split()[:2] == ["2.15", "2.75"]


def test_explain_notices_a_verdict_that_the_pairs_do_not_give(run: Run) -> None:
    code, out, _ = run("explain qwen3-8b", with_record(recorded(outcome=Outcome.FAIL)))
    assert code == 1
    assert "judged again here from 30 pairs: now notYet" in out or "now pass" in out


def test_explain_of_a_record_file_needs_no_cluster(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "record.gz"
    path.write_bytes(recorded())
    code, out, _ = run(f"explain --record {path} -o json")
    assert code == 0
    assert json.loads(out)["same"] is True
    path.write_bytes(b"nonsense")
    code, _, err = run(f"explain --record {path}")
    assert code == 1
    assert "the record is not gzip data" in err
    assert run("explain")[0] == 1


def test_explain_notices_an_altered_record(run: Run) -> None:
    """Pairs and verdict changed together agree with each other, but not with the digest in the status."""
    fake = with_record(recorded())
    for config_map in fake.record_maps:
        config_map["binaryData"]["pairs.jsonl.gz"] = base64.b64encode(recorded(pairs=29)).decode()
    code, out, _ = run("explain qwen3-8b", fake)
    assert code == 1
    assert "the same verdict" not in out
    fake = with_record(recorded())
    other = record.load(recorded())
    kept = replace(other, pairs=other.pairs[:20], verdict=evaluate(other.pairs[:20], other.policy))
    for config_map in fake.record_maps:
        config_map["binaryData"]["pairs.jsonl.gz"] = base64.b64encode(record.dump(kept)).decode()
    code, out, _ = run("explain qwen3-8b", fake)
    assert code == 1
    assert "judged again here from 20 pairs: the same verdict" in out
    assert "the record was altered, or is gone" in out
    assert "altered" in json.loads(run("explain qwen3-8b -o json", fake)[1])
    fake.objects["qwen3-8b"]["status"]["history"][2]["result"] = "inProgress"  # paused and resumed: the record grows
    assert run("explain qwen3-8b", fake)[0] == 0


def test_explain_draws_and_saves_the_record_that_decided(run: Run, tmp_path: Path) -> None:
    drawn, saved = tmp_path / "plot.svg", tmp_path / "record.jsonl.gz"
    code, _, err = run(f"explain qwen3-8b --plot {drawn} --export {saved}", with_record(recorded()))
    assert code == 0
    assert f"wrote {drawn}" in err
    assert saved.read_bytes() == recorded()
    picture = minidom.parse(str(drawn))
    titles = [t.firstChild.nodeValue for t in picture.getElementsByTagName("text") if "after" in str(t.toxml())]
    assert titles == ["acceptLength: pass after 30 pairs", "throughput: notYet after 30 pairs"]
    _, out, _ = run(f"explain --record {saved} --plot - --metric acceptLength")
    assert "acceptLength (canary against baseline, by pairs)" in out
    assert "┼" in out
    assert "throughput (canary" not in out
    code, _, err = run(f"explain --record {saved} --plot - --metric speed")
    assert (code, "no metric 'speed' in the record" in err) == (1, True)
    assert run(f"explain --record {saved} --plot {tmp_path}/no/where.svg")[0] == 1
    assert run(f"explain qwen3-8b --export {saved}")[0] == 4


def test_explain_says_when_there_is_no_record(run: Run) -> None:
    assert "no record of its analysis is kept" in run("explain qwen3-8b")[2]


def test_what_only_a_picture_has_use_for_is_not_passed_over_in_silence(run: Run) -> None:
    code, out, err = run("explain qwen3-8b --metric acceptLength", with_record(recorded()))
    assert (code, out) == (1, "")
    assert err == "error: --metric chooses what --plot draws; give --plot FILE, or - for the terminal\n"


def test_explain_says_how_many_prompts_were_users(run: Run, tmp_path: Path) -> None:
    kept = record.load(recorded())
    pairs = tuple(
        replace(p, baseline=replace(p.baseline, prompt_id=f"live-{i}"), canary=replace(p.canary, prompt_id=f"live-{i}"))
        if i < 12
        else p
        for i, p in enumerate(kept.pairs)
    )
    path = tmp_path / "record.gz"
    path.write_bytes(record.dump(replace(kept, pairs=pairs)))
    code, out, _ = run(f"explain --record {path}")
    assert code == 0
    assert "judged again here from 30 pairs (12 with prompts of users, whose text is not kept): the same verdict" in out
