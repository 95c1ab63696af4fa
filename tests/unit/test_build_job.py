"""The build context, the Job, and what is read back from it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from ddtree_operator.build import (
    BuildConfig,
    BuildError,
    Recipe,
    build_name,
    build_objects,
    builder_objects,
    context_files,
    dockerfile,
    image_reference,
    job_result,
)
from ddtree_operator.build.recipe import TEMPLATE_VERSION
from unit.test_build_recipe import BASE, CONFIG, KERNEL, PATCH, PLUGINS, SERIES, recipe

pytestmark = pytest.mark.unit

REPO = "10.0.0.1:5000/ddtree/engine"
JOB_CONFIG = replace(
    CONFIG,
    builder_address="tcp://b:1",
    builder_image="10.0.0.1:5000/b@sha256:" + "e" * 64,
    insecure_registries=frozenset({"10.0.0.1:5000"}),
)


def objects(config: BuildConfig = JOB_CONFIG, made: Recipe | None = None, **more: Any) -> list[dict[str, Any]]:
    made = made or recipe()
    owner = {"apiVersion": "ddtree.dev/v1alpha1", "kind": "DDTreeDeployment", "name": "x", "uid": "1"}
    return build_objects(
        made,
        name=build_name(made, REPO),
        namespace="llm",
        owner=owner,
        config=config,
        plugins=PLUGINS,
        repository=REPO,
        **more,
    )


def test_another_context_of_the_same_recipe_has_a_config_map_of_its_own() -> None:
    config_map, job = objects()
    [volume] = [v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "context"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"] != job["metadata"]["name"]
    assert objects() == [config_map, job]
    wheel = {"sha256": KERNEL["sha256"], "url": "pvc://wheels/" + KERNEL["url"].rpartition("/")[2]}
    near, far = (recipe({"kernelWheels": [w]}) for w in (wheel, KERNEL))
    assert near.digest == far.digest
    config = replace(JOB_CONFIG, fetch_image="registry.example/operator@sha256:" + "5" * 64)
    (one, first), (two, second) = objects(config, near), objects(config, far)
    assert first["metadata"]["name"] == second["metadata"]["name"]
    assert one["binaryData"] != two["binaryData"]
    assert one["metadata"]["name"] != two["metadata"]["name"]


def test_only_what_follows_the_series_is_built_again_when_it_changes() -> None:
    one = dockerfile(recipe({"kernelWheels": [KERNEL]}))
    two = dockerfile(recipe({"kernelWheels": [KERNEL]}, series={**SERIES, "0001-x.patch": PATCH + b"\n"}))
    same = [a for a, b in zip(one.splitlines(), two.splitlines(), strict=True) if a == b]
    assert [line.split(" ")[0] for line in same if line.startswith(("COPY", "RUN", "ADD"))] == [
        *("ADD", "ADD", "RUN", "RUN", "COPY", "RUN", "COPY")
    ]
    assert one.index("COPY series") > one.index("source=plugins") > one.index("from=wheels")
    assert f"FROM {BASE} AS engine\n" in one
    assert "USER 65532:65532\n\nFROM scratch AS facts\n" in one
    assert "facts.py /opt/ddtree/facts.json cpu sglang-kernel\n" in one


def test_wheels_are_fetched_by_checksum_and_nothing_else_has_a_network() -> None:
    text = dockerfile(recipe({"kernelWheels": [{**KERNEL, "url": KERNEL["url"] + "?token=$HOME"}]}))
    assert f"ADD --checksum=sha256:{'c' * 64} " in text
    assert "$HOME" not in text
    assert all("--network=none" in line for line in text.splitlines() if line.startswith("RUN"))


def test_a_context_that_no_config_map_takes_is_refused() -> None:
    big = {**PLUGINS, "sglang_ddtree-0.1.0-py3-none-any.whl": b"x" * 1024 * 1024}
    with pytest.raises(BuildError, match=r"largest: plugins/sglang_ddtree.*1024 KiB"):
        context_files(recipe(plugins=big), big)


def test_the_template_version_is_raised_with_the_template() -> None:
    """Fails when Dockerfile or scripts change: then raise TEMPLATE_VERSION and put the new sum here."""
    plain = replace(recipe(), template=0)
    text = dockerfile(plain).replace(plain.digest, "").encode()
    text += b"".join(
        resources.files("ddtree_operator.build").joinpath("files", name).read_bytes()
        for name in ("install_wheels.py", "finish.py", "facts.py")
    )
    assert (TEMPLATE_VERSION, hashlib.sha256(text).hexdigest()[:12]) == (5, "41840faf9534")


def test_the_job_passes_pod_security_restricted_and_has_no_token() -> None:
    config_map, job = objects()
    assert config_map["metadata"] | {"name": job["metadata"]["name"]} == job["metadata"]
    assert len(job["metadata"]["name"]) < 50
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]
    assert not any("hostPath" in v for v in pod["volumes"])


def test_the_context_reaches_the_job_whole() -> None:
    config_map, job = objects()
    items = job["spec"]["template"]["spec"]["volumes"][0]["configMap"]["items"]
    got = {item["path"]: base64.b64decode(config_map["binaryData"][item["key"]]) for item in items}
    assert got == context_files(recipe(), PLUGINS)


def test_credentials_and_tls_are_mounted_only_when_given() -> None:
    _, job = objects()
    assert [v["name"] for v in job["spec"]["template"]["spec"]["volumes"]] == ["context", "tmp"]
    tls = replace(JOB_CONFIG, builder_tls_secret="tls", builder_server_name="b.ns.svc")
    _, job = objects(tls, secret="regcred")
    assert [v["name"] for v in job["spec"]["template"]["spec"]["volumes"]] == ["context", "tmp", "registry", "tls"]
    env = {e["name"]: e["value"] for e in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert "--tlscert" in env["BUILDER"]
    assert env["BUILDER"].endswith(" --tlsservername b.ns.svc")
    assert env["DOCKER_CONFIG"] == "/registry"


def test_the_job_pushes_reproducibly_under_the_recipes_tag() -> None:
    _, job = objects(timeout=77)
    env = {e["name"]: e["value"] for e in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    output = env["OUTPUT"]
    assert f"name={image_reference(recipe(), REPO)}," in output
    assert "rewrite-timestamp=true" in output
    assert "registry.insecure=true" in output
    assert job["spec"]["activeDeadlineSeconds"] == 77


def test_the_cache_is_kept_in_a_registry_where_one_is_named() -> None:
    def flags(config: BuildConfig) -> dict[str, str]:
        (container,) = objects(config)[1]["spec"]["template"]["spec"]["containers"]
        return {e["name"]: e["value"] for e in container["env"] if "CACHE" in e["name"]}

    assert flags(JOB_CONFIG) == {"CACHE": "", "KEEP_CACHE": ""}
    kept = replace(JOB_CONFIG, cache_repository="10.0.0.1:5000/ddtree/cache")
    where = "type=registry,ref=10.0.0.1:5000/ddtree/cache:cache,"
    assert flags(kept)["CACHE"] == f"--import-cache={where}registry.insecure=true"
    assert flags(kept)["KEEP_CACHE"].startswith(f"--export-cache={where}mode=max,ignore-error=true,")
    assert flags(replace(kept, no_cache=True))["CACHE"] == "--no-cache"


def test_equal_recipes_share_a_job_per_repository() -> None:
    assert build_name(recipe(), REPO) == build_name(recipe(), REPO) != build_name(recipe(), REPO + "2")


def test_what_cannot_be_built_is_refused() -> None:
    for lacking in ("builder_image", "builder_address"):
        with pytest.raises(BuildError, match="address of a builder and the image of its Jobs"):
            objects(replace(JOB_CONFIG, **{lacking: ""}))  # type: ignore[arg-type]


def test_the_builder_is_privileged_in_a_namespace_of_its_own() -> None:
    made = builder_objects(image="i", namespace="b", insecure_registries=["r:1"])
    kinds = {o["kind"]: o for o in made}
    assert set(kinds) == {"Namespace", "ConfigMap", "Deployment", "Service", "NetworkPolicy"}
    assert kinds["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert '[registry."r:1"]\n  http = true' in kinds["ConfigMap"]["data"]["buildkitd.toml"]


def pod(code: int | None, message: str = "", at: str = "1") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message}} if code is not None else {"running": {}}
    return {
        "metadata": {"creationTimestamp": at},
        "status": {"containerStatuses": [{"name": "build", "state": state}]},
    }


def job(condition: str = "", reason: str = "", **status: Any) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", "reason": reason, "message": "m"}] if condition else []
    return {"spec": {"activeDeadlineSeconds": 60}, "status": {"conditions": conditions, **status}}


def test_a_finished_job_gives_its_digest() -> None:
    digest = "sha256:" + "1" * 64
    done = job_result(job("Complete", succeeded=1, failed=1), [pod(11, "x"), pod(0, f"digest: {digest}\n", "2")])
    assert (done.state, done.digest, done.attempts) == ("done", digest, 2)
    assert job_result(job("Complete", succeeded=1), []).digest is None


def test_a_running_job_says_what_it_waits_for() -> None:
    assert job_result(job(active=1), []).state == "running"
    waiting = pod(None)
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ErrImagePull", "message": "no"}}
    assert "does not start: ErrImagePull: no" in job_result(job(active=1), [waiting]).sentence
    unscheduled = {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]}}
    assert "not scheduled: 0/1 nodes" in job_result(job(active=1), [unscheduled]).sentence
    quota = {"reason": "FailedCreate", "message": 'Error creating: pods "x" is forbidden: exceeded quota: q'}
    told = job_result(job(active=0), [], [{"reason": "SuccessfulCreate"}, quota])
    assert told.sentence == 'the builder\'s pod cannot be created: pods "x" is forbidden: exceeded quota: q'
    mount = {"reason": "FailedMount", "message": 'MountVolume.SetUp failed: secret "r" not found'}
    assert "does not start: MountVolume" in job_result(job(active=1), [{"status": {}}], [mount]).sentence
    assert job_result(job(active=1), [pod(None)], [mount]).sentence == ""
    again = job_result(job(active=1, failed=1), [pod(11, "error: boom"), pod(None, at="2")])
    assert again.sentence == "attempt 1 failed, trying again: the build failed: boom"


def test_a_failed_job_says_why() -> None:
    own = "ddtree-build: error: import sglang fails in this image: ImportError: x"
    failed = job_result(job("Failed", "PodFailurePolicy", failed=1), [pod(10, own)])
    assert (failed.state, failed.heals) == ("failed", False)
    assert failed.sentence == "import sglang fails in this image: ImportError: x"
    late = job_result(job("Failed", "DeadlineExceeded"), [])
    assert late.sentence.startswith("the build took longer than its timeout of 60 s")
    assert job_result(job("Failed", "Odd"), []).sentence == "the build Job failed: m"
    evicted = {"status": {"phase": "Failed", "reason": "Evicted", "message": "low on disk"}}
    assert "Evicted low on disk" in job_result(job("Failed", "BackoffLimitExceeded"), [evicted]).sentence
