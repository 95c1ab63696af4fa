"""Pods of others that hold GPUs: free ones are counted by what all pods take that the operator may see."""

from __future__ import annotations

import time

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from ddtree_operator.handlers.kube import POD, Kube, Object
from ddtree_operator.placement.facts import pod_gpus

FRESH = 10.0  # seconds for which a list holds; the resource's own pods are read each time


class Neighbours:
    """Pods with GPUs in every namespace (``everywhere``, needs a ClusterRole), else in the watched ones."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...], *, everywhere: bool) -> None:
        self._kube = kube
        self._where = ("",) if everywhere else namespaces
        self._at = -FRESH
        self._pods: list[Object] = []

    async def of(self, namespace: str, name: str) -> list[Object]:
        """All of them but the resource's own."""
        if time.monotonic() - self._at >= FRESH:
            found = [pod for where in self._where for pod in await self._kube.list(POD, where)]
            self._pods = [pod for pod in found if pod_gpus(pod.get("spec") or {})]
            self._at = time.monotonic()
        return [pod for pod in self._pods if not _belongs(pod, namespace, name)]


def _belongs(pod: Object, namespace: str, name: str) -> bool:
    meta = pod["metadata"]
    return meta.get("namespace") == namespace and (meta.get("labels") or {}).get(LABEL_DEPLOYMENT) == name
