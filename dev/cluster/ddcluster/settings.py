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


@dataclass(frozen=True)
class Settings:
    """One cluster.

    `state` is the cluster's own folder, `cache` the one shared by all; `gpus` is how many `gpu_product`
    the node claims to have (0: none).
    """

    name: str
    state: Path
    cache: Path
    gpus: int
    gpu_product: str

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


def from_environment(env: Mapping[str, str]) -> Settings:
    """Read DDTREE_CLUSTER, DDTREE_CACHE, DDTREE_CLUSTER_GPUS, DDTREE_CLUSTER_GPU_PRODUCT and XDG_STATE_HOME.

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
    home = Path(env.get("HOME") or "/root")
    state = Path(env.get("XDG_STATE_HOME") or home / ".local" / "state") / "ddtree" / name
    cache = Path(env.get("DDTREE_CACHE") or home / ".cache" / "ddtree")
    return Settings(name, state.absolute(), cache.absolute(), int(gpus), product)
