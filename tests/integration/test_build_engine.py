"""Builds with a real buildkitd in a pod, a real registry and a real kubelet."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from ddtree_operator.build import RegistryClient, RegistryError, image_reference, job_result
from ddtree_operator.build.context import LABEL_FACTS, LABEL_PACKAGES, LABEL_RECIPE_DIGEST
from integration.build_cluster import BUILDER_NAMESPACE, NAMESPACE, NOWHERE, REGISTRY, REPO, BuildCluster, cache, until

pytestmark = pytest.mark.integration

VERSION = (REPO / "tests/simengine/sglang/version.py").read_text().splitlines()
EMPTY = {"series": b""}


def patch(old: list[str], new: list[str]) -> dict[str, bytes]:
    """A series of one patch that turns the simulated engine's version.py from ``old`` into ``new``."""
    lines = ["--- a/sglang/version.py", "+++ b/sglang/version.py", f"@@ -1,{len(old)} +1,{len(new)} @@"]
    lines += [f"-{line}" for line in old] + [f"+{line}" for line in new]
    return {"series": b"0001-version.patch\n", "0001-version.patch": "\n".join([*lines, ""]).encode()}


GOOD = patch(VERSION, [*VERSION, "PATCHED = True"])
BAD = patch(["this line is nowhere"], ["nor is this"])


def ask(cluster: BuildCluster, ref: str, what: str = "resolve") -> Any:
    """Ask the registry as the operator does, through the port forwarded to this process."""

    async def go() -> Any:
        local = cluster.registry_local
        async with RegistryClient(insecure=frozenset({local})) as client:
            return await getattr(client, what)(ref.replace(REGISTRY, local))

    return asyncio.run(go())


def test_a_build_gives_a_digest_that_the_registry_finds_under_the_recipes_tag(cluster: BuildCluster) -> None:
    done = cluster.build(GOOD)
    assert done.sentence == ""
    assert done.state == "done"
    recipe = cluster.recipe(GOOD)
    tag = image_reference(recipe, cluster.config.push_repository)
    assert ask(cluster, tag) == done.digest
    labels = ask(cluster, tag, "labels")
    assert labels[LABEL_RECIPE_DIGEST] == recipe.digest
    facts = json.loads(labels[LABEL_FACTS])
    assert facts["python"] == "cp311"
    assert facts["packages"]["sglang"] == "0.5.23"
    packages = json.loads(labels[LABEL_PACKAGES])
    assert packages["pypi"]["sglang"] == ["0.5.23"]
    assert packages["deb"]["libc6"].startswith("2.")
    assert ask(cluster, image_reference(cluster.recipe(BAD), cluster.config.push_repository)) is None


def test_the_image_runs_as_nobody_with_the_patch_in_and_valid_bytecode(cluster: BuildCluster) -> None:
    done = cluster.build(GOOD)
    code = (
        "import sglang.version as v, os, sys, importlib.util as u;"
        "assert v.PATCHED and os.getuid() == 65532;"
        "head = open(u.cache_from_source(v.__file__), 'rb').read()[:16];"
        "assert head[4:8] == b'\\x03\\0\\0\\0' and head[8:] == u.source_hash(open(v.__file__, 'rb').read())"
    )
    security = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    image = f"{cluster.config.push_repository}@{done.digest}"
    container = {"name": "c", "image": image, "command": ["python3", "-c", code], "securityContext": security}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "look", "namespace": NAMESPACE},
        "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }
    cluster.apply([job])
    cluster.kubectl("wait", "--for=condition=Complete", "job/look", "-n", NAMESPACE, "--timeout=120s")


def test_building_twice_without_cache_gives_the_same_digest(cluster: BuildCluster) -> None:
    one, two = (cluster.build(GOOD, no_cache=True) for _ in range(2))
    assert one.digest is not None
    assert one.digest == two.digest


def test_a_new_builder_starts_from_the_cache_in_the_registry(cluster: BuildCluster) -> None:
    """The builder loses its disk between two builds; steps of the second come from the registry, and are the same."""
    kept = replace(cluster, config=replace(cluster.config, cache_repository=f"{REGISTRY}/ddtree/build-test-cache"))
    first = kept.build(GOOD)
    assert first.sentence == ""
    cluster.kubectl("delete", "pod", "-n", BUILDER_NAMESPACE, "-lapp.kubernetes.io/name=buildkitd", "--wait")
    cluster.kubectl("rollout", "status", "deployment/buildkitd", "-n", BUILDER_NAMESPACE, "--timeout=180s")
    job = kept.start(GOOD)
    second = kept.wait_for(job)
    assert second.digest == first.digest
    log = cluster.kubectl("logs", f"job/{job}", "-n", NAMESPACE)
    assert "importing cache manifest from" in log
    assert "] RUN " in log
    ran = re.findall(r"^#\d+ [\d.]+ (installed|compiled|facts).*", log, re.M)  # what the steps print when they run
    assert ran == [], log[-3000:]


def test_a_series_changes_the_image(cluster: BuildCluster) -> None:
    assert cluster.build(EMPTY).digest != cluster.build(GOOD).digest


def test_a_wheel_with_a_wrong_sha256_is_named_with_both(cluster: BuildCluster) -> None:
    wrong = {**cluster.sglang, "sha256": "0" * 64}
    failed = cluster.build(EMPTY, retries=True, sglangWheel=wrong)
    assert failed.sentence == (
        f"the wheel {wrong['url']} has sha256 {cluster.sglang['sha256']}, but {'0' * 64} is asked for; "
        "correct the sha256 or the address"
    )
    assert (failed.heals, failed.attempts) == (False, 1)


def test_a_wheel_that_is_cut_short_is_named_although_its_sha256_is_right(cluster: BuildCluster) -> None:
    whole = cluster.offer("demo_cut", {"demo_cut/__init__.py": "x = 1\n" * 1000})
    path = cache() / "wheelhouse/build-test" / whole["url"]
    path.write_bytes(path.read_bytes()[:3000])
    cut = {**whole, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    failed = cluster.build(EMPTY, retries=True, kernelWheels=[cut])
    assert failed.sentence.startswith(f"the wheel {cut['url']} is damaged or cut short")
    assert (failed.heals, failed.attempts) == (False, 1)


def test_a_wheel_that_is_not_there_is_not_called_a_wrong_one(cluster: BuildCluster) -> None:
    gone = {"url": "kernel-0.1.0-py3-none-any.whl", "sha256": "1" * 64}
    failed = cluster.build(EMPTY, retries=True, kernelWheels=[gone])
    assert failed.sentence == (
        "the wheel kernel-0.1.0-py3-none-any.whl is not there (404); correct its address or put it into the wheelhouse"
    )
    assert failed.attempts == 1


def test_a_patch_that_does_not_apply_is_named_with_file_and_hunk(cluster: BuildCluster) -> None:
    failed = cluster.build(BAD, retries=True)
    assert failed.sentence.startswith("the patch series does not apply: ")
    for part in ("sglang/version.py", "hunk 1"):
        assert part in failed.sentence
    assert (failed.heals, failed.attempts) == (False, 1)


def test_a_registry_that_is_not_there_is_tried_again_and_named(cluster: BuildCluster) -> None:
    repository = f"{NOWHERE}/x/y"
    failed = cluster.build(EMPTY, retries=True, push={"repository": repository})
    assert failed.sentence.startswith(f"the registry {NOWHERE} cannot be reached for the image {repository}:r-")
    assert failed.sentence.endswith("connection refused (tried 3 times)")
    assert failed.heals
    with pytest.raises(RegistryError, match="cannot be reached"):
        ask(cluster, "127.0.0.1:9/x/y:z")


def test_a_base_image_that_is_not_there_is_named(cluster: BuildCluster) -> None:
    base = cluster.config.base_image[:-8] + "00000000"
    failed = cluster.build(EMPTY, retries=True, baseImage=base)
    assert failed.sentence == (f"the base image {base} is not in its registry; correct baseImage or push it there")
    assert failed.attempts == 1


def test_a_kernel_wheel_for_another_cuda_is_named_with_both(cluster: BuildCluster) -> None:
    version = "__version__ = '2.14.1+cu130'\ncuda = '13.0'\n"
    torch = cluster.offer("torch", {"torch/__init__.py": "", "torch/version.py": version}, "2.14.1")
    kernel = cluster.offer("demo_kernel", {"demo_kernel/__init__.py": ""}, "1.0+cu126")
    failed = cluster.build(EMPTY, retries=True, kernelWheels=[torch, kernel])
    assert failed.sentence == (
        "the wheel demo-kernel 1.0+cu126 is built for CUDA 12.6, but torch in the base image is for CUDA 13.0; "
        "use the wheel for CUDA 13"
    )
    broken = cluster.offer(
        "demo_broken", {"demo_broken/__init__.py": "raise ImportError('x.so: undefined symbol: _Z1')"}
    )
    failed = cluster.build(EMPTY, retries=True, kernelWheels=[torch, broken])
    assert failed.sentence == (
        "import demo_broken (of the wheel demo-broken) fails in this image: "
        "ImportError: x.so: undefined symbol: _Z1; it is built for another torch"
    )
    assert failed.attempts == 1


def test_a_quota_that_lets_no_builder_in_is_told(cluster: BuildCluster) -> None:
    name = "no-room"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name, "namespace": NAMESPACE}}
    cluster.apply([{**quota, "spec": {"hard": {"pods": "0"}}}])
    until(lambda: cluster.get("resourcequota", name, "-n", NAMESPACE)["status"].get("hard"), 60, "quota is in force")
    try:
        job = cluster.start(EMPTY)

        def told() -> str:
            events = cluster.get("events", "-n", NAMESPACE, f"--field-selector=involvedObject.name={job}")["items"]
            found = cluster.get("job", job, "-n", NAMESPACE)
            return job_result(found, cluster.pods_of(job), events).sentence

        sentence = until(told, 60, "the Job says what it waits for")
        assert sentence.startswith("the builder's pod cannot be created: pods ")
        assert "exceeded quota: no-room" in sentence
    finally:
        cluster.kubectl("delete", "resourcequota", name, "-n", NAMESPACE)
    assert cluster.wait_for(job).state == "done"


def test_a_base_image_without_python_is_named(cluster: BuildCluster) -> None:
    failed = cluster.build(EMPTY, retries=True, baseImage=cluster.config.builder_image)
    assert failed.sentence == "the base image has no python3 on its PATH; use one with Python and torch"
    assert failed.attempts == 1


def test_a_builder_that_comes_back_is_used_by_the_next_attempt(cluster: BuildCluster) -> None:
    builder = ("deployment/buildkitd", "-n", BUILDER_NAMESPACE)
    cluster.kubectl("scale", *builder, "--replicas=0")
    cluster.kubectl("wait", "pod", "-n", BUILDER_NAMESPACE, "-lapp.kubernetes.io/name=buildkitd", "--for=delete")
    try:
        job = cluster.start(GOOD, retries=True)

        def told() -> str:
            return job_result(cluster.get("job", job, "-n", NAMESPACE), cluster.pods_of(job)).sentence

        sentence = until(told, 120, "the first attempt has failed")
        assert sentence.startswith("attempt 1 failed, trying again: the builder cannot be reached: ")
    finally:
        cluster.kubectl("scale", *builder, "--replicas=1")
    done = cluster.wait_for(job)
    assert done.state == "done"
    assert done.attempts >= 2
