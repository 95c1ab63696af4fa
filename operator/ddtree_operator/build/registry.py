"""A small client of the OCI distribution API: does an image exist and is it whole, its digest, its labels, its tags."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from yarl import URL

from .errors import RegistryError
from .reference import Reference, parse_reference

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json"
)
_BYTES = "application/octet-stream"
_MAX_BODY = 4 * 1024 * 1024  # manifests and configs are small; anything larger is not one


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password (or an identity token) for one registry."""

    user: str
    password: str
    identity_token: str = ""


def credentials_from_docker_config(content: bytes | str) -> dict[str, Credentials]:
    """Registry host → credentials of a ``.dockerconfigjson``. Raises RegistryError with one sentence."""
    try:
        auths = json.loads(content).get("auths", {})
        out = {}
        for server, entry in auths.items():
            user, password = entry.get("username", ""), entry.get("password", "")
            if entry.get("auth"):
                user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
            host = re.sub(r"^https?://", "", server).split("/")[0]
            out[host] = Credentials(user, password, entry.get("identitytoken", ""))
        return out
    except (ValueError, AttributeError, TypeError, binascii.Error):
        raise RegistryError("the registry Secret's .dockerconfigjson is not a Docker config", heals=False) from None


class RegistryClient:
    """Asks registries about images. Use as an async context manager.

    ``insecure`` holds the registries (host[:port]) spoken to over plain http; ``timeout`` is seconds per request.
    """

    def __init__(
        self,
        *,
        insecure: frozenset[str] = frozenset(),
        credentials: Mapping[str, Credentials] | None = None,
        timeout: float = 15.0,
    ) -> None:
        self._insecure = insecure
        self._credentials = dict(credentials or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None
        self._tokens: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> RegistryClient:
        self._session = aiohttp.ClientSession(timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def resolve(self, ref: str) -> str | None:
        """Digest (sha256:…) of an image by tag or digest; None when the registry does not have it.

        Raises RegistryError when the registry cannot be reached, denies access or answers nonsense, and BuildError for
        something that is no reference.
        """
        reference = parse_reference(ref)
        status, headers, body = await self._exchange("HEAD", reference, f"manifests/{reference.version}")
        if status == 404:
            return None
        digest = headers.get("Docker-Content-Digest", "")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            status, headers, body = await self._exchange("GET", reference, f"manifests/{reference.version}")
            if status == 404:
                return None
            self._json(body, reference)
            digest = "sha256:" + hashlib.sha256(body).hexdigest()
        if reference.digest and digest != reference.digest:
            raise RegistryError(
                f"the registry {reference.registry} answers {digest} when asked for {reference}; "
                "it, or a proxy before it, mixes images up",
                heals=False,
            )
        return digest

    async def labels(self, ref: str, *, platform: str = "linux/amd64") -> dict[str, str] | None:
        """Labels of an image, as ``settings`` reads them; None when the image is not there."""
        found = await self.settings(ref, platform=platform)
        return None if found is None else found[0]

    async def settings(
        self, ref: str, *, platform: str = "linux/amd64"
    ) -> tuple[dict[str, str], dict[str, str]] | None:
        """Labels and environment of an image; of an index, those of the image for ``platform``.

        None when the image is not there.
        """
        reference = parse_reference(ref)
        manifest = await self._document(reference, f"manifests/{reference.version}")
        if manifest is None:
            return None
        if "manifests" in manifest:
            digest = _of_platform(manifest, platform, reference)
            manifest = await self._document(reference, f"manifests/{digest}")
        if manifest is None:
            return None
        digest = (manifest.get("config") or {}).get("digest", "")
        config = await self._document(reference, f"blobs/{digest}") if digest else None
        if config is None:
            raise RegistryError(
                f"the registry {reference.registry} has lost the configuration of {reference}", heals=False
            )
        inner = config.get("config") or {}
        env = (str(entry).partition("=") for entry in inner.get("Env") or [])
        return {str(k): str(v) for k, v in (inner.get("Labels") or {}).items()}, {k: v for k, _, v in env}

    async def lacks(self, ref: str) -> str:
        """What of an image is not there: "the manifest", "the configuration" or "1 of 9 layers"; "" when it is whole.

        Of an index every image has to be whole.
        """
        reference = parse_reference(ref)
        manifest = await self._document(reference, f"manifests/{reference.version}")
        if manifest is None:
            return "the manifest"
        for entry in manifest.get("manifests") or []:
            lacking = await self.lacks(f"{reference.repository}@{entry.get('digest', '')}")
            if lacking:
                return lacking
        layers = [str(layer.get("digest")) for layer in manifest.get("layers") or []]
        if manifest.get("config") and not await self._has_blob(reference, str(manifest["config"].get("digest"))):
            return "the configuration"
        gone = [digest for digest in layers if not await self._has_blob(reference, digest)]
        return f"{len(gone)} of {len(layers)} layers" if gone else ""

    async def tag(self, ref: str, tag: str) -> None:
        """Give an image one more tag in its repository. Raises RegistryError, also when the image is not there."""
        reference = parse_reference(ref)
        path = f"manifests/{reference.version}"
        status, headers, body = await self._exchange("GET", reference, path)
        if status == 404:
            raise RegistryError(f"{reference} is not in its registry", heals=False)
        await self.put_manifest(f"{reference.repository}:{tag}", body, headers.get("Content-Type", ""))

    async def untag(self, repository: str, tag: str) -> bool:
        """Take a tag away, never what it points to. False where the registry cannot do that (docker-registry 2)."""
        reference = parse_reference(f"{repository}:{tag}")
        status, _, _ = await self._exchange("DELETE", reference, f"manifests/{tag}", also=(202, 204, 400, 405))
        return status in (200, 202, 204, 404)

    async def put_manifest(self, ref: str, body: bytes, media_type: str) -> str:
        """Store a manifest under a tag or its digest; returns its digest."""
        reference = parse_reference(ref)
        path = f"manifests/{reference.version}"
        await self._exchange("PUT", reference, path, body=body, content_type=media_type, also=(201,), never=(404,))
        return "sha256:" + hashlib.sha256(body).hexdigest()

    async def put_blob(self, repository: str, body: bytes) -> str:
        """Store a blob unless it is there; returns its digest."""
        reference = parse_reference(repository)
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        if await self._has_blob(reference, digest):
            return digest
        _, headers, _ = await self._exchange("POST", reference, "blobs/uploads/", also=(202,), never=(404,))
        base = URL(f"{self._scheme(reference.registry)}://{reference.registry}")
        where = base.join(URL(headers.get("Location", ""), encoded=True))
        url = str(where.extend_query({"digest": digest}))
        await self._exchange("PUT", reference, url, body=body, content_type=_BYTES, also=(201,), never=(404,))
        return digest

    async def document(self, ref: str) -> dict[str, Any] | None:
        """The manifest or index at a reference; None when it is not there."""
        reference = parse_reference(ref)
        return await self._document(reference, f"manifests/{reference.version}")

    async def size(self, ref: str) -> int | None:
        """Bytes of the manifest at a reference; None when it is not there."""
        reference = parse_reference(ref)
        status, _, body = await self._exchange("GET", reference, f"manifests/{reference.version}")
        return len(body) if status == 200 else None

    async def keeps_referrers(self, ref: str) -> bool:
        """Whether the registry itself lists what refers to an image (OCI distribution 1.1)."""
        reference = parse_reference(ref)
        status, _, _ = await self._exchange("GET", reference, f"referrers/{reference.digest}")
        return status == 200

    async def referrers(self, ref: str) -> list[dict[str, Any]]:
        """Descriptors of what refers to an image given by digest; by the tag that stands in where there is no API."""
        reference = parse_reference(ref)
        index = await self._document(reference, f"referrers/{reference.digest}")
        if index is None:
            index = await self._document(reference, f"manifests/{reference.digest.replace(':', '-')}")
        return [entry for entry in (index or {}).get("manifests") or [] if isinstance(entry, dict)]

    async def blob(self, repository: str, digest: str) -> bytes | None:
        """Content of a small blob, checked against its digest; None when it is not there."""
        reference = parse_reference(repository)
        status, _, body = await self._exchange("GET", reference, f"blobs/{digest}")
        if status == 404:
            return None
        if digest != "sha256:" + hashlib.sha256(body).hexdigest():
            raise RegistryError(f"the registry {reference.registry} answers other bytes than {digest}", heals=False)
        return body

    async def _has_blob(self, reference: Reference, digest: str) -> bool:
        status, _, _ = await self._exchange("HEAD", reference, f"blobs/{digest}")
        return status == 200

    async def _document(self, reference: Reference, path: str) -> dict[str, Any] | None:
        status, _, body = await self._exchange("GET", reference, path)
        return None if status == 404 else self._json(body, reference)

    def _json(self, body: bytes, reference: Reference) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RegistryError(
                f"{reference.registry} answers something that is not a registry's JSON for {reference.path}"
                f"{' (a web page)' if body.lstrip()[:1] == b'<' else ''}; check the address of the registry",
                heals=False,
            )
        return found

    def _scheme(self, host: str) -> str:
        return "http" if host in self._insecure else "https"

    async def _exchange(
        self,
        method: str,
        reference: Reference,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "",
        also: tuple[int, ...] = (),
        never: tuple[int, ...] = (),
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body. ``path`` is below the repository, or a whole address.

        A status other than 200, 404 and ``also``, or one of ``never``, raises RegistryError.
        """
        host = reference.registry
        url = path if "://" in path else f"{self._scheme(host)}://{host}/v2/{reference.path}/{path}"
        token_key = (host, reference.path)
        authorization = self._tokens.get(token_key)
        for attempt in (1, 2):
            headers = {"Accept": _MANIFESTS if path.startswith("manifests/") else "*/*"}
            if authorization and URL(url, encoded=True).authority == host:  # an upload may go to another server
                headers["Authorization"] = authorization
            if content_type:
                headers["Content-Type"] = content_type
            status, got, answer = await self._request(method, url, headers, host, body)
            if status == 401 and attempt == 1:
                authorization = await self._authorize(got.get("WWW-Authenticate", ""), reference)
                if authorization is None:
                    break
                self._tokens[token_key] = authorization
                continue
            break
        if status in (401, 403):
            has = "the credentials given" if host in self._credentials else "no credentials"
            raise RegistryError(
                f"the registry {host} denies access to {reference.path} with {has} ({status}); "
                "check the registry Secret",
                heals=False,
            )
        if status in {200, 404, *also} - {*never}:
            kind = got.get("Content-Type", "")
            if "text/html" in kind:
                raise RegistryError(
                    f"{host} answers with a web page instead of a registry's JSON; check the address of the registry",
                    heals=False,
                )
            return status, got, answer
        if status == 405 and method not in ("GET", "HEAD"):
            raise RegistryError(f"the registry {host} is read-only", heals=False)
        why = f": {said}" if (said := _said(answer)) else ""
        raise RegistryError(
            f"the registry {host} answers {status} for {reference.path}{why}", heals=status >= 500 or status == 429
        )

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], host: str, data: bytes | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            raise RuntimeError("RegistryClient is used outside 'async with'")
        try:
            target = URL(url, encoded=True)
            async with self._session.request(method, target, headers=headers, data=data) as response:
                body = await response.content.read(_MAX_BODY + 1)
                while len(body) <= _MAX_BODY and (more := await response.content.read(_MAX_BODY + 1 - len(body))):
                    body += more
                if len(body) > _MAX_BODY:
                    raise RegistryError(
                        f"{host} answers more than {_MAX_BODY // 2**20} MiB for a manifest", heals=False
                    )
                return response.status, dict(response.headers), body
        except TimeoutError:
            raise RegistryError(
                f"the registry {host} does not answer within {self._timeout.total:g} s", heals=True
            ) from None
        except aiohttp.ClientSSLError as error:
            hint = (
                "add it to the operator's insecureRegistries if it speaks plain http"
                if "WRONG_VERSION_NUMBER" in str(error) or "record layer" in str(error)
                else "its certificate is not trusted"
            )
            raise RegistryError(f"the registry {host} gives no valid TLS; {hint}", heals=False) from None
        except aiohttp.ClientError as error:
            raise RegistryError(f"the registry {host} cannot be reached: {_why(error)}", heals=True) from None

    async def _authorize(self, challenge: str, reference: Reference) -> str | None:
        """Value of the Authorization header for a challenge; None when there is nothing to offer."""
        known = self._credentials.get(reference.registry)
        basic = None
        if known and known.user:
            pair = f"{known.user}:{known.password}".encode()
            basic = "Basic " + base64.b64encode(pair).decode()
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return basic
        if scheme.lower() != "bearer":
            return None
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = fields.get("realm", "")
        if not re.match(r"https?://", realm):
            raise RegistryError(
                f"the registry {reference.registry} names no usable token service ({realm!r})", heals=False
            )
        if basic and realm.startswith("http://") and reference.registry not in self._insecure:
            raise RegistryError(
                f"the registry {reference.registry} asks to send credentials over plain http to {realm}; refused",
                heals=False,
            )
        query = {"scope": fields.get("scope") or f"repository:{reference.path}:pull"}
        if fields.get("service"):
            query["service"] = fields["service"]
        url = str(URL(realm).update_query(query))
        host = URL(realm).host or realm
        status, _, body = await self._request("GET", url, {"Authorization": basic} if basic else {}, host)
        if status in (401, 403):
            return None
        if status != 200:
            raise RegistryError(f"the token service {host} answers {status}", heals=status >= 500 or status == 429)
        found = self._json(body, reference)
        token = found.get("token") or found.get("access_token")
        return f"Bearer {token}" if token else None


def _of_platform(index: Mapping[str, Any], platform: str, reference: Reference) -> str:
    system, _, machine = platform.partition("/")
    for entry in index.get("manifests") or []:
        where = entry.get("platform") or {}
        if where.get("os") == system and where.get("architecture") == machine.split("/")[0]:
            return str(entry.get("digest", ""))
    raise RegistryError(f"{reference} has no image for {platform}", heals=False)


def _said(body: bytes) -> str:
    """The first error's message in a registry's answer; "" without one."""
    if b"no space left on device" in body or b'"Err":28}' in body:  # ENOSPC, as docker-registry hands it on
        return "no space left on its disk"
    try:
        text = str(json.loads(body)["errors"][0].get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return " ".join(text.split())[:200]


def _why(error: BaseException) -> str:
    number = getattr(getattr(error, "os_error", None), "errno", None)
    if isinstance(number, int) and number > 0:  # asyncio's own words only repeat the address
        return os.strerror(number).lower()
    text = str(error) or type(error).__name__
    found = re.search(r"\[([^\]]*)\]$", text)
    return (found[1] if found and found[1] else text)[:200]
