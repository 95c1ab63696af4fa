"""Wheels from inside the cluster: a claim, a ConfigMap, an artefact in the registry; no index, no file server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddtree_operator.build import RegistryClient
from ddtree_operator.build.attest import EMPTY as NOTHING
from ddtree_operator.build.attest import EMPTY_TYPE, MANIFEST
from integration.build_cluster import NAMESPACE, REGISTRY, WHEELHOUSE, BuildCluster, cache, wheel

pytestmark = pytest.mark.integration

SERIES = {"series": b""}
ARTEFACT = f"{REGISTRY}/ddtree/build-test-wheels:v1"
KERNEL, CONTENT = wheel("demo_kernel", {"demo_kernel/__init__.py": ""}, "1.0+local1")
WANTED = {"url": KERNEL, "sha256": hashlib.sha256(CONTENT).hexdigest()}


@pytest.fixture(scope="module")
def inside(cluster: BuildCluster) -> Iterator[BuildCluster]:
    """A claim, a ConfigMap and an artefact with the same two wheels; the operator's own wheelhouse leads nowhere."""
    source = cache() / "wheelhouse/build-test" / cluster.sglang["url"]
    folder = cache() / "build-test-claim"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    shutil.copy(source, folder / "wheels")
    (folder / "wheels" / KERNEL).write_bytes(CONTENT)
    cut = CONTENT[: len(CONTENT) // 2]
    (folder / "wheels/cut-1.0-py3-none-any.whl").write_bytes(cut)
    cluster.offer("demo_kernel", {"demo_kernel/__init__.py": ""}, "1.0+local1")
    both = {source.name: source.read_bytes(), KERNEL: CONTENT}
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {**common, "capacity": size, "hostPath": {"path": str(folder)}}
    claim = {**common, "resources": {"requests": size}, "volumeName": "build-test-wheels"}
    data = {name.replace("+", "_"): base64.b64encode(content).decode() for name, content in both.items()}
    meta = {"name": "wheels", "namespace": NAMESPACE}
    cluster.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": "build-test-wheels"},
                "spec": {**volume, "claimRef": meta},
            },
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": data},
        ]
    )
    asyncio.run(push(cluster.registry_local, both))
    yield replace(cluster, config=replace(cluster.config, wheelhouse=""))
    cluster.kubectl("delete", "pvc", "wheels", "-n", NAMESPACE, "--wait=false")
    cluster.kubectl("delete", "pv", "build-test-wheels", "--wait=false")
    shutil.rmtree(folder, ignore_errors=True)


async def push(local: str, files: dict[str, bytes]) -> None:
    """As ``oras push`` does: every file a layer with its name as title."""
    reference = ARTEFACT.replace(REGISTRY, local)
    repository = reference.rpartition(":")[0]
    async with RegistryClient(insecure=frozenset({local})) as registry:
        layers = [
            {
                "mediaType": "application/octet-stream",
                "digest": await registry.put_blob(repository, content),
                "size": len(content),
                "annotations": {"org.opencontainers.image.title": name},
            }
            for name, content in files.items()
        ]
        config = {"mediaType": EMPTY_TYPE, "digest": await registry.put_blob(repository, NOTHING), "size": 2}
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        await registry.put_manifest(reference, json.dumps(body).encode(), MANIFEST)


@pytest.mark.parametrize(
    "where", [f"{WHEELHOUSE}/build-test", "pvc://wheels/wheels", "configmap://wheels", f"oci://{ARTEFACT}"]
)
def test_a_wheelhouse_inside_the_cluster_gives_the_same_image(inside: BuildCluster, where: str) -> None:
    """Where a wheel comes from is no part of the recipe: with the file server's wheels, the same digest."""
    done = inside.build(SERIES, no_cache=True, wheelhouse=where, kernelWheels=[WANTED])
    assert done.sentence == ""
    seen.setdefault("digest", done.digest)
    assert done.digest == seen["digest"]


seen: dict[str, str | None] = {}


def test_what_is_missing_or_wrong_inside_is_named(inside: BuildCluster) -> None:
    gone = {"url": "gone-1.0-py3-none-any.whl", "sha256": "1" * 64}
    failed = inside.build(SERIES, retries=True, wheelhouse="pvc://wheels/wheels", kernelWheels=[gone])
    assert failed.sentence.startswith(
        "the wheel gone-1.0-py3-none-any.whl is not in the wheelhouse (which holds cut-1.0"
    )
    assert (failed.heals, failed.attempts) == (False, 1)

    cut = {"url": "cut-1.0-py3-none-any.whl", "sha256": WANTED["sha256"]}
    failed = inside.build(SERIES, retries=True, wheelhouse="pvc://wheels/wheels", kernelWheels=[cut])
    assert f"({len(CONTENT) // 2} bytes), but {WANTED['sha256']} is asked for" in failed.sentence
    assert failed.attempts == 1

    failed = inside.build(SERIES, retries=True, wheelhouse=f"oci://{ARTEFACT}", kernelWheels=[gone])
    assert failed.sentence.startswith(f"the artefact {ARTEFACT} holds no gone-1.0-py3-none-any.whl (which holds demo_k")
    lost = ARTEFACT.replace(":v1", ":v2")
    failed = inside.build(SERIES, retries=True, wheelhouse=f"oci://{lost}")
    assert failed.sentence == f"the artefact {lost} is not in its registry; push it there"
    assert failed.attempts == 1
