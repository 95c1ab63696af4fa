"""One JSON request to an engine; whatever goes wrong becomes one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_BODY = 8 << 20  # bytes
_EXCERPT = 160  # characters of a foreign answer that a message may quote


class EngineError(Exception):
    """An engine did not answer as it should; the message is one sentence, fit for a condition.

    ``brief`` says the same without a word of the engine's, which may quote a prompt.
    """

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class UnreachedError(EngineError):
    """No HTTP answer came at all: the engine failed, or its node, or the network between."""


async def answers(session: aiohttp.ClientSession, base_url: str, timeout: float = 5.0) -> bool:  # noqa: ASYNC109
    """Whether something at an engine's address speaks HTTP, whatever it says."""
    try:
        await get_text(session, f"{base_url.rstrip('/')}/health", timeout)
    except UnreachedError:
        return False
    except EngineError:
        return True
    return True


async def post_json(
    session: aiohttp.ClientSession,
    url: str,
    body: object,
    timeout: float,  # noqa: ASYNC109
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """POST ``body`` and return the JSON object answered. Raises EngineError. ``timeout``: seconds for the whole."""
    return _object(url, await _fetch(session, "POST", url, timeout, body, headers))


async def get_json(session: aiohttp.ClientSession, url: str, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109
    """GET and return the JSON object answered. Raises EngineError."""
    return _object(url, await _fetch(session, "GET", url, timeout))


async def get_text(session: aiohttp.ClientSession, url: str, timeout: float) -> str:  # noqa: ASYNC109
    """GET and return the text answered. Raises EngineError."""
    return (await _fetch(session, "GET", url, timeout)).decode("utf-8", "replace")


async def _fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeout: float,  # noqa: ASYNC109
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    try:
        async with session.request(
            method,
            url,
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
            allow_redirects=False,
        ) as response:
            data = await response.content.read(MAX_BODY + 1)
            while len(data) <= MAX_BODY and not response.content.at_eof():
                data += await response.content.read(MAX_BODY + 1 - len(data))
            status = response.status
    except TimeoutError:
        raise UnreachedError(f"no answer from {url} within {timeout:g} s") from None
    except aiohttp.InvalidURL:
        raise EngineError(f"{url!r} is not an address") from None
    except aiohttp.ClientConnectorError as e:
        raise UnreachedError(f"cannot connect to {url}: {e.strerror or e}") from None
    except aiohttp.ServerDisconnectedError:
        raise UnreachedError(f"{url} closed the connection without an answer") from None
    except aiohttp.ClientPayloadError:
        raise UnreachedError(f"{url} broke off in the middle of its answer") from None
    except (aiohttp.ClientError, OSError) as e:
        raise UnreachedError(f"request to {url} failed: {type(e).__name__} {e}".rstrip()) from None
    if len(data) > MAX_BODY:
        raise EngineError(f"{url} answered more than {MAX_BODY >> 20} MiB")
    if status != 200:
        raise EngineError(f"{url} answered {status}: {_complaint(data)}", f"{url} answered {status}")
    return data


def _object(url: str, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        what = "HTML" if data.lstrip()[:1] == b"<" else "something else" if data.strip() else "nothing"
        said = f"{url} answered {what} where JSON was expected"
        raise EngineError(f"{said}: {_excerpt(data)}", said) from None
    if not isinstance(answer, dict):
        raise EngineError(f"{url} answered a JSON {type(answer).__name__} where an object was expected")
    return answer


def _complaint(data: bytes) -> str:
    """The message inside an error body of SGLang or FastAPI, or its first words."""
    try:
        answer = json.loads(data)
    except ValueError:
        return _excerpt(data)
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            inner = answer[key]
            text = inner.get("message", inner) if isinstance(inner, dict) else inner
            return _excerpt(str(text).encode())
    return _excerpt(data)


def _excerpt(data: bytes) -> str:
    text = " ".join(data[: 4 * _EXCERPT].decode("utf-8", "replace").split())
    return (text[:_EXCERPT] + "…" if len(text) > _EXCERPT else text) or "(empty)"
