"""The few calls of the OCI distribution API that pushing needs, over plain HTTP (the dev cluster has no TLS)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class RegistryError(RuntimeError):
    """A registry that is not there, or that refused; the text is one sentence."""


class Registry:
    """A registry at `address` (host:port)."""

    def __init__(self, address: str, timeout: float = 120.0) -> None:
        self.address, self.timeout = address, timeout

    def _call(
        self,
        method: str,
        url: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection = http.client.HTTPConnection(self.address, timeout=self.timeout)
        streamed = body is not None and not isinstance(body, bytes)
        try:
            connection.request(method, target, body, dict(headers or {}), encode_chunked=streamed)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise RegistryError(
                f"no registry answers at {self.address} ({error or type(error).__name__}); "
                "start the dev cluster with `make cluster-up`, or set DDTREE_REGISTRY_LOCAL to a running one"
            ) from error
        finally:
            connection.close()

    def _expect(self, wanted: tuple[int, ...], what: str, got: tuple[int, dict[str, str], bytes]) -> dict[str, str]:
        status, headers, body = got
        if status not in wanted:
            raise RegistryError(f"the registry at {self.address} answered {status} to {what}: {body[:200]!r}")
        return headers

    def ping(self) -> None:
        """Raises RegistryError unless a registry answers that takes images from here."""
        status, _, _ = self._call("GET", "/v2/")
        if status != 200:
            raise RegistryError(
                f"the registry at {self.address} answered {status}: only plain HTTP without credentials is known here; "
                "for such a registry build with docker or buildah and push (images/README.md)"
            )

    def has_blob(self, repo: str, digest: str) -> bool:
        """Whether the repository holds the blob."""
        return self._call("HEAD", f"/v2/{repo}/blobs/{digest}")[0] == 200

    def has_manifest(self, repo: str, reference: str) -> bool:
        """Whether the repository holds the manifest (a tag or a digest)."""
        return self._call("HEAD", f"/v2/{repo}/manifests/{reference}", headers={"Accept": MANIFEST})[0] == 200

    def manifest(self, repo: str, reference: str) -> dict[str, Any]:
        """An image manifest."""
        got = self._call("GET", f"/v2/{repo}/manifests/{reference}", headers={"Accept": MANIFEST})
        self._expect((200,), f"a look at {repo}", got)
        return dict(json.loads(got[2]))

    def blob(self, repo: str, digest: str) -> bytes:
        """A small blob's content (an image configuration)."""
        got = self._call("GET", f"/v2/{repo}/blobs/{digest}")
        self._expect((200,), f"a look at {repo}", got)
        return got[2]

    def mount(self, repo: str, digest: str, source: str) -> bool:
        """Makes a blob of another repository one of this repository; False when the source lacks it."""
        if self.has_blob(repo, digest):
            return True
        status, headers, _ = self._call(
            "POST", f"/v2/{repo}/blobs/uploads/?mount={digest}&from={source}", b"", {"Content-Length": "0"}
        )
        if status == 202:  # it opened an upload instead: close that
            self._call("DELETE", headers["location"])
        return status == 201

    def push_blob(self, repo: str, data: bytes, digest: str) -> None:
        """Stores a small blob."""
        if not self.has_blob(repo, digest):
            self.push_stream(repo, [data], lambda: digest)

    def push_stream(self, repo: str, chunks: Iterable[bytes], digest: Callable[[], str]) -> None:
        """Stores a blob while it is being made; `digest` is called after the last chunk."""
        opened = self._call("POST", f"/v2/{repo}/blobs/uploads/", b"", {"Content-Length": "0"})
        where = self._expect((202,), "the start of an upload", opened)["location"]
        sent = self._call(
            "PATCH", where, chunks, {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked"}
        )
        where = self._expect((202,), "an upload", sent)["location"]
        joint = "&" if "?" in where else "?"
        done = self._call("PUT", f"{where}{joint}digest={digest()}", b"", {"Content-Length": "0"})
        self._expect((201,), "the end of an upload", done)

    def push_manifest(self, repo: str, data: bytes, reference: str) -> None:
        """Stores an image manifest under a tag or its digest."""
        got = self._call("PUT", f"/v2/{repo}/manifests/{reference}", data, {"Content-Type": MANIFEST})
        self._expect((201,), f"the manifest of {repo}", got)
