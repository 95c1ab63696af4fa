"""Where a cluster lives and how it is sized: everything that the environment decides, read once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .gpu import PRODUCTS
from .say import Problem

NODE = "node-a"
NODE_IP = "10.88.0.1"
POD_CIDR = "10.88.0.0/16"
SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
API_PORT = 6443
REGISTRY_PORT = 5000
WHEELHOUSE_PORT = 8081
REGISTRY = f"{NODE_IP}:{REGISTRY_PORT}"
FAKE_LABEL = "ddtree.dev/fake"
PAUSE_IMAGE = "localhost/ddtree-pause:1"
LINK_IP = "10.87.0.1"  # node-a's end of the network that joins the nodes
LINK_BITS = 24


@dataclass(frozen=True)
class Machine:
    """One node: its name, where its files are, its cgroup, and its addresses.

    `ip` is the first address of `cidr`, which its pods share; `link_ip` is where the other nodes send what is for them.
    """

    name: str
    live: Path
    log: Path
    containerd_root: Path
    cgroup: str
    ip: str
    cidr: str
    link_ip: str

    @property
    def kubelet(self) -> str:
        """Name of its kubelet's certificate."""
        return "kubelet" if self.name == NODE else f"kubelet-{self.name}"

    @property
    def first_pod(self) -> str:
        """The first address that a pod may get."""
        return self.ip.rpartition(".")[0] + ".10"


@dataclass(frozen=True)
class Settings:
    """One cluster.

    `state` is the cluster's own folder, `cache` the one shared by all; `gpus` is how many `gpu_product`
    the node claims to have (0: none). `node_grace` is after how many seconds of silence a node is taken for lost
    (None: as Kubernetes has it, 50).
    """

    name: str
    state: Path
    cache: Path
    gpus: int
    gpu_product: str
    node_grace: int | None = None

    @property
    def live(self) -> Path:
        """All that a running cluster writes except images and logs; gone after `down`."""
        return self.state / "live"

    @property
    def log(self) -> Path:
        """Logs of the components and of the pods; kept until the next `up`."""
        return self.state / "log"

    @property
    def containerd_root(self) -> Path:
        """Image store of this cluster, kept over `down`."""
        return self.cache / "containerd" / self.name

    @property
    def registry_root(self) -> Path:
        """Storage of the registry, kept over `down` and shared by all clusters.

        That is safe because the storage is addressed by content, written by rename, read without a cache
        and never garbage collected while a cluster runs.
        """
        return self.cache / "registry"

    @property
    def wheelhouse(self) -> Path:
        """Folder that the file server offers inside the cluster."""
        return self.cache / "wheelhouse"

    @property
    def kubeconfig(self) -> Path:
        """For the user's shell: goes through the forwarded port on 127.0.0.1."""
        return self.state / "kubeconfig"

    @property
    def inner_kubeconfig(self) -> Path:
        """For programs inside the namespaces."""
        return self.live / "kubeconfig"

    @property
    def cgroup(self) -> str:
        """Name of the cgroup, under each hierarchy's root, that holds all pods."""
        return f"ddtree-{self.name}"

    @property
    def first(self) -> Machine:
        """The node that also has the control plane and the registry."""
        return Machine(
            NODE, self.live, self.log, self.containerd_root, self.cgroup, NODE_IP, POD_CIDR, LINK_IP
        )  # fmt: skip

    def further(self, name: str) -> Machine:
        """A node that joins: node-b to node-f. Raises Problem for another name."""
        if not re.fullmatch("node-[b-f]", name):
            raise Problem(f"{name!r} names no further node: use node-b to node-f")
        number = ord(name[-1]) - ord("a")
        return Machine(
            name=name,
            live=self.live / name,
            log=self.log / name,
            containerd_root=self.cache / "containerd" / f"{self.name}.{name}",
            cgroup=f"{self.cgroup}/{name}",
            ip=f"10.{100 + number}.0.1",
            cidr=f"10.{100 + number}.0.0/16",
            link_ip=f"10.87.0.{1 + number}",
        )


def from_environment(env: Mapping[str, str]) -> Settings:
    """Read DDTREE_CLUSTER, DDTREE_CACHE, DDTREE_CLUSTER_GPUS, DDTREE_CLUSTER_GPU_PRODUCT, DDTREE_CLUSTER_NODE_GRACE
    and XDG_STATE_HOME.

    Raises Problem with one sentence when a value cannot be used.
    """
    name = env.get("DDTREE_CLUSTER") or "dev"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", name):
        raise Problem(f"DDTREE_CLUSTER={name!r} is no usable name: use up to 30 lower-case letters, digits and dashes")
    gpus = env.get("DDTREE_CLUSTER_GPUS") or "8"
    if not gpus.isdecimal() or int(gpus) > 64:
        raise Problem(f"DDTREE_CLUSTER_GPUS={gpus!r} is no number of GPUs: use 0 to 64")
    product = env.get("DDTREE_CLUSTER_GPU_PRODUCT") or "NVIDIA-H200"
    if product not in PRODUCTS:
        raise Problem(f"DDTREE_CLUSTER_GPU_PRODUCT={product!r} is not known: choose one of {', '.join(PRODUCTS)}")
    grace = env.get("DDTREE_CLUSTER_NODE_GRACE") or ""
    if grace and not (grace.isdecimal() and 4 <= int(grace) <= 600):
        raise Problem(f"DDTREE_CLUSTER_NODE_GRACE={grace!r} is no usable number of seconds: use 4 to 600")
    home = Path(env.get("HOME") or "/root")
    state = Path(env.get("XDG_STATE_HOME") or home / ".local" / "state") / "ddtree" / name
    cache = Path(env.get("DDTREE_CACHE") or home / ".cache" / "ddtree")
    return Settings(name, state.absolute(), cache.absolute(), int(gpus), product, int(grace) if grace else None)
