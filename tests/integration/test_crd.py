"""The resource, the chart and the command line against a real API server; no operator runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddtree_operator.api import names
from ddtree_operator.api.spec import DDTreeSpec
from integration.ddt_api import DIGEST, ROOT, WAIT, Api, as_account, open_api, render_chart, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with open_api("crd") as found:
        yield found


GOOD = "model: {path: /m}\ndrafter: {path: /d}\n"


def test_explain_reads_well(api: Api) -> None:
    def explained(path: str) -> str:
        return " ".join(api.kubectl("explain", path, check=False).stdout.split())

    words = "Gate on accept length. Accept length = accepted"
    until(lambda: words in explained("ddt.spec.canary.analysis.acceptLength"))  # published a moment after the CRD
    assert "Desired state of one served model" in explained("ddt.spec")
    assert "Engine pods that serve." in explained("ddt.spec")
    assert "exactly one of its fields is set" in explained("ddt.spec.canary.steps")
    assert "Draft budget" in explained("ddt.spec.engine.speculative.budget")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_accepted_and_filled_with_the_models_defaults(api: Api, path: Path) -> None:
    done = api.kubectl("apply", "--dry-run=server", "-o", "json", "-f", str(path))
    given = yaml.safe_load(path.read_text())["spec"]
    ours = DDTreeSpec.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert json.loads(done.stdout)["spec"] == ours


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("replica: 2", 'unknown field "spec.replica"'),
        ("canary: {steps: [{analysis: {x: 1}}]}", 'unknown field "spec.canary.steps[0].analysis.x"'),
        ("engine: {speculative: {budget: 256}}", "spec.engine.speculative.budget in body should be less than or equal"),
        ("engine: {speculative: {algorithm: DFLASH, budget: 8}}", "budget is only for DDTREE, not DFLASH; remove it"),
        (
            "engine: {speculative: {algorithm: DFLASH, draftBlock: 8}}",
            "draftBlock is only for DDTREE, not DFLASH; remove",
        ),
        (
            "engine: {speculative: {algorithm: DTREE}}",
            'supported values: "NONE", "NGRAM", "DFLASH", "DDTREE", "EAGLE3"',
        ),
        (f"engine: {{image: 'r/x@{DIGEST}', build: {{}}}}", "image and build are both given; keep one"),
        ("engine: {image: 'r/x:latest'}", "must be an image by digest (repository@sha256:<64 hex digits>)"),
        ("engine: {build: {kernelWheels: [{url: x, sha256: abc}]}}", "must be a SHA-256 of 64 lower-case hex digits"),
        ("drafter: null", "DDTREE needs a drafter; set spec.drafter.path"),
        ("canary: {steps: [{weight: 0}]}", "canary.steps has no analysis step; add {analysis: {}}"),
        (
            "canary: {steps: [{weight: 0, pause: {}}, {analysis: {}}]}",
            "a step has exactly one of weight, pause, analysis, canaryReplicas, headerRoute; this one has weight "
            "and pause",
        ),
        ("canary: {steps: [{}, {analysis: {}}]}", "this one has none"),
        ("canary: {analysis: {onInconclusive: promote}}", "onInconclusive: promote needs onInconclusiveReason"),
        ("canary: {analysis: {deadline: 0s}}", "deadline leaves no time for a pair"),
        ("rollback: {progressDeadline: 0s}", "progressDeadline leaves no time for an engine to start"),
        ("engine: {build: {timeout: 0h0m}}", "timeout leaves no time for a build"),
        ("canary: {analysis: {maxPairs: 5}}", "maxPairs is below minPairs"),
        ("canary: {analysis: {prompts: {liveTraffic: true}}}", "liveTraffic"),
        ("canary: {analysis: {prompts: {}}}", "neither configMapRef nor liveTraffic is set"),
        (
            "canary: {analysis: {prometheus: [{name: x, address: 'http://p', query: up}]}}",
            "neither min nor max is set, so nothing can pass",
        ),
        ("canary: {analysis: {acceptLength: {atLeast: 10%}}}", "must be a gain such as +10%"),
        ("canary: {analysis: {parity: {tieGap: 2 ulp}}}", "must be a gap in bf16 ulps such as 2ulp"),
        ("rollback: {progressDeadline: soon}", "must be a duration such as 30m, 90s or 1h30m"),
        ("replicas: '2'", "spec.replicas in body must be of type integer"),
    ],
)
def test_bad_input_is_refused_with_its_sentence(api: Api, spec: str, sentence: str) -> None:
    done = api.apply(GOOD + spec)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_names_that_no_service_can_have_are_refused(api: Api) -> None:
    assert "the name must be a DNS label" in api.apply(GOOD, name="a" * 41).stderr
    assert "the name must be a DNS label" in api.apply(GOOD, name="3b").stderr


def test_null_is_left_out_and_free_form_parts_survive(api: Api) -> None:
    done = api.apply(
        GOOD + "traffic: null\nengine: {podTemplate: {spec: {volumes: [{name: v, emptyDir: {}}]}}}\n"
        "placement: {tolerations: [{key: k, operator: Exists}]}\n"
    )
    spec = json.loads(done.stdout)["spec"]
    assert spec["traffic"] == {"drain": "30s"}
    assert spec["engine"]["podTemplate"] == {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    assert spec["placement"]["tolerations"] == [{"key": "k", "operator": "Exists"}]


def test_scale_and_columns(api: Api) -> None:
    assert api.apply(GOOD, name="scaled", dry=False).returncode == 0
    api.status(
        "scaled",
        phase="Analyzing",
        step="2/2 analysis",
        acceptLength="2.65",
        stable={"revision": "aaa", "fromTheFuture": 1},
        canary={"revision": "bbb"},
        replicas=1,
        selector="a=b",
    )
    api.kubectl("scale", "ddt", "scaled", "--replicas=3")
    head, row = api.kubectl("get", "ddt", "scaled").stdout.splitlines()
    assert head.split() == ["NAME", "PHASE", "STABLE", "CANARY", "STEP", "ACCEPT", "AGE"]
    assert row.split()[:7] == ["scaled", "Analyzing", "aaa", "bbb", "2/2", "analysis", "2.65"]
    found = json.loads(api.kubectl("get", "ddt", "scaled", "-o", "json").stdout)
    assert found["spec"]["replicas"] == 3
    again = api.apply(GOOD + "paused: true\n", name="scaled", dry=False)  # a manifest that leaves replicas to somebody
    assert json.loads(again.stdout)["spec"]["replicas"] == 3
    assert found["status"]["stable"]["fromTheFuture"] == 1  # written by a newer operator, kept


# ddtreectl ---------------------------------------------------------------------------------------------------------


def test_the_command_line_reads_and_commands(api: Api) -> None:
    assert api.apply(GOOD, name="driven", dry=False).returncode == 0
    fresh = api.ddtreectl("rollout", "status", "driven")
    assert fresh.returncode == 3
    assert "has not looked at this spec yet" in fresh.stdout
    generation = json.loads(api.kubectl("get", "ddt", "driven", "-o", "json").stdout)["metadata"]["generation"]
    api.status("driven", phase="RolledBack", observedGeneration=generation, revision="abc", message="parity")
    assert api.ddtreectl("rollout", "status", "driven").returncode == 2
    assert "driven" in api.ddtreectl("get").stdout
    assert "driven" in api.ddtreectl("get", "-A").stdout
    sent = api.ddtreectl("rollout", "retry", "driven", "--reason", "fixed the drafter")
    assert sent.returncode == 0, sent.stderr
    noted = json.loads(api.kubectl("get", "ddt", "driven", "-o", "json").stdout)["metadata"]
    action = json.loads(noted["annotations"][names.ANNOTATION_ACTION])
    assert (action["verb"], action["revision"], action["reason"]) == ("retry", "abc", "fixed the drafter")
    assert noted["generation"] == generation  # a command is no new spec


def test_a_name_that_does_not_exist(api: Api) -> None:
    assert api.apply(GOOD, name="qwen3", dry=False).returncode == 0
    typo = api.ddtreectl("rollout", "status", "qwen33")
    assert (typo.returncode, typo.stdout) == (4, "")
    assert f'error: no DDTreeDeployment "qwen33" in namespace "{api.namespace}"; did you mean qwen3?' in typo.stderr
    elsewhere = api.ddtreectl("rollout", "status", "qwen3", namespace="kube-public")
    assert elsewhere.returncode == 4
    assert f"there is one in {api.namespace} (-n {api.namespace})" in elsewhere.stderr


def test_watch_follows_to_the_end(api: Api) -> None:
    assert api.apply(GOOD, name="watched", dry=False).returncode == 0
    lines: list[str] = []
    command = [sys.executable, "-u", "-m", "ddtreectl", "rollout", "status", "watched", "-w", "-n", api.namespace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=api.env) as watcher:
        assert watcher.stdout is not None
        try:
            assert "has not looked" in watcher.stdout.readline()
            reader = threading.Thread(target=lambda out=watcher.stdout: lines.extend(out))
            reader.start()
            api.status("watched", phase="Analyzing", observedGeneration=1, message="10 pairs")
            until(lambda: any("10 pairs" in line for line in lines))
            api.status("watched", phase="Stable", message="1/1 engines ready")
            assert watcher.wait(WAIT) == 0
            reader.join(WAIT)
        finally:
            watcher.kill()
    assert [line.strip() for line in lines] == ["watched: Analyzing, 10 pairs", "watched: Stable, 1/1 engines ready"]


def test_being_forbidden_is_one_sentence(api: Api, tmp_path: Path) -> None:
    api.kubectl("create", "serviceaccount", "nobody")
    path = as_account(api, "nobody", tmp_path)
    done = api.ddtreectl("get", "--kubeconfig", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: not allowed: ")
    assert "ddtreedeployments.ddtree.dev is forbidden" in done.stderr
    assert done.stderr.count("\n") == 1


# the chart ---------------------------------------------------------------------------------------------------------


def test_what_the_chart_renders_is_accepted_and_restricted(api: Api) -> None:
    builder = f"{api.namespace}-build"
    values = {
        "builder.image": f"r.example/bk@{DIGEST}",
        "builder.namespace": builder,
        "builder.createNamespace": "false",
    }
    api.kubectl("create", "namespace", builder)
    try:
        api.kubectl("label", "namespace", builder, "pod-security.kubernetes.io/enforce=privileged")
        api.kubectl("label", "namespace", api.namespace, "pod-security.kubernetes.io/warn=restricted")
        for obj in render_chart(api, **values):
            space = obj["metadata"].get("namespace", api.namespace)
            done = Api(api.env, space).kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(obj))
            assert "PodSecurity" not in done.stderr
    finally:
        api.kubectl("delete", "namespace", builder, "--wait=false")
