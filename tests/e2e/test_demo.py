"""The whole mission on real parts: the demo's five rollouts with the tiny pair, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the demo; its progress goes to the terminal."""
    out = tmp_path_factory.mktemp("demo") / "demo.json"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/dev:{ROOT}/operator:{ROOT}/cli"}
    command = [sys.executable, "-m", "demo", "--model", "tiny", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=3000, check=False)
    print(done.stdout)
    assert out.is_file(), "the demo ended before its report; the lines above say why"
    found: dict[str, Any] = json.loads(out.read_text())
    found["exit"], found["stdout"] = done.returncode, done.stdout
    return found


def case(report: dict[str, Any], key: str) -> dict[str, Any]:
    status: dict[str, Any] = next(c for c in report["raw"]["cases"] if c["key"] == key)["status"]
    return status


def metric(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in status["analysis"]["metrics"] if m["metric"] == name)
    return found


def test_the_chain_is_verified_against_plain_decoding_and_serves(report: dict[str, Any]) -> None:
    status = case(report, "a")
    assert status["phase"] == "Stable"
    assert metric(status, "acceptLength")["canary"] > metric(status, "acceptLength")["baseline"]
    assert metric(status, "parity")["outcome"] == "pass"
    assert "@sha256:" in status["stable"]["image"]


def test_the_tree_is_promoted_over_the_chain(report: dict[str, Any]) -> None:
    status = case(report, "b")
    assert status["phase"] == "Stable"
    accept = metric(status, "acceptLength")
    assert accept["canary"] > accept["baseline"] > 1
    assert metric(status, "parity")["outcome"] == "pass"
    assert status["stable"]["algorithm"] == "DDTREE/15 block 6"


def test_the_same_inputs_are_built_once(report: dict[str, Any]) -> None:
    assert case(report, "a")["stable"]["image"] == case(report, "b")["stable"]["image"]
    phases = {c["key"]: c["phases"] for c in report["raw"]["cases"]}
    assert "Building" not in phases["b"]


def test_a_drafter_that_does_not_fit_is_rolled_back_on_acceptance(report: dict[str, Any]) -> None:
    status = case(report, "c")
    assert status["phase"] == "RolledBack"
    assert metric(status, "acceptLength")["outcome"] == "fail"
    assert status["stable"]["revision"] == case(report, "b")["revision"]


def test_an_operator_killed_meanwhile_changes_nothing(report: dict[str, Any]) -> None:
    ended = next(c for c in report["raw"]["cases"] if c["key"] == "c")
    assert ended["killed"]
    rolled = [entry for entry in ended["status"]["history"] if entry["revision"] == ended["status"]["revision"]]
    assert [entry["result"] for entry in rolled] == ["rolledBack"]


def test_a_wrong_mask_never_serves(report: dict[str, Any]) -> None:
    status = case(report, "d")
    assert status["phase"] == "RolledBack"
    assert "refused to serve" in status["message"]
    assert "mask" in status["message"]
    assert "analysis" not in status  # it never got as far as a prompt


def test_wrong_text_is_rolled_back_on_parity(report: dict[str, Any]) -> None:
    status = case(report, "e")
    assert status["phase"] == "RolledBack"
    assert metric(status, "parity")["outcome"] == "fail"


def test_an_alert_takes_the_promoted_tree_back(report: dict[str, Any]) -> None:
    status = case(report, "f")
    assert status["phase"] == "RolledBack"
    assert status["revision"] == case(report, "b")["revision"]
    assert status["stable"]["revision"] == case(report, "a")["revision"]
    assert status["readyReplicas"] == status["replicas"]
    taken_back = next(entry for entry in status["history"] if entry["revision"] == status["revision"])
    assert (taken_back["result"], taken_back["by"]) == ("rolledBack", "alert DemoAlert")


def test_a_client_saw_none_of_it(report: dict[str, Any]) -> None:
    client = report["raw"]["client"]
    assert client["requests"] > 20
    assert client["failed"] == 0, client["errors"]


def test_the_demo_says_that_all_is_well(report: dict[str, Any]) -> None:
    assert report["exit"] == 0
    assert "promoted" in report["stdout"]
    assert all(row["ok"] for row in report["rows"])
