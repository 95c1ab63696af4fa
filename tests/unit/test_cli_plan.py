"""``ddtreectl plan`` and ``lint``: what can be said before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unit.conftest import Run
from unit.ddt_fake import FakeCluster
from unit.ddt_records import recorded, with_record

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


PLANNED = """
apiVersion: ddtree.dev/v1alpha1
kind: DDTreeDeployment
metadata: {name: qwen3-8b}
spec:
  model: {path: a/b}
  drafter: {path: a/c}
  canary: {analysis: {maxTokens: 40, deadline: %s}}
"""


def test_plan_of_a_file_without_a_cluster(run: Run, tmp_path: Path) -> None:
    path, kept = tmp_path / "new.yaml", tmp_path / "record.gz"
    path.write_text(PLANNED % "30m")
    kept.write_bytes(recorded())
    fake = FakeCluster()
    code, out, _ = run(f"plan -f {path}", fake)
    assert code == 0
    assert "time of a pair: not known" in out
    assert "allowed: 2000 pairs" in out
    assert "0.20 assumed" in out
    code, out, _ = run(f"plan -f {path} --record {kept} -o json", fake)
    planned = json.loads(out)
    assert (code, planned["problem"], planned["fewestPairs"]) == (0, "", 10)
    assert planned["secondsPerPair"] == pytest.approx(2.06, abs=0.01)
    assert planned["measured"] == f"measured over 30 pairs of {kept}"
    first = planned["forecasts"][0]
    assert first["spreadMeasured"]
    assert first["seconds"] == pytest.approx(first["pairs"] * planned["secondsPerPair"], rel=1e-2)
    path.write_text(PLANNED % "15s")
    code, out, _ = run(f"plan -f {path} --record {kept}", fake)
    assert code == 1
    assert "refused: spec.canary.analysis.deadline: 15s is too short, the clearest case takes 10 pairs, 21 s" in out


def test_plan_of_a_resource_takes_the_pace_of_what_serves(run: Run) -> None:
    fake = with_record(recorded())
    fake.objects["qwen3-8b"]["spec"]["drafter"] = {"path": "a/c"}
    for config_map in fake.record_maps[:1]:
        config_map["metadata"]["name"] = "qwen3-8b-3f2a1b9c0d-a0-s1"
        config_map["metadata"]["labels"] = {"ddtree.dev/revision": "3f2a1b9c0d"}
    code, out, _ = run("plan qwen3-8b", fake)
    assert code == 0
    assert "time of a pair: 3.3 s, 1 at a time; measured over 30 pairs of revision 1" in out  # 64 tokens instead of 40


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan", "give either the NAME of a DDTreeDeployment or --file FILE"),
        ("plan -f /nowhere.yaml", "cannot read /nowhere.yaml"),
        ("plan qwen3-8b", "DDTREE needs a drafter"),
        ("plan nobody", 'no DDTreeDeployment "nobody"'),
    ],
)
def test_plan_says_what_is_wrong(run: Run, line: str, words: str) -> None:
    code, _, err = run(line)
    assert code in {1, 4}
    assert words in err


def test_lint_refuses_what_can_never_be_decided(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(PLANNED.replace("maxTokens: 40", "minPairs: 2, maxPairs: 2") % "30m")
    code, out, _ = run(f"lint -f {path}")
    assert code == 1
    assert "maxPairs: 2 pairs decide nothing, the clearest case takes 9" in out


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("canary: {analysis: {acceptLength: {nonInferiority: 120%}}}", "keep it below 100%"),
        ("canary: {analysis: {errorBudget: {falsePromote: 0%}}}", "errorBudget.falsePromote is 0%; it must lie"),
        ("engine: {kind: vllm}", "spec.engine.kind: vllm is not supported yet"),
        ("traffic: {gateway: {httpRoute: r, sessionHeader: x}}", "sessionHeader: sticky sessions are not available"),
        (
            "placement: {strategy: swap}, traffic: {gateway: {httpRoute: r}}",
            "spec.placement.strategy: swap promotes by",
        ),
        (
            "canary: {steps: [{headerRoute: {}}, {analysis: {}}]}",
            "spec.canary.steps[0].headerRoute: needs spec.traffic",
        ),
        ("canary: {steps: [{canaryReplicas: 2}, {analysis: {}}]}", "canaryReplicas: needs spec.traffic.gateway"),
    ],
)
def test_lint_refuses_what_the_operator_refuses(run: Run, tmp_path: Path, spec: str, words: str) -> None:
    path = tmp_path / "a.yaml"
    head = "apiVersion: ddtree.dev/v1alpha1\nkind: DDTreeDeployment\nmetadata: {name: a}\n"
    path.write_text(f"{head}spec: {{model: {{path: /m}}, drafter: {{path: /d}}, {spec}}}\n")
    code, out, err = run(f"lint -f {path}")
    assert (code, err) == (1, "")
    assert words in out
    code, out, err = run(f"plan -f {path}")
    assert (code, out) == (1, "")
    assert words in err


def test_odd_yaml_is_no_traceback(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("kind: List\nitems: 5\n")
    assert "no DDTreeDeployment in" in run(f"lint -f {path}")[2]
    head = "apiVersion: ddtree.dev/v1alpha1\nkind: DDTreeDeployment\n"
    path.write_text(
        f"{head}metadata: {{name: a}}\nspec: {{model: {{path: /m, revision: 2026-11-30}}, drafter: {{path: /d}}}}\n"
    )
    assert run(f"lint -f {path}")[0] == 0
    path.write_text(f"{head}metadata: [a]\nspec: {{model: {{path: /m}}}}\n")
    assert "metadata.name: is required" in run(f"plan -f {path}")[2]


def test_lint(run: Run, tmp_path: Path) -> None:
    assert run(f"lint -f {ROOT / 'docs/examples/full.yaml'}")[0] == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "kind: ConfigMap\n---\napiVersion: ddtree.dev/v1alpha1\nkind: DDTreeDeployment\nmetadata: {name: a}\n"
        "spec: {model: {path: /m}, replica: 2}\n"
    )
    code, out, _ = run(f"lint -f {bad}")
    assert code == 1
    assert "DDTreeDeployment a: spec.replica: unknown field; did you mean replicas?" in out
    bad.write_text("a: [")
    assert "is not YAML" in run(f"lint -f {bad}")[2]
    bad.write_text("kind: ConfigMap")
    assert "no DDTreeDeployment in" in run(f"lint -f {bad}")[2]
