"""A real docker-registry on loopback, and images in it that get lost; no cluster is needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.build import RegistryClient, RegistryError
from ddtree_operator.build.attached import attach, read
from ddtree_operator.build.attest import (
    EMPTY,
    INDEX,
    PROVENANCE,
    SBOM,
    Subject,
    digest_of,
    encoded,
    manifest,
    referrers,
    statements,
)
from ddtree_operator.build.context import LABEL_PACKAGES
from ddtree_operator.build.context import labels as recipe_labels
from ddtree_operator.build.reference import parse_reference
from integration.build_cluster import until
from unit.test_build_recipe import recipe as made_recipe

pytestmark = pytest.mark.integration

CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Registry:
    """A running docker-registry; ``address`` is host:port, ``folder`` its storage."""

    address: str
    folder: Path

    @property
    def repository(self) -> str:
        return f"{self.address}/team/engine"

    def ask(self, what: Callable[[RegistryClient], Awaitable[Any]], timeout: float = 15.0) -> Any:
        """Run ``what`` with a client."""

        async def go() -> Any:
            async with RegistryClient(insecure=frozenset({self.address}), timeout=timeout) as client:
                return await what(client)

        return asyncio.run(go())

    def push(self, *layers: bytes, labels: Mapping[str, str] | None = None, env: Sequence[str] = ()) -> str:
        """Push an image; its reference by digest."""
        content = json.dumps({"config": {"Labels": labels or {"a": "b"}, "Env": list(env)}}).encode()

        async def go(client: RegistryClient) -> str:
            config = await client.put_blob(self.repository, content)
            blobs = [(await client.put_blob(self.repository, layer), len(layer)) for layer in layers]
            manifest = {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": config,
                    "size": len(content),
                },
                "layers": [
                    {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": size}
                    for digest, size in blobs
                ],
            }
            body = json.dumps(manifest).encode()
            digest = "sha256:" + hashlib.sha256(body).hexdigest()
            return f"{self.repository}@{await client.put_manifest(f'{self.repository}@{digest}', body, MANIFEST)}"

        return str(self.ask(go))


@contextmanager
def running(folder: Path, *, readonly: bool = False, wrap: tuple[str, ...] = ()) -> Iterator[Registry]:
    """docker-registry over a folder."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed (dev/cluster/cluster up installs it)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    storage: dict[str, Any] = {"filesystem": {"rootdirectory": str(folder)}, "delete": {"enabled": True}}
    if readonly:
        storage["maintenance"] = {"readonly": {"enabled": True}}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps({"version": "0.1", "storage": storage, "http": {"addr": address}}))
    folder.mkdir(exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen([*wrap, "docker-registry", "serve", file], stdout=out, stderr=out)
        try:
            until(lambda: b"listening on" in log.read_bytes(), 60, "the registry listens")
            yield Registry(address, folder)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running(tmp_path_factory.mktemp("registry") / "storage") as made:
        yield made


def test_a_whole_image_lacks_nothing_and_can_be_tagged(registry: Registry) -> None:
    image = registry.push(b"one", b"two")
    assert registry.ask(lambda c: c.lacks(image)) == ""
    registry.ask(lambda c: c.tag(image, "keep-m"))
    assert registry.ask(lambda c: c.resolve(f"{registry.repository}:keep-m")) == image.partition("@")[2]
    registry.ask(lambda c: c.tag(image, "keep-m"))  # again is no error


def test_labels_and_environment_are_read(registry: Registry) -> None:
    image = registry.push(b"cuda", labels={"c": "d"}, env=["CUDA_VERSION=13.0.1", "EMPTY=", "ODD"])
    found = registry.ask(lambda c: c.settings(image))
    assert found == ({"c": "d"}, {"CUDA_VERSION": "13.0.1", "EMPTY": "", "ODD": ""})
    assert registry.ask(lambda c: c.settings(f"{registry.repository}:nowhere")) is None


def test_docker_registry_2_takes_no_tag_away_and_the_image_stays(registry: Registry) -> None:
    image = registry.push(b"tagged")
    registry.ask(lambda c: c.tag(image, "keep-t"))
    registry.ask(lambda c: c.tag(image, "r-other"))
    assert registry.ask(lambda c: c.untag(registry.repository, "keep-t")) is False
    assert registry.ask(lambda c: c.lacks(f"{registry.repository}:r-other")) == ""


def test_what_is_lost_is_named(registry: Registry) -> None:
    image = registry.push(b"three", b"four")
    gone = hashlib.sha256(b"four").hexdigest()
    shutil.rmtree(registry.folder / f"docker/registry/v2/blobs/sha256/{gone[:2]}/{gone}")
    assert registry.ask(lambda c: c.lacks(image)) == "1 of 2 layers"
    other = registry.push(b"five")
    assert delete(other) == 202
    assert registry.ask(lambda c: c.lacks(other)) == "the manifest"
    with pytest.raises(RegistryError, match="is not in its registry"):
        registry.ask(lambda c: c.tag(other, "keep-m"))


def delete(image: str) -> int:
    """Status of a DELETE of a manifest by digest."""
    import urllib.request

    address, _, rest = image.partition("/")
    path, _, digest = rest.partition("@")
    request = urllib.request.Request(f"http://{address}/v2/{path}/manifests/{digest}", method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


def test_statements_are_attached_once_and_read_back(registry: Registry) -> None:
    recipe = recipe_labels(made_recipe())
    image = registry.push(b"attested", labels={**recipe, LABEL_PACKAGES: json.dumps({"pypi": {"torch": ["2.14.1"]}})})
    assert registry.ask(lambda c: read(c, image)) == {}
    for _ in range(2):
        assert registry.ask(lambda c: attach(c, image)) is True
    assert len(registry.ask(lambda c: c.referrers(image))) == 1
    found = registry.ask(lambda c: read(c, image))
    assert set(found) == {PROVENANCE, SBOM}
    assert [p["name"] for p in found[SBOM]["predicate"]["packages"]] == [registry.repository, "torch"]
    stranger = registry.push(b"no recipe")
    assert registry.ask(lambda c: attach(c, stranger)) is False
    here, there = (ref.partition("@")[2].replace(":", "-") for ref in (image, stranger))
    registry.ask(lambda c: c.tag(f"{registry.repository}:{here}", there))
    with pytest.raises(RegistryError, match="speaks of another image"):
        registry.ask(lambda c: read(c, stranger))


@pytest.mark.parametrize("kind", [PROVENANCE, SBOM])
def test_a_statement_that_somebody_else_made_up_is_refused(registry: Registry, kind: str) -> None:
    recipe = recipe_labels(made_recipe())
    labels = {**recipe, LABEL_PACKAGES: json.dumps({"pypi": {"torch": ["2.14.1"]}, "deb": {"libc6": "2.36"}})}
    image = registry.push(b"forged", kind.encode(), labels=labels)
    reference, size = parse_reference(image), registry.ask(lambda c: c.size(image))
    forged = {**labels, LABEL_PACKAGES: json.dumps({"pypi": {"torch": ["9"]}})}
    forged["ddtree.dev/recipe-json"] = json.dumps({**json.loads(labels["ddtree.dev/recipe-json"]), "device": "x"})
    subject = Subject(reference.repository, reference.digest, size)
    content = next(encoded(s) for s in statements(subject, forged) if s["predicateType"] == kind)
    body = manifest(subject, [(kind, content)])

    async def put(client: RegistryClient) -> None:
        for blob in (EMPTY, content):
            await client.put_blob(reference.repository, blob)
        await client.put_manifest(f"{reference.repository}@{digest_of(body)}", body, MANIFEST)
        tag = f"{reference.repository}:{reference.digest.replace(':', '-')}"
        await client.put_manifest(tag, referrers(None, body), INDEX)

    registry.ask(put)
    with pytest.raises(RegistryError, match="says something else than the image's own labels"):
        registry.ask(lambda c: read(c, image))


def test_a_read_only_registry_still_answers_and_takes_no_tag(registry: Registry) -> None:
    image = registry.push(b"read only")
    with running(registry.folder, readonly=True) as frozen:
        same = image.replace(registry.address, frozen.address)
        assert frozen.ask(lambda c: c.lacks(same)) == ""
        with pytest.raises(RegistryError, match=f"the registry {frozen.address} is read-only") as refused:
            frozen.ask(lambda c: c.tag(same, "keep-m"))
        assert not refused.value.heals


def test_a_full_registry_says_so_and_may_heal(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    mount = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=64k none {folder} && exec "$@"', "sh")
    with running(folder, wrap=mount) as full:
        with pytest.raises(RegistryError, match=r"answers 5\d\d for team/engine: no space left on its disk") as refused:
            full.push(b"x" * 200_000)
        assert refused.value.heals


def test_a_slow_registry_is_given_up_on_and_may_heal(registry: Registry) -> None:
    """A server in front of the registry that takes connections and passes nothing on."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        slow = Registry(f"127.0.0.1:{silent.getsockname()[1]}", registry.folder)
        with pytest.raises(RegistryError, match=r"does not answer within 0\.5 s") as refused:
            slow.ask(lambda c: c.lacks(f"{slow.repository}:x"), timeout=0.5)
        assert refused.value.heals
    with pytest.raises(RegistryError, match="cannot be reached: connection refused") as refused:
        slow.ask(lambda c: c.lacks(f"{slow.repository}:x"))
    assert refused.value.heals


def test_late_answers_are_answers_and_one_drop_by_drop_is_given_up_on(registry: Registry, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, Path(__file__).with_name("slow_proxy.py"), address, registry.address, "0.3", "40"]
    with (tmp_path / "log").open("wb") as out:
        proxy = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        until(lambda: b"listening on" in (tmp_path / "log").read_bytes(), 60, "the proxy listens")
        slow = Registry(address, registry.folder)
        image = registry.push(b"slow").replace(registry.address, address)
        assert slow.ask(lambda c: c.lacks(image)) == ""
        with pytest.raises(RegistryError, match=f"the registry {address} does not answer within 2 s") as refused:
            slow.ask(lambda c: c.resolve(f"{address}/trickle/engine:x"), timeout=2)
        assert refused.value.heals
    finally:
        proxy.terminate()
        proxy.wait(30)
