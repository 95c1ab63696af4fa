"""Which of several replicas works: the one that holds a Lease, as Kubernetes' own controllers do it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ddtree_operator.handlers.kube import LEASE, ApiError, Kube, Object

log = logging.getLogger("ddtree.election")

DURATION = 15.0  # seconds after which a Lease that is not renewed may be taken
DEADLINE = 10.0  # seconds without a renewal after which the holder stops working
RETRY = 2.0  # seconds between attempts


class Election:
    """Holds a Lease while it can.

    Clocks are never compared across machines: a Lease counts as left when it did not change for DURATION seconds of
    the local clock. The holder stops before that, also when the API server does not answer: see ``leading``.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock = clock
        self._renewed = -DEADLINE  # when the last renewal began
        self._held = False
        self._seen: tuple[str, str] = ("", "")  # holder and renewTime
        self._seen_at = 0.0
        self.changed = asyncio.Event()  # set whenever ``leading`` may have changed

    @property
    def leading(self) -> bool:
        """Whether this replica may write now."""
        return self._held and self._clock() - self._renewed < DEADLINE

    async def run(self) -> None:
        """Try for ever."""
        while True:
            before = self.leading
            began = self._clock()
            try:
                async with asyncio.timeout(DEADLINE / 2):
                    self._held = await self._attempt(began)
            except (ApiError, TimeoutError) as error:
                log.warning("Lease %s/%s not reached: %s", self._namespace, self._name, error or "no answer")
            if before != self.leading:
                log.info("this replica %s", "works from now on" if self.leading else "is on standby")
                self.changed.set()
            await asyncio.sleep(RETRY)

    async def _attempt(self, began: float) -> bool:
        """Take or renew the Lease. True when it is ours then."""
        lease = await self._kube.get(LEASE, self._namespace, self._name)
        if lease is None:
            made = await self._kube.create(self._lease({}, "", 0))
            return self._mine(began) if made is not None else False
        spec = lease.get("spec") or {}
        holder, renewed = spec.get("holderIdentity") or "", spec.get("renewTime") or ""
        if self._seen != (holder, renewed):
            self._seen, self._seen_at = (holder, renewed), began
        if holder not in ("", self._identity) and began - self._seen_at < DURATION:
            return False
        version = lease["metadata"]["resourceVersion"]
        body = self._lease(spec, version, int(spec.get("leaseTransitions") or 0) + (holder != self._identity))
        try:
            await self._kube.patch(LEASE, self._namespace, self._name, body)
        except ApiError as error:
            if error.status == 409:  # somebody else was quicker
                return False
            raise
        return self._mine(began)

    def _mine(self, began: float) -> bool:
        self._renewed = began
        return True

    def _lease(self, before: Object, version: str, transitions: int) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = before.get("holderIdentity") == self._identity
        meta: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta | ({"resourceVersion": version} if version else {}),
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(DURATION),
                "acquireTime": before.get("acquireTime", now) if mine else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }

    async def leave(self) -> None:
        """Hand over: the next replica need not wait for the Lease to run out."""
        if not self.leading:
            return
        self._held = False
        self.changed.set()
        try:
            async with asyncio.timeout(DEADLINE / 2):
                lease = await self._kube.get(LEASE, self._namespace, self._name)
                if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
                    return
                version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
                body = {"metadata": version, "spec": {"holderIdentity": ""}}
                await self._kube.patch(LEASE, self._namespace, self._name, body)
        except (ApiError, TimeoutError) as error:
            log.warning("the Lease was not given back, the next replica waits for it to run out: %s", error)
