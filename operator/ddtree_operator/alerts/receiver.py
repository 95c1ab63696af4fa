"""The webhook that Alertmanager calls. It checks, records and answers; it never acts.

Alertmanager sends again after a 5xx and drops a notification after a 4xx. So 5xx means that nothing was recorded, 4xx
that sending the same again is useless, and 200 that every alert in it was dealt with (the body says how).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from aiohttp import web

from ddtree_operator.alerts.guards import Bucket, Sources, Tokens
from ddtree_operator.alerts.notification import Alert, Notification, NotificationError, parse

log = logging.getLogger("ddtree.alerts")

PATH = "/alerts"
MAX_BODY = 1 << 20  # bytes
READ_SECONDS = 10.0  # in which a body has to arrive
LATER = (1.0, 5.0, 20.0, 60.0, 120.0)  # seconds between further attempts at what could not be recorded
MOST_LATER = 200  # alerts that wait for such an attempt


class Result(StrEnum):
    """What became of one alert."""

    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    RESOLVED = "resolved"
    IGNORED = "ignored"  # it names a revision that no longer runs, or that nobody knows
    MALFORMED = "malformed"
    FORBIDDEN = "forbidden"  # a namespace that this operator does not watch
    LATER = "later"  # the API server did not take it; tried again


class StoreError(Exception):
    """The API server did not answer, or not well. Nothing was recorded as far as one can tell."""


# (namespace, resource, revision), firing alerts about it -> what became of each. Raises StoreError.
Target = tuple[str, str, str]
Store = Callable[[Target, Sequence[Alert]], Awaitable[list[tuple[Result, str]]]]


@dataclass(slots=True)
class Limits:
    """Notifications a second, and at once: of senders with a token, and of an address without one."""

    rate: float = 50.0
    burst: float = 200.0
    failures_rate: float = 1.0
    failures_burst: float = 20.0


@dataclass(slots=True)
class Receiver:
    """The receiver. ``count`` is called with the code of each answer and the results in it."""

    tokens: Tokens
    namespaces: frozenset[str]
    store: Store
    limits: Limits = field(default_factory=Limits)
    count: Callable[[int, Sequence[Result]], None] = lambda code, results: None
    _bucket: Bucket = field(init=False)
    _sources: Sources = field(init=False)
    _waiting: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._bucket = Bucket(self.limits.rate, self.limits.burst)
        self._sources = Sources(self.limits.failures_rate, self.limits.failures_burst)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> web.AppRunner:
        """Serve; the runner's ``cleanup`` ends it."""
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes([web.post(PATH, self.handle)])
        app.on_cleanup.append(self._stop)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
        await runner.setup()
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        return runner

    async def _stop(self, _: web.Application) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def handle(self, request: web.Request) -> web.Response:
        """One notification."""
        response, results = await self._answer(request)
        self.count(response.status, results)
        if response.status not in {200, 401, 429}:
            log.warning("notification from %s answered %d: %s", request.remote, response.status, response.text)
        return response

    async def _answer(self, request: web.Request) -> tuple[web.Response, list[Result]]:
        source = request.remote or ""
        if not self.tokens.usable():
            return _say(503, "the receiver has no token yet"), []
        if not self.tokens.accept(request.headers.get("Authorization")):
            # Whoever has the token is let in first: others behind the same address cannot shut them out.
            if self._sources.shut_out(source):
                return _say(429, "too many notifications without a valid token"), []
            self._sources.failed(source)
            log.warning("notification from %s refused: no valid token", source)
            return _say(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"}), []
        if not self._bucket.take():
            return _say(503, "too many notifications at once", {"Retry-After": "1"}), []
        if request.content_type != "application/json":
            return _say(415, "the body has to be application/json"), []
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await request.read()
            notification = parse(body)
        except web.HTTPRequestEntityTooLarge:
            return _say(413, f"the body has more than {MAX_BODY} bytes; set max_alerts in Alertmanager"), []
        except (web.RequestPayloadError, ConnectionError):
            return _say(400, "the body broke off"), []
        except TimeoutError:
            return _say(503, f"the body did not arrive within {READ_SECONDS:g} s"), []
        except NotificationError as error:
            return _say(400, str(error)), []
        return await self._record(notification)

    async def _record(self, notification: Notification) -> tuple[web.Response, list[Result]]:
        """Record what is to be recorded, and answer."""
        outcome: dict[int, tuple[Result, str]] = {}
        targets: dict[Target, list[int]] = {}
        for i, alert in enumerate(notification.alerts):
            if alert.problem:
                outcome[i] = (Result.MALFORMED, alert.problem)
            elif alert.namespace not in self.namespaces:
                outcome[i] = (Result.FORBIDDEN, f"namespace {alert.namespace} is not watched by this operator")
            elif not alert.firing:
                outcome[i] = (Result.RESOLVED, "")
            else:
                targets.setdefault((alert.namespace, alert.resource, alert.revision), []).append(i)
        failed: list[tuple[Target, list[Alert]]] = []
        for target, indices in targets.items():
            alerts = [notification.alerts[i] for i in indices]
            try:
                found = await self.store(target, alerts)
            except StoreError as error:
                log.warning("alerts about %s/%s %s not recorded: %s", *target, error)
                found = [(Result.LATER, "the API server did not take it; it is tried again")] * len(alerts)
                failed.append((target, alerts))
            outcome |= dict(zip(indices, found, strict=True))
        results = [outcome[i][0] for i in range(len(notification.alerts))]
        if failed and Result.RECORDED not in results:
            return _say(503, "nothing was recorded: the API server did not answer"), results
        for target, alerts in failed:
            self._try_later(target, alerts)
        rows = [
            {"fingerprint": a.fingerprint, "result": str(outcome[i][0])}
            | ({"why": why} if (why := outcome[i][1]) else {})
            for i, a in enumerate(notification.alerts)
        ]
        if notification.truncated:
            log.warning("Alertmanager left %d alerts out of a notification", notification.truncated)
        body = {"results": rows, "truncatedAlerts": notification.truncated}
        return web.json_response(body, status=_code(results)), results

    def _try_later(self, target: Target, alerts: list[Alert]) -> None:
        """Some alerts of the notification were recorded, so that it must not be sent again: the rest is tried here."""
        if self._waiting + len(alerts) > MOST_LATER:
            log.error("alerts about %s/%s %s are lost until they are repeated: too many wait", *target)
            return
        self._waiting += len(alerts)

        async def work() -> None:
            try:
                for pause in LATER:
                    await asyncio.sleep(pause)
                    try:
                        await self.store(target, alerts)
                    except StoreError as error:
                        log.warning("alerts about %s/%s %s still not recorded: %s", *target, error)
                    else:
                        return
                log.error("alerts about %s/%s %s are lost until they are repeated", *target)
            finally:
                self._waiting -= len(alerts)

        task = asyncio.create_task(work(), name="alerts tried again")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _code(results: Sequence[Result]) -> int:
    """200, unless not one alert could be about anything here."""
    if results and all(r is Result.FORBIDDEN for r in results):
        return 403
    if results and all(r in {Result.MALFORMED, Result.FORBIDDEN} for r in results):
        return 400
    return 200


def _say(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=headers)
