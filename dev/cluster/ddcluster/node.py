"""The inside of a cluster: starts the components in their namespaces and keeps them alive.

Process 1 of the PID namespace only reaps what is orphaned (every container's shim is); its one child does the work.
The parent reads standard output: "· text" is progress, "ready" ends the start, "! text" says why it failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from . import gpu, mounts, pause, render
from .api import Api
from .say import Problem
from .settings import (
    API_PORT,
    NODE,
    NODE_IP,
    PAUSE_IMAGE,
    POD_CIDR,
    REGISTRY,
    REGISTRY_PORT,
    SERVICE_CIDR,
    WHEELHOUSE_PORT,
    Settings,
)

START_DEADLINE = 180.0
COMPONENTS = "components.json"  # below Settings.live: name -> {pid inside the namespace, starts}
MAIN = Path(__file__).resolve().parent.parent / "cluster"
CTR = ["ctr", "-n", "k8s.io"]


def reap(work: Callable[[], int]) -> int:
    """Be process 1: run `work` in a child and return its exit status once it ends."""
    child = os.fork()
    if child == 0:
        os._exit(work())
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def main(s: Settings, kube: Path, api_fd: int, registry_fd: int) -> int:
    """Start everything, report, then restart whatever dies until the namespace is killed."""
    try:
        node = Node(s, kube)
        node.start(api_fd, registry_fd)
    except (Problem, OSError) as e:
        _tell(f"! {e}")
        return 1
    except subprocess.CalledProcessError as e:
        _tell(f"! {' '.join(map(str, e.cmd))}: {(e.stderr or '').strip() or e}")
        return 1
    _tell("ready")
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    node.keep_alive()
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)


class Node:
    """The components of one cluster, by name, with what is needed to start each again."""

    def __init__(self, s: Settings, kube: Path) -> None:
        self._s, self._kube, self._pki = s, kube, s.live / "pki"
        self._commands: dict[str, tuple[Sequence[str | Path], tuple[int, ...]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}
        self._api = Api(self._pki)
        self._deadline = time.monotonic() + START_DEADLINE

    def start(self, api_fd: int, registry_fd: int) -> None:
        """Bring the node to Ready. Raises Problem, OSError or CalledProcessError."""
        s = self._s
        mounts.prepare(s)
        _network()
        _cgroups(s)
        self._write_configuration()
        self._control_plane()
        self._services(api_fd, registry_fd)
        images = _Background(self._containerd)
        self._until("the API server", lambda: self._api.request("GET", "/readyz")[0] == 200)
        self._controllers()
        images.result()
        _tell("· API server is up, starting the node")
        self._run("kubelet", self._kube / "kubelet", f"--config={s.live}/kubelet.yaml",
                  f"--kubeconfig={s.live}/kubelet.kubeconfig", f"--cert-dir={self._pki}/kubelet-generated",
                  f"--hostname-override={NODE}", f"--node-ip={NODE_IP}", f"--node-labels={_labels(s)}")  # fmt: skip
        self._run("kube-proxy", self._kube / "kube-proxy", f"--config={s.live}/proxy.yaml")
        self._until("the node", self._node_ready)
        self._give_gpus()
        self._until("the default service account", self._account_exists)
        self._until("the registry", lambda: _answers(f"http://{REGISTRY}/v2/"))
        self._until("the wheelhouse", lambda: _answers(f"http://{NODE_IP}:{WHEELHOUSE_PORT}/"))

    def keep_alive(self) -> None:
        """Start a component again when it ends; each end is noted in log/restarts.log."""
        notes = self._s.log / "restarts.log"
        while True:
            time.sleep(1)
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                with notes.open("a") as f:
                    f.write(f"{time.strftime('%H:%M:%S')} {name} ended with status {process.returncode}\n")
                self._spawn(name)
                if name == "kubelet":
                    _Background(self._give_gpus_again)

    def _give_gpus_again(self) -> None:
        # A starting kubelet sets extended resources that no device plugin vouches for to zero.
        for _ in range(60):
            time.sleep(1)
            try:
                self._give_gpus()
            except (OSError, Problem):
                continue

    def _write_configuration(self) -> None:
        s, live = self._s, self._s.live
        hosts = live / "hosts" / REGISTRY
        for folder in (live / "cni", hosts, s.registry_root, s.wheelhouse, s.containerd_root):
            folder.mkdir(parents=True, exist_ok=True)
        server = f"https://{NODE_IP}:{API_PORT}"
        for user in ("admin", "controller-manager", "scheduler", "proxy", "kubelet"):
            path = s.inner_kubeconfig if user == "admin" else live / f"{user}.kubeconfig"
            path.touch(mode=0o600)
            path.write_text(render.kubeconfig(self._pki, user, server, f"ddtree-{s.name}"))
        (live / "kubelet.yaml").write_text(render.kubelet(s, self._pki))
        (live / "proxy.yaml").write_text(render.proxy(live / "proxy.kubeconfig"))
        (live / "registry.yml").write_text(render.registry(s))
        (live / "cni" / "10-pods.conflist").write_text(render.cni())
        (hosts / "hosts.toml").write_text(render.hosts_toml())

    def _control_plane(self) -> None:
        pki = self._pki
        self._run("etcd", self._kube / "etcd", f"--data-dir={self._s.live}/etcd", "--unsafe-no-fsync",
                  "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
                  "--listen-peer-urls=http://127.0.0.1:2380", "--log-level=warn")  # fmt: skip
        self._run("kube-apiserver", self._kube / "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
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
        pki, live = self._pki, self._s.live
        # One of each: an election would only cost time. The default of 20 requests a second is too few for kwok.
        common = ("--leader-elect=false", "--bind-address=127.0.0.1", "--kube-api-qps=200", "--kube-api-burst=400")
        self._run("kube-controller-manager", self._kube / "kube-controller-manager", *common,
                  f"--kubeconfig={live}/controller-manager.kubeconfig", f"--root-ca-file={pki}/ca.crt",
                  f"--service-account-private-key-file={pki}/sa.key", "--use-service-account-credentials",
                  f"--cluster-signing-cert-file={pki}/ca.crt", f"--cluster-signing-key-file={pki}/ca.key",
                  )  # fmt: skip
        self._run("kube-scheduler", self._kube / "kube-scheduler", *common, f"--kubeconfig={live}/scheduler.kubeconfig")

    def _services(self, api_fd: int, registry_fd: int) -> None:
        """Registry, file server, and the two forwarders that listen on sockets of the host's network."""
        s = self._s
        self._run("registry", "docker-registry", "serve", s.live / "registry.yml")
        self._run("wheelhouse", sys.executable, "-m", "http.server", "--bind", NODE_IP, "--directory", s.wheelhouse,
                  str(WHEELHOUSE_PORT))  # fmt: skip
        for name, fd, port in (("forward-api", api_fd, API_PORT), ("forward-registry", registry_fd, REGISTRY_PORT)):
            self._run(name, sys.executable, MAIN, "_forward", str(fd), str(port), keep=(fd,))

    def _containerd(self) -> None:
        """Start containerd; before that, forget the containers of an earlier life but keep the images."""
        config = self._s.live / "containerd.toml"
        config.write_text(render.containerd(self._s, cri=False))
        bare = self._run("containerd", "containerd", "-c", config)
        self._until("containerd", self._containerd_answers)
        for container in _ctr("containers", "list", "-q").split():
            _ctr("containers", "delete", container)
        if PAUSE_IMAGE not in _ctr("images", "list", "-q").split():
            _ctr("images", "import", str(pause.archive(self._s.cache / "pause")))
        del self._processes["containerd"], self._starts["containerd"]
        bare.terminate()
        bare.wait()
        config.write_text(render.containerd(self._s, cri=True))
        self._run("containerd", "containerd", "-c", config)
        self._until("containerd", self._containerd_answers)

    @staticmethod
    def _containerd_answers() -> bool:
        return subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode == 0

    def _node_ready(self) -> bool:
        found = self._api.get(f"/api/v1/nodes/{NODE}") or {}
        conditions = found.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def _account_exists(self) -> bool:
        return self._api.get("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def _give_gpus(self) -> None:
        if self._s.gpus:
            status, text = self._api.request(
                "PATCH", f"/api/v1/nodes/{NODE}/status", gpu.status_patch(self._s.gpus)
            )  # fmt: skip
            if status != 200:
                raise Problem(f"the node's GPUs could not be set: {text}")

    def _run(self, name: str, *command: str | Path, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        self._commands[name] = (command, keep)
        return self._spawn(name)

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        command, keep = self._commands[name]
        with (self._s.log / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._s.live, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=keep
            )  # fmt: skip
        self._processes[name] = process
        self._starts[name] = self._starts.get(name, 0) + 1
        table = {n: {"pid": p.pid, "starts": self._starts[n]} for n, p in self._processes.items()}
        components = self._s.live / COMPONENTS
        unfinished = components.with_suffix(".new")
        unfinished.write_text(json.dumps(table))
        unfinished.rename(components)
        return process

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll `condition` until it holds; a component that ends meanwhile, or the deadline, is a Problem."""
        told = time.monotonic()
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    raise Problem(
                        f"{name} ended with status {process.returncode}: {_tail(self._s.log / f'{name}.log')}"
                    )
            now = time.monotonic()
            if now > self._deadline:
                raise Problem(f"{what} was not ready within {START_DEADLINE:.0f} s: see {self._s.log}")
            if now - told > 5:
                _tell(f"· waiting for {what}")
                told = now
            time.sleep(0.1)


class _Background:
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
        self._thread.join()
        if self._error:
            raise self._error


def _labels(s: Settings) -> str:
    return ",".join(f"{k}={v}" for k, v in gpu.labels(s.gpu_product, s.gpus).items())


def _network() -> None:
    """A bridge that holds the node's address and the pods; nothing leads out, so that strangers fail at once."""
    for line in (
        "link set lo up",
        "link add cni0 type bridge",
        f"address add {NODE_IP}/{POD_CIDR.split('/')[1]} dev cni0",
        "link set cni0 up",
        f"route add {SERVICE_CIDR} dev cni0",
    ):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)
    for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        setting = Path("/proc/sys") / name
        if setting.exists():
            setting.write_text("1")


def _cgroups(s: Settings) -> None:
    """The group that holds all pods: in every version 1 hierarchy, or once where there is only version 2."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        available = (root / "cgroup.controllers").read_text().split()
        (root / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in available))
        (root / s.cgroup).mkdir(exist_ok=True)
        return
    for hierarchy in root.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink() and hierarchy.name != "unified":
            (hierarchy / s.cgroup).mkdir(exist_ok=True)


def _ctr(*arguments: str) -> str:
    done = subprocess.run([*CTR, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def _tail(log: Path) -> str:
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()] if log.exists() else []
    return (lines or ["it said nothing"])[-1][:400]
