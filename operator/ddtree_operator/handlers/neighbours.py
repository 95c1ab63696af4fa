"""Nodes, and what others take of their GPUs: free ones are counted by what all pods hold that the operator may see.

Both lists grow with the cluster and are needed at every look at a revision on its way, so they are shared. The pods of
the resource itself are read at each look; the scheduler has the last word anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from ddtree_operator.handlers.kube import NODE, POD, Kube, Object
from ddtree_operator.handlers.shared import Shared
from ddtree_operator.placement.facts import gpu_usage
from ddtree_operator.placement.match import Inventory

Owner = tuple[str, str]  # namespace, deployment; ("", "") for pods that are no engines


class Neighbours:
    """Nodes with the GPUs that pods take of them: those of every namespace (``everywhere``, needs a ClusterRole), else
    those of the watched ones.
    """

    def __init__(self, kube: Kube, namespaces: tuple[str, ...], *, everywhere: bool) -> None:
        self._kube = kube
        self._where = ("",) if everywhere else namespaces
        self._nodes = Shared(self._read_nodes)
        self._taken = Shared(self._read_taken)

    async def inventory(self, namespace: str, name: str, own: Iterable[Object]) -> Inventory:
        """The nodes as a resource finds them. ``own`` are its pods as they are now."""
        nodes, (total, by_owner) = await self._nodes.get(), await self._taken.get()
        used = Counter(total)
        used.subtract(by_owner.get((namespace, name), {}))
        used.update(gpu_usage(own))
        return nodes.taken(used)

    async def _read_nodes(self) -> Inventory:
        return Inventory.from_objects(await self._kube.list(NODE), ())

    async def _read_taken(self) -> tuple[Counter[str], dict[Owner, Counter[str]]]:
        """Node → GPUs, of all pods and of each resource's."""
        total: Counter[str] = Counter()
        by_owner: dict[Owner, Counter[str]] = {}
        for where in self._where:
            async for page in self._kube.pages(POD, where):
                for pod in page:
                    if taken := gpu_usage([pod]):
                        total.update(taken)
                        by_owner.setdefault(_owner(pod), Counter()).update(taken)
        return total, by_owner


def _owner(pod: Object) -> Owner:
    meta = pod["metadata"]
    deployment = (meta.get("labels") or {}).get(LABEL_DEPLOYMENT, "")
    return (meta.get("namespace", ""), deployment) if deployment else ("", "")
