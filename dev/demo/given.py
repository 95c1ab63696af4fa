"""What a cluster given by KUBECONFIG has to be brought, and the dev cluster has already: the models in a claim, the
wheels by http.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from demo import resources
from demo.cluster import Cluster, DemoError
from demo.resources import NAMESPACE, SYSTEM
from demo.show import say

PORT = 8081


def copy_models(cluster: Cluster, folder: str, key: str, image: str) -> None:
    """Make the claim ``models`` on the default storage class and copy ``folder`` into it, through a pod."""
    cluster.apply(*resources.models_by_copy(image, key))
    try:
        _ready(cluster, "models", NAMESPACE, "the cluster needs a default StorageClass and room for 5 GiB")
        say("copying the models into the cluster")
        _copy(cluster, Path(folder), "models", NAMESPACE, "/models")
    except DemoError:
        # a claim that is half full must not be taken for a full one by the next run
        cluster.run("delete", "pod,pvc", "models", "-n", NAMESPACE, "--wait=false", check=False)
        raise
    cluster.run("delete", "pod", "models", "-n", NAMESPACE, "--wait=true", timeout=120)


def serve_wheels(cluster: Cluster, image: str) -> str:
    """Address of a file server in the cluster that has the wheelhouse's wheels. A running one with the same wheels is
    kept.
    """
    cache = Path(os.environ.get("DDTREE_CACHE") or Path.home() / ".cache" / "ddtree")
    folder = cache / "wheelhouse"
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.whl"))
    key = hashlib.sha256("".join(f"{n} {(folder / n).stat().st_size}\n" for n in names).encode()).hexdigest()[:16]
    there = cluster.get("pod", "wheelhouse", "-n", SYSTEM)
    if there is None or there["metadata"]["annotations"].get(resources.ANNOTATION_WHEELS) != key:
        cluster.run("delete", "pod", "wheelhouse", "-n", SYSTEM, "--ignore-not-found", "--wait=true", timeout=120)
        cluster.apply(*resources.wheel_server(image, PORT, key))
        _ready(cluster, "wheelhouse", SYSTEM, "kubectl describe pod says more")
        say("copying the wheels into the cluster")
        try:
            _copy(cluster, folder, "wheelhouse", SYSTEM, "/wheels")
        except DemoError:
            cluster.run("delete", "pod", "wheelhouse", "-n", SYSTEM, "--wait=false", check=False)
            raise
    service = cluster.get("service", "wheelhouse", "-n", SYSTEM)
    if service is None:
        raise DemoError("the Service of the wheels is gone; run the demo again")
    return f"http://{service['spec']['clusterIP']}:{PORT}"


def _ready(cluster: Cluster, pod: str, namespace: str, hint: str) -> None:
    try:
        cluster.run("wait", f"pod/{pod}", "-n", namespace, "--for=condition=Ready", "--timeout=180s", timeout=200)
    except DemoError:
        raise DemoError(f"pod {pod} in {namespace} is not ready after 180 s; {hint}") from None


def _copy(cluster: Cluster, folder: Path, pod: str, namespace: str, into: str) -> None:
    """Pack ``folder``, links followed, and unpack it in the pod; Python does it there, as tar may be missing."""
    unpack = f"import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall({into!r})"
    command = [cluster.kubectl, "exec", "-i", "-n", namespace, pod, "--", "python3", "-c", unpack]
    with subprocess.Popen(["tar", "-chf", "-", "-C", str(folder), "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(command, env=cluster.env, stdin=tar.stdout, capture_output=True, text=True, check=False)
    if tar.returncode != 0 or done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise DemoError(f"{folder.name} could not be copied into pod {pod}: {words[-1] if words else 'tar failed'}")
