"""Mistakes are named with their field, in words, and the same words stand in the CRD."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ddtree_operator.api import crd, names
from ddtree_operator.api.refusals import PATTERN_WORDS, InvalidResourceError, check_resource, name_fits, parse_spec

pytestmark = pytest.mark.unit

GOOD = "model: {path: /m}\ndrafter: {path: /d}\n"


def refused(spec: str) -> list[str]:
    with pytest.raises(InvalidResourceError) as caught:
        parse_spec(yaml.safe_load(GOOD + spec))
    return list(caught.value.sentences)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("replica: 2", "spec.replica: unknown field; did you mean replicas?"),
        ("nonsense: 2", "spec.nonsense: unknown field; remove it"),
        ("engine: {speculativ: {}}", "spec.engine.speculativ: unknown field; did you mean speculative?"),
        (
            "canary: {analysis: {min_pairs: 3}}",
            "spec.canary.analysis.min_pairs: unknown field; did you mean minPairs?",
        ),
        ("engine: {speculative: {budget: 256}}", "spec.engine.speculative.budget: must be at most 255, not 256"),
        ("engine: {speculative: {budget: 0}}", "spec.engine.speculative.budget: must be at least 1, not 0"),
        (
            "engine: {speculative: {algorithm: DTREE}}",
            'spec.engine.speculative.algorithm: must be NONE, NGRAM, DFLASH, DDTREE or EAGLE3, not "DTREE"',
        ),
        (
            "engine: {speculative: {algorithm: DFLASH, budget: 8}}",
            "spec.engine.speculative: budget is only for DDTREE, not DFLASH; remove it",
        ),
        ("engine: {build: {sglang: '0.5.24'}}", 'spec.engine.build.sglang: must be 0.5.23, not "0.5.24"'),
        ("engine: {build: {series: 5}}", "spec.engine.build.series: must be text or an object, not 5"),
        (
            "engine: {build: {series: {configMap: x}}}",
            "spec.engine.build.series.configMap: unknown field; did you mean configMapRef?",
        ),
        (
            "engine: {build: {kernelWheels: [{url: x, sha256: abc}]}}",
            'spec.engine.build.kernelWheels[0].sha256: must be a SHA-256 of 64 lower-case hex digits, not "abc"',
        ),
        (
            "engine: {image: 'r/x:latest'}",
            "spec.engine.image: must be an image by digest (repository@sha256:<64 hex digits>), "
            'because a tag can change, not "r/x:latest"',
        ),
        (
            "rollback: {progressDeadline: soon}",
            'spec.rollback.progressDeadline: must be a duration such as 30m, 90s or 1h30m, not "soon"',
        ),
        ("replicas: '2'", 'spec.replicas: must be a whole number, not "2"'),
        ("paused: yes please", 'spec.paused: must be true or false, not "yes please"'),
        ("canary: {steps: []}", "spec.canary.steps: must not be empty"),
        (
            "canary: {steps: [{analysis: {x: 1}}]}",
            "spec.canary.steps[0].analysis: takes no fields; write {}",
        ),
        (
            "canary: {steps: [{analysis: {}, weight: 1}]}",
            "spec.canary.steps[0]: a step has exactly one of weight, pause, analysis, canaryReplicas, headerRoute; "
            "this one has weight and analysis",
        ),
        (
            "canary: {analysis: {deadline: 0h0m0s}}",
            "spec.canary.analysis: deadline 0h0m0s leaves no time for a pair; write a time such as 30m",
        ),
        (
            "rollback: {progressDeadline: 0m0s}",
            "spec.rollback: progressDeadline 0m0s leaves no time for an engine to start; write a time such as 20m",
        ),
        (
            "engine: {build: {timeout: 0s}}",
            "spec.engine.build: timeout 0s leaves no time for a build; write a time such as 30m",
        ),
        ("canary: {analysis: {maxPairs: 5}}", "spec.canary.analysis: maxPairs 5 is below minPairs 10"),
        (
            "canary: {analysis: {prompts: {liveTraffic: true}}}",
            "spec.canary.analysis.prompts.liveTraffic: must be an object, not true",
        ),
        (
            "canary: {analysis: {prompts: {liveTraffic: {whenQuiet: guess}}}}",
            'spec.canary.analysis.prompts.liveTraffic.whenQuiet: must be wait or set, not "guess"',
        ),
        (
            "canary: {analysis: {prompts: {}}}",
            "spec.canary.analysis.prompts: neither configMapRef nor liveTraffic is set; set one of them, "
            "or leave prompts out",
        ),
        ("drafter: null", "spec: DDTREE needs a drafter; set spec.drafter.path"),
    ],
)
def test_one_sentence_names_the_field_and_what_it_takes(spec: str, sentence: str) -> None:
    assert sentence in refused(spec)


def test_every_mistake_is_told_at_once() -> None:
    assert len(refused("replica: 2\nengine: {speculative: {budget: 0}}\ntraffic: {drain: x5}")) == 3


def test_null_means_left_out_except_in_a_pod_template() -> None:
    spec = parse_spec(yaml.safe_load(GOOD + "traffic: null\nengine: {podTemplate: {spec: {hostNetwork: null}}}"))
    assert spec.traffic.drain == "30s"
    assert spec.engine.pod_template == {"spec": {"hostNetwork": None}}


def resource(**more: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "a"},
        "spec": yaml.safe_load(GOOD),
        **more,
    }


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("text", "not a Kubernetes object"),
        (resource(kind="Deployment"), "expected ddtree.dev/v1alpha1 DDTreeDeployment, not ddtree.dev/v1alpha1 Deploy"),
        (resource(metadata={}), "metadata.name: is required"),
        (resource(metadata={"name": "Qwen"}), "metadata.name: the name must be a DNS label"),
        (resource(replicas=3), "replicas: unknown field; it belongs under spec"),
        ({k: v for k, v in resource().items() if k != "spec"}, "spec: is required"),
        (resource(spec=[]), "spec: must be an object"),
    ],
)
def test_a_whole_resource(bad: Any, words: str) -> None:
    with pytest.raises(InvalidResourceError, match=words):
        check_resource(bad)


def test_a_good_resource_passes() -> None:
    assert check_resource(resource()).model.path == "/m"


@pytest.mark.parametrize(
    ("name", "fits"),
    [("qwen3-8b", True), ("a" * 40, True), ("a" * 41, False), ("3b", False), ("a.b", False), ("a-", False)],
)
def test_names(name: str, fits: bool) -> None:
    assert name_fits(name) is fits


def test_the_crd_says_patterns_in_the_same_words() -> None:
    text = crd.crd_yaml()
    assert "pattern:" not in text
    rules = str(crd.open_api_schema())
    assert all(words in rules for words in PATTERN_WORDS.values())
