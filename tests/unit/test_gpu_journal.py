"""A benchmark that is cut off keeps what it measured (``dev/gpu/journal.py``)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "dev/gpu/journal.py"
spec = importlib.util.spec_from_file_location("gpu_journal", FILE)
assert spec is not None
assert spec.loader is not None
gpu_journal = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_journal)

pytestmark = pytest.mark.unit
HEAD = {"seed": 1, "wanted": ["plain"]}


def lines(out: Path) -> list[str]:
    with gpu_journal.path_of(out).open() as file:
        return list(file)


def test_phases_are_folded_with_their_lists_and_values(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with gpu_journal.Journal(out, HEAD) as journal:
        journal.begin("parity")
        journal.put("plain", {"tokens": 4})
        journal.add("against", {"engine": "tree7"})
        journal.end()
        first = json.loads(out.read_text())
        assert first["parity"].pop("seconds") >= 0
        assert first == {**HEAD, "parity": {"plain": {"tokens": 4}, "against": [{"engine": "tree7"}]}}
        journal.begin("speed")
        assert journal.add("runs", {"tok_s": 1.5}) == {"tok_s": 1.5}
        journal.add("runs", {"tok_s": 2.5})
        assert len(lines(out)) == 6, "a run is on disk before the next begins"
    record = json.loads(out.read_text())
    assert record["speed"] == {"cut": True, "runs": [{"tok_s": 1.5}, {"tok_s": 2.5}]}
    assert "cut" not in record["parity"]


def test_a_line_that_was_being_written_is_left_out_and_any_other_rubbish_is_named() -> None:
    run = json.dumps({"phase": "speed", "key": "runs", "item": 1}) + "\n"
    assert gpu_journal.fold([run, run, run[:12]]) == {"speed": {"cut": True, "runs": [1, 1]}}
    with pytest.raises(ValueError, match="line 2 of the journal is not JSON"):
        gpu_journal.fold([run, "rubbish\n", run])
    assert gpu_journal.fold([]) == {}


KILLED = """
import os, sys
from pathlib import Path
import journal
with journal.Journal(Path(sys.argv[1]), {"seed": 1}) as j:
    j.begin("speed")
    j.add("runs", {"tok_s": 3.5})
    print("measured", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_run_measured_is_made_into_its_result_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, out],
        env=os.environ | {"PYTHONPATH": str(FILE.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measured\n"
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    subprocess.run([sys.executable, FILE, out], check=True)
    assert json.loads(out.read_text()) == {"seed": 1, "speed": {"cut": True, "runs": [{"tok_s": 3.5}]}}
    wrong = subprocess.run([sys.executable, FILE, tmp_path / "none.json"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "Traceback" not in wrong.stderr
    assert "No such file" in wrong.stderr
