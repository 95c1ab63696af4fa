"""The same recipes by buildah in the Job's own pod: no daemon, no privileges, root of a user namespace only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddtree_operator.build import BuildResult, image_reference, job_result
from ddtree_operator.build.context import LABEL_FACTS, LABEL_PACKAGES, LABEL_RECIPE_DIGEST
from integration.build_cluster import NAMESPACE, NOWHERE, BuildCluster, images, until
from integration.test_build_engine import BAD, EMPTY, GOOD, ask

pytestmark = pytest.mark.integration

BAHNS = "build-test-buildah"
BY = {"builder": "buildah"}


@pytest.fixture(scope="module")
def buildah(cluster: BuildCluster) -> Iterator[BuildCluster]:
    """The cluster, with a namespace that lets buildah's pods in: PodSecurity baseline, nothing privileged."""
    image = images(cluster.env, "buildah")["buildah"]
    cluster.kubectl("delete", "namespace", BAHNS, "--ignore-not-found", "--wait", "--timeout=120s")
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": BAHNS, "labels": labels}}])
    yield replace(cluster, namespace=BAHNS, config=replace(cluster.config, buildah_image=image, builder_address=""))
    cluster.kubectl("delete", "namespace", BAHNS, "--wait=false")


@pytest.fixture(scope="module")
def built(buildah: BuildCluster) -> BuildResult:
    return buildah.build(GOOD, **BY)


def test_twice_without_any_cache_gives_the_same_digest_and_the_image_is_whole(
    buildah: BuildCluster, built: BuildResult
) -> None:
    """Each Job has a store of its own, so nothing is left of the first build when the second runs."""
    assert (built.state, built.sentence) == ("done", "")
    assert built.digest == buildah.build(GOOD, **BY).digest
    recipe = buildah.recipe(GOOD, **BY)
    tag = image_reference(recipe, buildah.config.push_repository)
    assert ask(buildah, tag) == built.digest
    assert ask(buildah, tag, "lacks") == ""
    labels = ask(buildah, tag, "labels")
    assert labels[LABEL_RECIPE_DIGEST] == recipe.digest
    assert json.loads(labels[LABEL_FACTS])["packages"]["sglang"] == "0.5.23"
    assert json.loads(labels[LABEL_PACKAGES])["deb"]["libc6"].startswith("2.")
    assert recipe.digest != buildah.recipe(GOOD).digest  # the builder and its version are part of the recipe


def test_what_it_builds_runs_as_nobody_with_the_patch_in(buildah: BuildCluster, built: BuildResult) -> None:
    code = (
        "import sglang.version as v, os, importlib.util as u;"
        "assert v.PATCHED and os.getuid() == 65532;"
        "head = open(u.cache_from_source(v.__file__), 'rb').read()[:16];"
        "assert head[4:8] == b'\\x03\\0\\0\\0' and head[8:] == u.source_hash(open(v.__file__, 'rb').read());"
        "assert os.stat(v.__file__).st_mtime == 315532800"
    )
    image = f"{buildah.config.push_repository}@{built.digest}"
    container = {"name": "c", "image": image, "command": ["python3", "-c", code]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "look", "namespace": BAHNS}}
    buildah.apply([{**pod, "spec": {"restartPolicy": "Never", "containers": [container]}}])

    def ended() -> str:
        phase = str(buildah.get("pod", "look", "-n", BAHNS)["status"].get("phase"))
        return phase if phase in ("Succeeded", "Failed") else ""

    assert until(ended, 120, "the pod ends") == "Succeeded", buildah.kubectl("logs", "look", "-n", BAHNS)


def test_steps_have_no_network(buildah: BuildCluster) -> None:
    """A plugin that looks for the registry while it is imported finds none."""
    plug = (
        "import socket\ns = socket.socket(); s.settimeout(2)\nerror = s.connect_ex(('10.88.0.1', 5000))\n"
        "assert error, 'there is a network'\nassert [n for _, n in socket.if_nameindex()] == ['lo']\n"
    )
    kernel = buildah.offer("looks_out", {"looks_out/__init__.py": plug})
    assert buildah.build(EMPTY, kernelWheels=[kernel], **BY).sentence == ""


def test_what_goes_wrong_is_said_in_the_same_words(buildah: BuildCluster) -> None:
    wrong = {**buildah.sglang, "sha256": "0" * 64}
    failed = buildah.build(EMPTY, retries=True, sglangWheel=wrong, **BY)
    assert failed.sentence.startswith(f"the wheel {wrong['url']} has sha256 {buildah.sglang['sha256']} (")
    assert failed.sentence.endswith(f"but {'0' * 64} is asked for; correct the sha256 or the address")
    assert (failed.heals, failed.attempts) == (False, 1)

    failed = buildah.build(BAD, retries=True, **BY)
    assert failed.sentence.startswith("the patch series does not apply: ")
    assert (failed.heals, failed.attempts) == (False, 1)

    base = buildah.config.base_image[:-8] + "00000000"
    failed = buildah.build(EMPTY, retries=True, baseImage=base, **BY)
    assert failed.sentence == f"the base image {base} is not in its registry; correct baseImage or push it there"
    assert failed.attempts == 1

    failed = buildah.build(EMPTY, retries=True, baseImage=buildah.config.builder_image, **BY)
    assert failed.sentence == "the base image has no python3 on its PATH; use one with Python and torch"
    assert failed.attempts == 1

    repository = f"{NOWHERE}/x/y"
    failed = buildah.build(EMPTY, push={"repository": repository}, **BY)
    assert failed.sentence.startswith(f"the registry {NOWHERE} cannot be reached for the image {repository}:r-")
    assert failed.heals


def test_a_restricted_namespace_says_why_no_build_starts(buildah: BuildCluster) -> None:
    strict = replace(buildah, namespace=NAMESPACE)
    job = strict.start(EMPTY, **BY)

    def told() -> str:
        events = strict.get("events", "-n", NAMESPACE, f"--field-selector=involvedObject.name={job}")["items"]
        return job_result(strict.get("job", job, "-n", NAMESPACE), strict.pods_of(job), events).sentence

    sentence = until(told, 60, "the Job says what it waits for")
    assert sentence.startswith("the builder's pod cannot be created: pods ")
    assert 'violates PodSecurity "restricted' in sentence
    strict.kubectl("delete", "job", job, "-n", NAMESPACE)
