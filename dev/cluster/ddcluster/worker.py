"""What every node runs: containerd, kubelet and kube-proxy, with their network, cgroup and configuration."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import gpu, pause, render
from .api import Api
from .parts import Parts
from .say import Problem
from .settings import API_PORT, NODE_IP, PAUSE_IMAGE, REGISTRY, SERVICE_CIDR, Machine, Settings

CTR = ["ctr", "-n", "k8s.io"]


class Worker:
    """The components of one node that run pods."""

    def __init__(self, s: Settings, machine: Machine, kube: Path, api: Api) -> None:
        self._s, self._machine, self._kube, self._api, self._pki = s, machine, kube, api, s.live / "pki"
        self.parts = Parts(machine.live, machine.log, self._started_again)

    def network(self) -> None:
        """A bridge that holds the node's address and the pods; nothing leads out, so that strangers fail at once."""
        m = self._machine
        addresses(
            "link set lo up",
            "link add cni0 type bridge",
            f"address add {m.ip}/{m.cidr.split('/')[1]} dev cni0",
            "link set cni0 up",
            f"route add {SERVICE_CIDR} dev cni0",
        )
        for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
            setting = Path("/proc/sys") / name
            if setting.exists():
                setting.write_text("1")

    def cgroups(self) -> None:
        """The group that holds all pods: in every version 1 hierarchy, or once where there is only version 2."""
        root, name = Path("/sys/fs/cgroup"), self._machine.cgroup
        if (root / "cgroup.controllers").exists():
            for above in (root, *(root / p for p in Path(name).parents if p != Path())):
                available = (above / "cgroup.controllers").read_text().split()
                (above / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in available))
            (root / name).mkdir(exist_ok=True)
            return
        for hierarchy in root.iterdir():
            if hierarchy.is_dir() and not hierarchy.is_symlink() and hierarchy.name != "unified":
                (hierarchy / name).mkdir(exist_ok=True)

    def configuration(self) -> None:
        """Files of containerd, kubelet and kube-proxy."""
        m, pki = self._machine, self._pki
        hosts = m.live / "hosts" / REGISTRY
        for folder in (m.live / "cni", hosts, m.containerd_root):
            folder.mkdir(parents=True, exist_ok=True)
        for file, user in (("proxy", "proxy"), ("kubelet", m.kubelet)):
            self.kubeconfig(m.live / f"{file}.kubeconfig", user)
        (m.live / "kubelet.yaml").write_text(render.kubelet(m, pki, self._s.node_grace))
        (m.live / "proxy.yaml").write_text(render.proxy(m, m.live / "proxy.kubeconfig"))
        (m.live / "cni" / "10-pods.conflist").write_text(render.cni(m))
        (hosts / "hosts.toml").write_text(render.hosts_toml())

    def kubeconfig(self, path: Path, user: str) -> None:
        """How an identity of certs.make reaches the API server from inside."""
        path.touch(mode=0o600)
        path.write_text(render.kubeconfig(self._pki, user, f"https://{NODE_IP}:{API_PORT}", f"ddtree-{self._s.name}"))

    def containerd(self) -> None:
        """Start containerd; before that, forget the containers of an earlier life but keep the images."""
        config = self._machine.live / "containerd.toml"
        config.write_text(render.containerd(self._machine, cri=False))
        self.parts.run("containerd", "containerd", "-c", config)
        self.parts.until("containerd", _containerd_answers)
        for container in _ctr("containers", "list", "-q").split():
            _ctr("containers", "delete", container)
        if PAUSE_IMAGE not in _ctr("images", "list", "-q").split():
            _ctr("images", "import", str(pause.archive(self._s.cache / "pause")))
        self.parts.end("containerd")
        config.write_text(render.containerd(self._machine, cri=True))
        self.parts.run("containerd", "containerd", "-c", config)
        self.parts.until("containerd", _containerd_answers)

    def kubelet(self) -> None:
        """Start kubelet and kube-proxy, and wait until the node is ready and offers its GPUs."""
        m, kube = self._machine, self._kube
        labels = ",".join(f"{k}={v}" for k, v in gpu.labels(self._s.gpu_product, self._s.gpus).items())
        before = self._beat()
        self.parts.run("kubelet", kube / "kubelet", f"--config={m.live}/kubelet.yaml",
                       f"--kubeconfig={m.live}/kubelet.kubeconfig", f"--cert-dir={m.live}/kubelet-generated",
                       f"--hostname-override={m.name}", f"--node-ip={m.ip}", f"--node-labels={labels}")  # fmt: skip
        self.parts.run("kube-proxy", kube / "kube-proxy", f"--config={m.live}/proxy.yaml")
        # A node that comes back may still be called ready, by its earlier life.
        self.parts.until("the node", lambda: self._ready() and self._beat() != before)
        self._give_gpus()

    def _ready(self) -> bool:
        found = self._api.get(f"/api/v1/nodes/{self._machine.name}") or {}
        conditions = found.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _beat(self) -> str:
        """When the node's Lease was renewed; "" when there is none."""
        found = self._api.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._machine.name}")
        return str((found or {}).get("spec", {}).get("renewTime", ""))

    def _give_gpus(self) -> None:
        if self._s.gpus:
            status, text = self._api.request(
                "PATCH", f"/api/v1/nodes/{self._machine.name}/status", gpu.status_patch(self._s.gpus)
            )  # fmt: skip
            if status != 200:
                raise Problem(f"the node's GPUs could not be set: {text}")

    def _started_again(self, name: str) -> None:
        if name == "kubelet":
            Background(self._give_gpus_again)

    def _give_gpus_again(self) -> None:
        # A starting kubelet sets extended resources that no device plugin vouches for to zero.
        for _ in range(60):
            time.sleep(1)
            try:
                self._give_gpus()
            except (OSError, Problem):
                continue


class Background:
    """A function running in a thread; `result` waits and raises what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._catch, args=(work,), daemon=True)
        self._thread.start()

    def _catch(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._error = e

    def result(self) -> None:
        """Wait for the end; raises what the function raised."""
        self._thread.join()
        if self._error:
            raise self._error


def addresses(*lines: str) -> None:
    """Commands of `ip`. Raises subprocess.CalledProcessError."""
    for line in lines:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)


def _containerd_answers() -> bool:
    return subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode == 0


def _ctr(*arguments: str) -> str:
    done = subprocess.run([*CTR, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
