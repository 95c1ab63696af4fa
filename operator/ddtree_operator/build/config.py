"""Settings of the operator that concern builds. Plain data; the operator reads them from its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda"]

# The stock SGLang wheels, by version and CPython tag: file name and sha256 as published.
SGLANG_WHEELS: dict[str, dict[str, tuple[str, str]]] = {
    "0.5.23": {
        "cp311": (
            "sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",
            "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
        ),
        "cp312": (
            "sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl",
            "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6",
        ),
        "cp313": (
            "sglang-0.5.23-cp313-cp313-manylinux_2_34_x86_64.whl",
            "10f0b2b29c8fea616e4b27cbbbb147f32a879bf3db71c9767425a3d9d77a36cb",
        ),
    }
}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What a CR leaves out, and where the builder lives.

    Addresses carry no trailing slash; ``timeout`` is seconds; an empty string means "not configured".
    """

    base_image: str = ""  # repo@sha256:…
    push_repository: str = ""  # host/path
    push_secret: str = ""  # Secret of type dockerconfigjson in the namespace of the CR
    wheelhouse: str = ""  # what bare wheel file names are joined to: http(s)://…, pvc://…, configmap://…, oci://…
    insecure_registries: frozenset[str] = frozenset()  # host[:port] spoken to over plain http
    builder_address: str = ""  # tcp://host:port of buildkitd
    builder_service: str = ""  # or namespace/name of its Service, whose address the API server is asked for
    builder_server_name: str = ""  # what its certificate is made out to, where that is not the address
    builder_version: str = "0.34.2"
    builder_image: str = ""  # holds buildctl and a shell
    buildah_image: str = ""  # holds buildah and a shell, for builds that ask for it
    buildah_version: str = "1.28.2"
    fetch_image: str = ""  # holds python3, to fetch wheels from volumes and artefacts: the operator's own
    builder_tls_secret: str = ""  # ca.crt, tls.crt, tls.key for mutual TLS with buildkitd
    service_account: str = ""  # of builder Jobs; needs no rights and gets no token
    cache_repository: str = ""  # host/path in a registry that the builder's cache is kept in, for new builders
    artefacts: str = "/opt/ddtree"  # wheels/*.whl and series/NAME/* shipped in the operator's image
    device: Device = "cuda"
    python: str = "cp311"  # CPython tag of the base image; picks the default SGLang wheel
    platform: str = "linux/amd64"
    timeout: int = 1800
    no_cache: bool = False  # for tests of reproducibility
    sglang_wheels: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=lambda: SGLANG_WHEELS)

    def is_insecure(self, registry: str) -> bool:
        """Whether ``registry`` (host[:port]) is spoken to over plain http."""
        return registry in self.insecure_registries
