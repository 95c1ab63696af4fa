"""The command line: exit codes, what goes where, and what is sent to the cluster."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
import yaml

from ddtree_operator.analysis import Outcome, Pair, Policy, Sample, evaluate, record
from ddtree_operator.api.actions import ActionRequest
from ddtree_operator.api.spec import AnalysisSpec
from ddtreectl import __main__, kube
from ddtreectl.verbs import status as status_verb
from unit.ddt_fake import FakeCluster, analyzing, resource, rolled_back, stable

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line against a fake cluster; returns exit code, stdout, stderr."""

    def go(line: str, cluster: FakeCluster | None = None) -> tuple[int, str, str]:
        fake = cluster or FakeCluster(analyzing())

        def connect(namespace: str | None = None, *_: Any, **__: Any) -> FakeCluster:
            fake.namespace = namespace or fake.namespace
            return fake

        monkeypatch.setattr(kube, "connect", connect)
        monkeypatch.setattr(status_verb, "RETRY_SECONDS", 0.0)
        code = __main__.run(line.split())
        out = capsys.readouterr()
        return code, out.out, out.err

    return go


@pytest.mark.parametrize(
    ("line", "spared"),
    [
        ("--help", {"pydantic", "kubernetes", "yaml", "rich", "urllib3", "numpy", "asyncio", "aiohttp", "kopf"}),
        # typer itself converts option values with pydantic
        ("version --client", {"kubernetes", "yaml", "rich", "urllib3", "numpy", "asyncio", "aiohttp", "kopf"}),
    ],
)
def test_starting_imports_nothing_heavy(line: str, spared: set[str]) -> None:
    script = (
        f"import sys; from ddtreectl import __main__; code = __main__.run({line.split()})\n"
        f"print(code, sorted({spared} & {{m.partition('.')[0] for m in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("obj", "code"),
    [(stable(), 0), (resource(phase="Invalid"), 1), (rolled_back(), 2), (analyzing(), 3), (resource("other"), 4)],
)
def test_exit_codes_of_rollout_status(run: Run, obj: dict[str, Any], code: int) -> None:
    assert run("rollout status qwen3-8b", FakeCluster(obj))[0] == code


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nosuch", "no such command 'nosuch'"),
        ("get --nosuch", "no such option: --nosuch"),
        ("get -o xml", "'xml' is not one of 'table', 'wide', 'json', 'yaml', 'name'"),
        ("rollout status", "missing argument 'NAME'"),
        ("rollout status qwen3-8b --watch --timeout soon", '"soon" is not a duration'),
        ("rollout skip qwen3-8b", "needs --reason"),
        ("lint -f /nowhere.yaml", "cannot read /nowhere.yaml: No such file"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(run: Run, line: str, words: str) -> None:
    code, out, err = run(line)
    assert (code, out) == (1, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_no_arguments_show_the_help(run: Run) -> None:
    code, out, _ = run("")
    assert code == 0
    assert "rollout" in out


def test_get(run: Run) -> None:
    code, out, err = run("get -n prod")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[:2] == ["NAME", "PHASE"]
    assert json.loads(run("get qwen3-8b -o json")[1])["kind"] == "DDTreeDeployment"
    assert [o["kind"] for o in yaml.safe_load(run("get -o yaml")[1])["items"]] == ["DDTreeDeployment"]
    assert run("get -o name")[1] == "ddtreedeployment.ddtree.dev/qwen3-8b\n"


def test_get_of_nothing_says_so_on_stderr(run: Run) -> None:
    code, out, err = run("get -n prod", FakeCluster())
    assert (code, out, err) == (0, "", "no DDTreeDeployment in namespace prod\n")


def test_status_as_json(run: Run) -> None:
    code, out, _ = run("rollout status qwen3-8b -o json", FakeCluster(rolled_back()))
    found = json.loads(out)
    assert code == found["exitCode"] == 2
    assert found["outcome"] == "rolledBack"
    assert found["status"]["stable"]["revision"] == "3f2a1b9c0d"


def test_watch_prints_one_line_per_change_and_ends_with_the_rollout(run: Run) -> None:
    script = [
        analyzing(),
        analyzing(analysis={"pairs": 60}),
        analyzing(phase="Promoting", message="", step=""),
        stable(),
    ]
    code, out, _ = run("rollout status qwen3-8b --watch", FakeCluster(analyzing(), script=script))
    assert code == 0
    assert [text.split(" | ")[-1] for text in out.splitlines()] == [
        "34 pairs",
        "60 pairs",
        "qwen3-8b: Promoting",
        "qwen3-8b: Stable, 4/4 engines ready",
    ]


def test_watch_outlives_a_lost_connection(run: Run) -> None:
    script = [kube.UnreachableError("cannot reach the cluster"), rolled_back()]
    code, out, err = run("rollout status qwen3-8b -w", FakeCluster(analyzing(), script=script))
    assert code == 2
    assert "cannot reach the cluster; retrying" in err
    assert "RolledBack" in out.splitlines()[-1]


def test_watch_keeps_waiting_while_degraded_or_paused(run: Run) -> None:
    script = [resource(phase="Degraded"), analyzing(phase="Paused"), stable()]
    assert run("rollout status qwen3-8b -w", FakeCluster(analyzing(), script=script))[0] == 0


def test_watch_gives_up_in_time(run: Run) -> None:
    code, _, err = run("rollout status qwen3-8b -w --timeout 0s")
    assert code == 3
    assert "time is up" in err


def test_watch_of_a_deleted_resource(run: Run) -> None:
    gone = kube.CliError('DDTreeDeployment "qwen3-8b" was deleted', kube.Exit.NOT_FOUND)
    assert run("rollout status qwen3-8b -w", FakeCluster(analyzing(), script=[gone]))[0] == 4


def sent(fake: FakeCluster) -> ActionRequest:
    [(_, key, value, _)] = fake.patches
    assert key == "ddtree.dev/action"
    return ActionRequest.model_validate_json(value)


@pytest.mark.parametrize(
    ("verb", "obj"),
    [
        ("promote", analyzing(phase="Paused")),
        ("abort", analyzing()),
        ("pause", analyzing()),
        ("resume", analyzing(phase="Paused")),
        ("skip", analyzing()),
        ("retry", rolled_back()),
        ("undo", stable()),
    ],
)
def test_commands_are_one_annotation(run: Run, verb: str, obj: dict[str, Any]) -> None:
    fake = FakeCluster(obj)
    code, out, err = run(f"rollout {verb} qwen3-8b --reason because", fake)
    assert code == 0, err
    assert out == f"{verb} of qwen3-8b sent\n"
    request = sent(fake)
    assert (request.verb, request.by, request.reason) == (verb, "alice", "because")
    assert request.revision == "8c1d2e3f40"
    assert len(request.id) == 36
    assert request.at.endswith("Z")


@pytest.mark.parametrize(
    ("line", "obj", "words"),
    [
        ("promote", stable(), "nothing to promote: qwen3-8b has no rollout in progress (phase Stable)"),
        ("abort", rolled_back(), "nothing to abort"),
        ("resume", analyzing(), "nothing to resume: qwen3-8b is not paused (phase Analyzing)"),
        ("retry", stable(), "nothing to retry: revision 8c1d2e3f40 of qwen3-8b is not blocked"),
        ("undo", resource(phase="Stable", revision="8c1d2e3f40"), "nothing to go back to"),
    ],
)
def test_senseless_commands_are_refused(run: Run, line: str, obj: dict[str, Any], words: str) -> None:
    fake = FakeCluster(obj)
    code, _, err = run(f"rollout {line} qwen3-8b", fake)
    assert (code, fake.patches) == (1, [])
    assert words in err


def test_commands_work_while_the_operator_has_not_looked_yet(run: Run) -> None:
    fake = FakeCluster(stable(observed=2))
    assert run("rollout abort qwen3-8b", fake)[0] == 0
    assert sent(fake).revision is None


@pytest.mark.parametrize("to", ["1", "3f2a1b9c0d", "3f2a"])
def test_undo_to_a_revision(run: Run, to: str) -> None:
    fake = FakeCluster(stable())
    assert run(f"rollout undo qwen3-8b --to-revision {to}", fake)[0] == 0
    assert sent(fake).to == "3f2a1b9c0d"


@pytest.mark.parametrize(
    ("to", "code", "words"), [("9", 4, "no revision 9"), ("2", 1, "never served (rolledBack); those that did: 1")]
)
def test_undo_to_a_revision_that_cannot_be(run: Run, to: str, code: int, words: str) -> None:
    fake = FakeCluster(stable())
    found, _, err = run(f"rollout undo qwen3-8b --to-revision {to}", fake)
    assert (found, fake.patches) == (code, [])
    assert words in err


def test_dry_run_asks_the_server_only(run: Run) -> None:
    fake = FakeCluster(analyzing())
    code, out, _ = run("rollout abort qwen3-8b --dry-run", fake)
    assert (code, out) == (0, "abort of qwen3-8b would be sent (server dry run)\n")
    assert fake.patches[0][3] is True


@pytest.mark.parametrize(("result", "code"), [("abort of revision 3 by alice", 0), ("abort refused: too late", 1)])
def test_wait_shows_what_came_of_it(run: Run, monkeypatch: pytest.MonkeyPatch, result: str, code: int) -> None:
    class Answering(FakeCluster):
        def annotate(self, name: str, key: str, value: str, dry_run: bool = False) -> dict[str, Any]:
            self.script = [analyzing(lastAction={"id": json.loads(value)["id"], "result": result})]
            return super().annotate(name, key, value, dry_run)

    found, out, _ = run("rollout abort qwen3-8b --wait", Answering(analyzing()))
    assert (found, out.splitlines()[-1]) == (code, result)


def test_a_reason_that_is_too_long_is_refused(run: Run) -> None:
    code, _, err = run(f"rollout abort qwen3-8b --reason {'x' * 501}")
    assert code == 1
    assert "reason: " in err


def test_history_nodes_explain(run: Run) -> None:
    assert "rolledBack" in run("rollout history qwen3-8b")[1]
    assert len(json.loads(run("rollout history qwen3-8b -o json")[1])) == 3
    number = json.loads(run("rollout history qwen3-8b -o json")[1])[2]["number"]
    assert f"number        {number}" in run(f"rollout history qwen3-8b {number}")[1]
    assert json.loads(run(f"rollout history qwen3-8b {number} -o json")[1])["number"] == number
    assert run("rollout history qwen3-8b 99")[0] == 4
    placed = FakeCluster(analyzing(nodes=[{"name": "gpu-1", "fits": True}], pinned=["nvidia.com/gpu.product=H200"]))
    assert "pinned to: nvidia.com/gpu.product=H200" in run("nodes qwen3-8b", placed)[1]
    _, out, _ = run("explain qwen3-8b 2")
    assert out.startswith("revision 2 (77aa88bb99): rolledBack by operator\n")
    assert "because   analysis failed: parity: 3 of 40 outputs differ" in out
    assert "acceptLength" in run("explain qwen3-8b")[1]
    assert run("explain qwen3-8b 9")[0] == 4


def recorded(**changes: Any) -> bytes:
    """A record of 30 pairs with equal outputs, judged by a policy of the defaults."""

    def sample(accepted: int) -> Sample:
        return Sample("p", 40, 20, accepted, 1.0 + accepted / 1000, tuple(range(40)))

    pairs = tuple(Pair(sample(22 + i % 3), sample(33 + i % 5)) for i in range(30))
    policy = Policy.from_spec(AnalysisSpec())
    verdict = replace(evaluate(pairs, policy), **changes)
    return record.dump(record.Record(policy, pairs, verdict, notes={"attempt": "0", "step": "1"}))


def with_record(data: bytes) -> FakeCluster:
    obj = analyzing()
    last = {**obj["status"]["history"][2], "result": "promoted", "verdictDigest": record.digest(data)}
    obj["status"]["history"] = [*obj["status"]["history"][:2], last]
    fake = FakeCluster(obj)
    for revision in ("8c1d2e3f40", "0000000000"):
        meta = {"name": f"qwen3-8b-{revision}-a0-s1", "labels": {"ddtree.dev/revision": revision}}
        fake.record_maps.append({"metadata": meta, "binaryData": {"pairs.jsonl.gz": base64.b64encode(data).decode()}})
    return fake


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
        ("engine: {build: {builder: buildah}}", "spec.engine.build.builder: buildah is not supported yet"),
        ("traffic: {gateway: {httpRoute: r}}", "spec.traffic.gateway: HTTPRoute traffic is not available yet"),
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


def test_version(run: Run) -> None:
    assert run("version --client") == (0, "ddtreectl 0.1.0 (ddtree.dev/v1alpha1)\n", "")
    assert "Kubernetes v1.36.3" in run("version")[1]
    assert json.loads(run("version -o json")[1])["api"] == ["ddtree.dev/v1alpha1"]


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


def test_it_is_a_kubectl_plugin_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-ddtree", "--help"])
    with pytest.raises(SystemExit) as done:
        __main__.main()
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: kubectl ddtree ")


def test_every_command_tells_its_options(run: Run) -> None:
    for line in ("get", "plan", "rollout status", "rollout undo", "explain", "nodes", "lint", "version"):
        code, out, _ = run(f"{line} --help")
        assert code == 0
        assert "--help" in out
