"""A builder that only talks to who shows a certificate of its authority."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_operator.build import builder_objects
from integration.build_cluster import BUILDER_NAMESPACE, NAMESPACE, BuildCluster

pytestmark = pytest.mark.integration

NAME = "buildkitd-tls"
SERVER_NAME = f"{NAME}.{BUILDER_NAMESPACE}.svc"


def openssl(*args: str | Path) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True)


def certificates(folder: Path, *names: str) -> None:
    """An authority, and a certificate of it for each name, good for server and client."""
    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca",
        "-keyout", folder / "ca.key", "-out", folder / "ca.crt",
    )  # fmt: skip
    extensions = folder / "extensions"
    extensions.write_text(f"subjectAltName=DNS:{SERVER_NAME}\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in names:
        key, request = folder / f"{name}.key", folder / f"{name}.csr"
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        openssl(
            "x509", "-req", "-days", "2", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-extfile", extensions, "-out", folder / f"{name}.crt",
        )  # fmt: skip


def secret(cluster: BuildCluster, name: str, namespace: str, folder: Path, certificate: str) -> None:
    data = {
        "ca.crt": (folder / "ca.crt").read_text(),
        "tls.crt": (folder / f"{certificate}.crt").read_text(),
        "tls.key": (folder / f"{certificate}.key").read_text(),
    }
    metadata = {"name": name, "namespace": namespace}
    cluster.apply([{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}])


@pytest.fixture(scope="module")
def guarded(cluster: BuildCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildCluster]:
    """The cluster with a second builder, and a client certificate of its authority."""
    folder, strange = (tmp_path_factory.mktemp(name) for name in ("ours", "strange"))
    certificates(folder, "server", "client")
    certificates(strange, "client")
    secret(cluster, "server-tls", BUILDER_NAMESPACE, folder, "server")
    secret(cluster, "client-tls", NAMESPACE, folder, "client")
    secret(cluster, "strange-tls", NAMESPACE, strange, "client")
    cluster.apply(
        builder_objects(
            image=cluster.config.builder_image,
            namespace=BUILDER_NAMESPACE,
            name=NAME,
            insecure_registries=cluster.config.insecure_registries,
            keep_storage_gb=2,
            tls_secret="server-tls",
        )
    )
    cluster.kubectl("rollout", "status", f"deployment/{NAME}", "-n", BUILDER_NAMESPACE, "--timeout=180s")
    yield replace(
        cluster,
        config=replace(
            cluster.config,
            builder_address=cluster.address(NAME),
            builder_server_name=SERVER_NAME,
            builder_tls_secret="client-tls",
        ),
    )
    cluster.kubectl("delete", "deployment,service", NAME, "-n", BUILDER_NAMESPACE, "--wait=false")


def test_a_job_with_a_certificate_builds(guarded: BuildCluster) -> None:
    done = guarded.build({"series": b""})
    assert done.sentence == ""
    assert done.state == "done"


@pytest.mark.parametrize(
    ("shown", "words"), [("", "may want a client certificate"), ("strange-tls", "a certificate of another authority")]
)
def test_without_a_certificate_of_the_authority_nothing_is_built(guarded: BuildCluster, shown: str, words: str) -> None:
    outsider = replace(guarded, config=replace(guarded.config, builder_tls_secret=shown))
    failed = outsider.build({"series": b""})
    assert failed.state == "failed"
    assert words in failed.sentence
