"""The dev cluster leaves nothing behind: not after `down`, not after an interrupted `up`.

Other work may go on beside the test, so that each check looks only for what a cluster could have left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
CLUSTER = REPO / "dev" / "cluster" / "cluster"
sys.path.insert(0, str(CLUSTER.parent))
from ddcluster import preflight  # noqa: E402
from ddcluster.say import Problem  # noqa: E402

pytestmark = pytest.mark.integration

# What programs of a node create on a machine that is not kept out of their sight.
TRACES = [
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/run/xtables.lock",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
    "/usr/libexec/kubernetes",
]
SYSCTLS = ["vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
           "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/ip_forward"]  # fmt: skip
POD = """
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data: {a: b}
---
apiVersion: v1
kind: Service
metadata: {name: s}
spec: {selector: {app: p}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {app: p}}
spec:
  containers:
  - name: p
    image: localhost/ddtree-pause:1
    imagePullPolicy: Never
    ports: [{containerPort: 80, hostPort: 8888}]
    resources: {limits: {memory: 32Mi, nvidia.com/gpu: 2}}
    volumeMounts:
    - {name: empty, mountPath: /empty}
    - {name: ram, mountPath: /ram}
    - {name: config, mountPath: /config}
    - {name: host, mountPath: /host, mountPropagation: Bidirectional}
    securityContext: {privileged: true}
  volumes:
  - {name: empty, emptyDir: {}}
  - {name: ram, emptyDir: {medium: Memory}}
  - {name: config, configMap: {name: c}}
  - {name: host, hostPath: {path: /tmp}}
"""


class Cluster:
    """One cluster with a state folder of its own."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.state = name, home / "ddtree" / name
        self.env = {**os.environ, "DDTREE_CLUSTER": name, "XDG_STATE_HOME": str(home)}

    def __call__(self, *command: str, given: str | None = None) -> str:
        done = subprocess.run(
            [CLUSTER, *command], env=self.env, input=given, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"cluster {' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def running(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.state / "running.json").read_text())
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    try:
        preflight.check()
    except Problem as problem:
        pytest.skip(str(problem))
    made = Cluster(f"clean-{os.getpid()}", tmp_path)
    yield made
    made("purge")


def host_view() -> dict[str, Any]:
    """What a cluster could change on the host, outside its own folders."""
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False).stdout
    links = [p.name for p in Path("/sys/class/net").iterdir()]
    return {
        "traces": {p: sorted(Path(p).rglob("*")) if Path(p).is_dir() else Path(p).exists() for p in TRACES},
        "sysctls": {n: (Path("/proc/sys") / n).read_text() for n in SYSCTLS},
        "rules": sorted(r for r in rules.splitlines() if "KUBE" in r or "CNI" in r),
        "links": sorted(x for x in links if x.startswith(("veth", "cni", "kube"))),
    }


def namespaces(pid: int) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("pid", "net", "mnt")}


def members(spaces: set[str]) -> list[int]:
    """Host ids of all processes that live in any of the namespaces."""
    found = []
    for p in Path("/proc").iterdir():
        if not p.name.isdecimal():
            continue
        try:
            if namespaces(int(p.name)) & spaces:
                found.append(int(p.name))
        except OSError:
            continue
    return found


def started(state: Path) -> list[int]:
    """Host ids of processes that work in the cluster's folder or have it on their command line."""
    found = []
    for p in Path("/proc").iterdir():
        if not p.name.isdecimal() or int(p.name) == os.getpid():
            continue
        try:
            if str(state) in (p / "cmdline").read_text() + str((p / "cwd").readlink()):
                found.append(int(p.name))
        except OSError:
            continue
    return found


def groups(name: str) -> list[str]:
    return [f for f, _, _ in os.walk("/sys/fs/cgroup") if f"ddtree-{name}" in f]


def until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def assert_gone(cluster: Cluster, before: dict[str, Any]) -> None:
    assert not started(cluster.state)
    assert not groups(cluster.name)
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [m for m in mounts.splitlines() if cluster.name in m or "/kubelet" in m or "io.containerd" in m]
    left = {p.name for p in cluster.state.iterdir()} if cluster.state.exists() else set()
    assert left <= {"lock", "log", "ports.json"}
    assert host_view() == before


def test_down_leaves_nothing(cluster: Cluster) -> None:
    before = host_view()
    assert f"export KUBECONFIG={cluster.state}/kubeconfig" in cluster("up")
    init = int(Path(f"/proc/{cluster.running['outer']}/task/{cluster.running['outer']}/children").read_text())
    spaces = namespaces(init)
    assert not spaces & namespaces(os.getpid())
    cluster("add-node", "node-b")
    second = json.loads((cluster.state / "live/node-b/running.json").read_text())[0]
    assert not spaces & namespaces(second)
    spaces |= namespaces(second)
    cluster("kubectl", "apply", "-f", "-", given=POD)
    cluster("kubectl", "wait", "--for=condition=Ready", "pod/p", "--timeout=120s")
    cluster("status")
    assert len(groups(cluster.name)) > 10, "the pod's cgroups were expected"
    assert len(members(spaces)) > 10
    port = cluster.running["api_port"]
    socket.create_connection(("127.0.0.1", port), 5).close()

    cluster("down")

    assert not members(spaces)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    assert_gone(cluster, before)


def test_a_second_up_is_clean_and_keeps_images(cluster: Cluster) -> None:
    cluster("up")
    cluster("kubectl", "apply", "-f", "-", given=POD)
    cluster("kubectl", "wait", "--for=condition=Ready", "pod/p", "--timeout=120s")
    cluster("down")
    cluster("up")
    assert "localhost/ddtree-pause:1" in cluster("run", "ctr", "-n", "k8s.io", "images", "list", "-q")
    assert not cluster("run", "ctr", "-n", "k8s.io", "containers", "list", "-q").strip()
    assert not cluster("kubectl", "get", "pods", "-A", "-o", "name").strip()
    gpus = cluster("kubectl", "get", "node", "node-a", "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}")
    assert gpus == "8"


@pytest.mark.parametrize("moment", ["early", "late"])
def test_an_interrupted_up_leaves_nothing(cluster: Cluster, moment: str) -> None:
    before = host_view()
    with subprocess.Popen(
        [CLUSTER, "up"], env=cluster.env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as up:
        assert up.stderr is not None
        wanted = {"early": "starting cluster", "late": "starting the node"}[moment]
        assert any(wanted in line for line in up.stderr), "up ended too early"
        if moment == "early":
            until(lambda: (cluster.state / "running.json").exists(), "the namespaces")
        up.send_signal(signal.SIGINT)
        rest = up.stderr.read()
    assert up.returncode == 130
    assert "Traceback" not in rest
    assert_gone(cluster, before)


def test_two_live_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(f"{cluster.name}-b", tmp_path)
    try:
        cluster("up")
        other("up")
        cluster("kubectl", "create", "namespace", "mine")
        assert "mine" not in other("kubectl", "get", "namespaces", "-o", "name")
        other("down")
        assert not groups(other.name)
        assert "namespace/mine" in cluster("kubectl", "get", "namespaces", "-o", "name")
    finally:
        other("purge")


def test_fake_nodes_take_gpu_pods_only(cluster: Cluster) -> None:
    cluster("up")
    cluster("fake-nodes", "3", "NVIDIA-L4", "1")
    leases = cluster("kubectl", "get", "leases", "-n", "kube-node-lease", "-o", "name")
    assert leases.count("fake-nvidia-l4-") == 3, "nodes that renew no Lease turn NotReady after a while"
    cluster("kubectl", "cordon", "node-a")
    cluster("kubectl", "run", "gpu", "--image=none", "--overrides", json.dumps(
        {"spec": {"containers": [{"name": "gpu", "image": "none", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
                  "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}}))  # fmt: skip
    cluster("kubectl", "run", "plain", "--image=none")
    cluster("kubectl", "wait", "--for=condition=Ready", "pod/gpu", "--timeout=60s")
    cluster("kubectl", "wait", "--for=condition=PodScheduled=False", "pod/plain", "--timeout=60s")
    assert "fake-nvidia-l4-" in cluster("kubectl", "get", "pod", "gpu", "-o", "jsonpath={.spec.nodeName}")
    cluster("fake-nodes", "0")
    assert cluster("kubectl", "get", "nodes", "-o", "name").split() == ["node/node-a"]


def test_what_cannot_work_is_one_sentence() -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root, to give it up")
    as_nobody = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, CLUSTER, "up"]
    unable = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", sys.executable, CLUSTER, "up"]
    for command, reason in ((as_nobody, "needs root"), (unable, "CAP_SYS_ADMIN is missing")):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert reason in done.stderr
        assert "KUBECONFIG=" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
