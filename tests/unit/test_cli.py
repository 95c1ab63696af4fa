"""The command line: exit codes, what goes where, and what is sent to the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from ddtree_operator.api.actions import ActionRequest
from ddtreectl import __main__, kube
from unit.conftest import Run
from unit.ddt_fake import FakeCluster, analyzing, resource, rolled_back, stable

pytestmark = pytest.mark.unit


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
        ("abort", stable(phase="Invalid"), "nothing to abort"),
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


def test_a_canary_under_a_spec_with_a_mistake_can_be_aborted(run: Run) -> None:
    fake = FakeCluster(analyzing(phase="Invalid"))
    assert run("rollout abort qwen3-8b", fake)[0] == 0
    assert sent(fake).revision == "8c1d2e3f40"


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


def test_version(run: Run) -> None:
    assert run("version --client") == (0, "ddtreectl 0.1.0 (ddtree.dev/v1alpha1)\n", "")
    assert "Kubernetes v1.36.3" in run("version")[1]
    assert json.loads(run("version -o json")[1])["api"] == ["ddtree.dev/v1alpha1"]


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
