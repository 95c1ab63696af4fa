"""The registry client against a small registry on loopback that can be made to misbehave."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from ddtree_operator.build import (
    BuildError,
    Credentials,
    RegistryClient,
    RegistryError,
    credentials_from_docker_config,
    parse_reference,
)

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]

CONFIG = json.dumps({"config": {"Labels": {"ddtree.dev/series": "s"}}}).encode()
MANIFEST = json.dumps({"config": {"digest": "sha256:" + hashlib.sha256(CONFIG).hexdigest()}}).encode()
DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
INDEX = json.dumps({"manifests": [{"digest": DIGEST, "platform": {"os": "linux", "architecture": "amd64"}}]}).encode()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Registry:
    """Serves one image as team/engine:good and :index; ``before`` may answer in its place."""

    def __init__(self) -> None:
        self.before: Handler | None = None
        self.say_digest = True
        self.requests: list[tuple[str, str, str]] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.server = TestServer(app)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path, request.headers.get("Authorization", "")))
        if self.before is not None:
            response = await self.before(request)
            if response.status != 299:
                return response
        body = {
            "/v2/team/engine/manifests/good": MANIFEST,
            f"/v2/team/engine/manifests/{DIGEST}": MANIFEST,
            "/v2/team/engine/manifests/index": INDEX,
            f"/v2/team/engine/blobs/sha256:{hashlib.sha256(CONFIG).hexdigest()}": CONFIG,
        }.get(request.path)
        if body is None:
            return web.json_response({"errors": []}, status=404)
        digest = {"Docker-Content-Digest": "sha256:" + hashlib.sha256(body).hexdigest()} if self.say_digest else {}
        return web.Response(body=body, headers=digest, content_type="application/vnd.oci.image.manifest.v1+json")


def always(status: int, text: str = "", **more: Any) -> Handler:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, **more)

    return answer


@pytest_asyncio.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry()
    async with made.server:
        yield made


def client(registry: Registry, **more: Any) -> RegistryClient:
    return RegistryClient(insecure=frozenset({registry.host}), timeout=5, **more)


async def test_tags_and_digests_resolve_and_what_is_missing_is_none(registry: Registry) -> None:
    async with client(registry) as c:
        assert await c.resolve(f"{registry.host}/team/engine:good") == DIGEST
        assert await c.resolve(f"{registry.host}/team/engine@{DIGEST}") == DIGEST
        assert await c.resolve(f"{registry.host}/team/engine:bad") is None
        assert await c.resolve(f"{registry.host}/team/other:good") is None


async def test_a_registry_that_names_no_digest_is_read_and_hashed(registry: Registry) -> None:
    registry.say_digest = False
    async with client(registry) as c:
        assert await c.resolve(f"{registry.host}/team/engine:good") == DIGEST


async def test_labels_are_read_through_an_index_too(registry: Registry) -> None:
    async with client(registry) as c:
        for tag in ("good", "index"):
            assert await c.labels(f"{registry.host}/team/engine:{tag}") == {"ddtree.dev/series": "s"}
        assert await c.labels(f"{registry.host}/team/engine:bad") is None
        with pytest.raises(RegistryError, match="no image for linux/arm64"):
            await c.labels(f"{registry.host}/team/engine:index", platform="linux/arm64")


@pytest.mark.parametrize(
    ("answer", "words", "heals"),
    [
        (always(500), "answers 500", True),
        (always(429), "answers 429", True),
        (always(405), "answers 405", False),
        (always(403), "denies access to team/engine with no credentials .403.; check the registry Secret", False),
        (always(401), "denies access to team/engine", False),
        (always(200, "<html>login</html>", content_type="text/html"), "a web page instead of a registry's JSON", False),
        (always(404, "<html>gone</html>", content_type="text/html"), "a web page instead of a registry's JSON", False),
        (always(200, "hello", content_type="text/plain"), "not a registry's JSON", False),
        (always(200, "[]", content_type="application/json"), "not a registry's JSON", False),
        (always(200, "x" * 5 * 2**20, content_type="text/plain"), "more than 4 MiB", False),
        (always(401, headers={"WWW-Authenticate": 'Bearer realm="file:///etc"'}), "no usable token service", False),
        (always(200, headers={"Docker-Content-Digest": "sha256:" + "0" * 64}), "mixes images up", False),
    ],
)
async def test_what_is_no_registry_is_said_in_one_sentence(
    registry: Registry, answer: Handler, words: str, heals: bool
) -> None:
    registry.before = answer
    ref = f"{registry.host}/team/engine@{DIGEST}" if "mixes" in words else f"{registry.host}/team/engine:good"
    async with client(registry) as c:
        with pytest.raises(RegistryError, match=words) as caught:
            await c.resolve(ref)
    assert caught.value.heals is heals
    assert "\n" not in str(caught.value)


async def test_a_registry_that_is_down_or_slow_or_without_tls(registry: Registry, unused_tcp_port: int) -> None:
    async with RegistryClient(insecure=frozenset({f"127.0.0.1:{unused_tcp_port}"}), timeout=5) as c:
        with pytest.raises(RegistryError, match=r"cannot be reached: .*") as caught:
            await c.resolve(f"127.0.0.1:{unused_tcp_port}/x/y:z")
        assert caught.value.heals
    async with RegistryClient(timeout=5) as c:
        with pytest.raises(RegistryError, match="insecureRegistries if it speaks plain http"):
            await c.resolve(f"{registry.host}/team/engine:good")
    stop = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await stop.wait()
        return web.Response()

    registry.before = hang
    async with RegistryClient(insecure=frozenset({registry.host}), timeout=0.2) as c:
        with pytest.raises(RegistryError, match=r"does not answer within 0.2 s"):
            await c.resolve(f"{registry.host}/team/engine:good")
    stop.set()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def test_basic_credentials_are_sent_only_when_asked_for(registry: Registry) -> None:
    async def ask(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") == basic("u", "p"):
            return web.Response(status=299)
        return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    registry.before = ask
    async with client(registry, credentials={registry.host: Credentials("u", "p")}) as c:
        assert await c.resolve(f"{registry.host}/team/engine:good") == DIGEST
        assert await c.resolve(f"{registry.host}/team/engine:bad") is None
    assert [r[2] for r in registry.requests] == ["", basic("u", "p"), basic("u", "p")]
    async with client(registry, credentials={registry.host: Credentials("u", "wrong")}) as c:
        with pytest.raises(RegistryError, match="with the credentials given"):
            await c.resolve(f"{registry.host}/team/engine:good")
    async with client(registry, credentials={"elsewhere": Credentials("u", "p")}) as c:
        with pytest.raises(RegistryError, match="with no credentials"):
            await c.resolve(f"{registry.host}/team/engine:good")


async def test_tokens_are_fetched_with_credentials_and_used(registry: Registry) -> None:
    async def ask(request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            assert request.query["scope"] == "repository:team/engine:pull"
            assert request.query["service"] == "s"
            return web.json_response({"token": "T"} if request.headers["Authorization"] == basic("u", "p") else {})
        if request.headers.get("Authorization") == "Bearer T":
            return web.Response(status=299)
        realm = f'Bearer realm="http://{registry.host}/token",service="s",scope="repository:team/engine:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": realm})

    registry.before = ask
    async with client(registry, credentials={registry.host: Credentials("u", "p")}) as c:
        assert await c.resolve(f"{registry.host}/team/engine:good") == DIGEST
        before = len(registry.requests)
        assert await c.resolve(f"{registry.host}/team/engine:good") == DIGEST
        assert len(registry.requests) == before + 1


async def test_a_docker_config_is_understood_or_refused() -> None:
    packed = base64.b64encode(b"u:p:q").decode()
    got = credentials_from_docker_config(
        json.dumps({"auths": {"https://r.example/v1/": {"auth": packed}, "s:1": {"username": "a", "password": "b"}}})
    )
    assert got == {"r.example": Credentials("u", "p:q"), "s:1": Credentials("a", "b")}
    for bad in ("", "[]", '{"auths": []}', '{"auths": {"x": {"auth": "%"}}}', '{"auths": {"x": 1}}'):
        with pytest.raises(RegistryError, match="not a Docker config"):
            credentials_from_docker_config(bad)


@pytest.mark.parametrize(
    "bad", ["engine", "Team/x", "r.example/x:", "r.example/x@sha256:1", "r.example/", "r.example/x y"]
)
async def test_what_is_no_reference_is_refused(bad: str) -> None:
    with pytest.raises(BuildError):
        parse_reference(bad)
