"""The inside of a cluster: the first node, which has the control plane, the registry and the file server as well.

Process 1 of the PID namespace only reaps what is orphaned (every container's shim is); its one child does the work.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

from . import mounts, render
from .api import Api
from .parts import Parts, tell
from .settings import API_PORT, NODE_IP, REGISTRY, REGISTRY_PORT, SERVICE_CIDR, WHEELHOUSE_PORT, Settings
from .worker import Background, Worker

MAIN = Path(__file__).resolve().parent.parent / "cluster"


class Node:
    """The components of one cluster."""

    def __init__(self, s: Settings, kube: Path) -> None:
        self._s, self._kube, self._pki = s, kube, s.live / "pki"
        self._api = Api(self._pki)
        self._worker = Worker(s, s.first, kube, self._api)
        self._parts = self._worker.parts

    def start(self, api_fd: int, registry_fd: int) -> Parts:
        """Bring the node to Ready. Raises Problem, OSError or CalledProcessError."""
        s, worker, parts = self._s, self._worker, self._parts
        mounts.prepare(s.first)
        worker.network()
        worker.cgroups()
        self._write_configuration()
        self._control_plane()
        self._services(api_fd, registry_fd)
        images = Background(worker.containerd)
        parts.until("the API server", lambda: self._api.request("GET", "/readyz")[0] == 200)
        self._controllers()
        images.result()
        tell("· API server is up, starting the node")
        worker.kubelet()
        parts.until("the default service account", self._account_exists)
        parts.until("the registry", lambda: _answers(f"http://{REGISTRY}/v2/"))
        parts.until("the wheelhouse", lambda: _answers(f"http://{NODE_IP}:{WHEELHOUSE_PORT}/"))
        return parts

    def _write_configuration(self) -> None:
        s = self._s
        for folder in (s.registry_root, s.wheelhouse):
            folder.mkdir(parents=True, exist_ok=True)
        self._worker.configuration()
        self._worker.kubeconfig(s.inner_kubeconfig, "admin")
        for user in ("controller-manager", "scheduler"):
            self._worker.kubeconfig(s.live / f"{user}.kubeconfig", user)
        (s.live / "registry.yml").write_text(render.registry(s))

    def _control_plane(self) -> None:
        pki = self._pki
        self._parts.run("etcd", self._kube / "etcd", f"--data-dir={self._s.live}/etcd", "--unsafe-no-fsync",
                        "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
                        "--listen-peer-urls=http://127.0.0.1:2380", "--log-level=warn")  # fmt: skip
        self._parts.run("kube-apiserver", self._kube / "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
                  "--bind-address=0.0.0.0", f"--advertise-address={NODE_IP}", f"--secure-port={API_PORT}",
                  f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
                  f"--client-ca-file={pki}/ca.crt", f"--kubelet-certificate-authority={pki}/ca.crt",
                  f"--kubelet-client-certificate={pki}/admin.crt", f"--kubelet-client-key={pki}/admin.key",
                  "--kubelet-preferred-address-types=InternalIP",
                  f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key",
                  "--service-account-issuer=https://kubernetes.default.svc",
                  f"--service-cluster-ip-range={SERVICE_CIDR}",
                  "--authorization-mode=Node,RBAC",
                  "--enable-admission-plugins=NodeRestriction,ExtendedResourceToleration",
                  "--allow-privileged=true", "--event-ttl=3h")  # fmt: skip

    def _controllers(self) -> None:
        pki, live, grace = self._pki, self._s.live, self._s.node_grace
        # One of each: an election would only cost time. The default of 20 requests a second is too few for kwok.
        common = ("--leader-elect=false", "--bind-address=127.0.0.1", "--kube-api-qps=200", "--kube-api-burst=400")
        watching = (f"--node-monitor-grace-period={grace}s", "--node-monitor-period=1s") if grace else ()
        self._parts.run("kube-controller-manager", self._kube / "kube-controller-manager", *common, *watching,
                  f"--kubeconfig={live}/controller-manager.kubeconfig", f"--root-ca-file={pki}/ca.crt",
                  f"--service-account-private-key-file={pki}/sa.key", "--use-service-account-credentials",
                  f"--cluster-signing-cert-file={pki}/ca.crt", f"--cluster-signing-key-file={pki}/ca.key",
                  )  # fmt: skip
        self._parts.run(
            "kube-scheduler", self._kube / "kube-scheduler", *common, f"--kubeconfig={live}/scheduler.kubeconfig"
        )  # fmt: skip

    def _services(self, api_fd: int, registry_fd: int) -> None:
        """Registry, file server, and the two forwarders that listen on sockets of the host's network."""
        s = self._s
        self._parts.run("registry", "docker-registry", "serve", s.live / "registry.yml")
        self._parts.run("wheelhouse", sys.executable, "-m", "http.server", "--bind", NODE_IP,
                        "--directory", s.wheelhouse, str(WHEELHOUSE_PORT))  # fmt: skip
        for name, fd, port in (("forward-api", api_fd, API_PORT), ("forward-registry", registry_fd, REGISTRY_PORT)):
            self._parts.run(name, sys.executable, MAIN, "_forward", str(fd), str(port), keep=(fd,))

    def _account_exists(self) -> bool:
        return self._api.get("/api/v1/namespaces/default/serviceaccounts/default") is not None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False
