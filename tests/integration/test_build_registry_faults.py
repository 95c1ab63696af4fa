"""Real docker-registries that are read-only, guarded by a password, or full."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.build import RegistryClient
from integration.build_cluster import FULL, GUARDED, NAMESPACE, READONLY, BuildCluster

pytestmark = pytest.mark.integration

SERIES = {"series": b""}
# bcrypt of "secret"
HTPASSWD = "builder:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n"


def pushed_to(address: str) -> dict[str, Any]:
    return {"push": {"repository": f"{address}/team/engine"}}


def test_a_read_only_registry_is_named_and_not_tried_again(cluster: BuildCluster, tmp_path: Path) -> None:
    readonly = {"storage": {"maintenance": {"readonly": {"enabled": True}}}}
    with cluster.registry(READONLY, tmp_path / "r", readonly):
        failed = cluster.build(SERIES, retries=True, **pushed_to(READONLY))
    assert failed.sentence.startswith(f"the registry {READONLY} is read-only, so the image {READONLY}/team/engine:r-")
    assert (failed.heals, failed.attempts) == (False, 1)


def test_credentials_come_from_the_secret_and_only_from_there(cluster: BuildCluster, tmp_path: Path) -> None:
    passwords = tmp_path / "htpasswd"
    passwords.write_text(HTPASSWD)
    guarded = {"auth": {"htpasswd": {"realm": "r", "path": str(passwords)}}}
    with cluster.registry(GUARDED, tmp_path / "r", guarded):
        failed = cluster.build(SERIES, retries=True, **pushed_to(GUARDED))
        assert failed.sentence.startswith(f"the registry {GUARDED} denies access to the image {GUARDED}/team/engine:r-")
        assert (failed.heals, failed.attempts) == (False, 1)
        auth = {"auths": {GUARDED: {"auth": base64.b64encode(b"builder:secret").decode()}}}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": "regcred", "namespace": NAMESPACE},
            "stringData": {".dockerconfigjson": json.dumps(auth)},
        }
        cluster.apply([secret])
        done = cluster.build(SERIES, secret="regcred", **pushed_to(GUARDED))
    assert done.sentence == ""
    assert done.state == "done"


def test_a_full_registry_is_named(cluster: BuildCluster, tmp_path: Path) -> None:
    with cluster.registry(FULL, tmp_path / "r", {}, size="1m"):
        failed = cluster.build(SERIES, **pushed_to(FULL))
    assert failed.state == "failed"
    assert failed.heals
    assert FULL in failed.sentence, failed.sentence


def test_an_image_that_the_registry_has_lost_is_no_error(cluster: BuildCluster) -> None:
    lost = f"{cluster.registry_local}/ddtree/build-test@sha256:{'0' * 64}"

    async def ask() -> str | None:
        async with RegistryClient(insecure=frozenset({cluster.registry_local})) as client:
            return await client.resolve(lost)

    assert asyncio.run(ask()) is None
