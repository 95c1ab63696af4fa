"""Nodes that only claim to run their pods (kwok), beside the real one: for placement among many.

They carry the taint that real GPU nodes often have, nvidia.com/gpu: the API server lets exactly the pods that ask for
GPUs tolerate it, so that nothing else strays there.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from . import gpu, host
from .api import Api
from .binaries import build
from .say import Problem, say
from .settings import FAKE_LABEL, Settings

_MARK = {"kwok.x-k8s.io/node": "fake"}
_LEASE = 80  # seconds; kwok renews a node's Lease after a quarter. Without Leases nodes turn NotReady every 50 s


def scale(s: Settings, count: str, product: str = "NVIDIA-H200", gpus: str = "8") -> None:
    """Add `count` nodes with `gpus` of `product` each and wait for them; "0" removes all fake nodes. Raises Problem."""
    for what, value in (("COUNT", count), ("GPUS", gpus)):
        if not value.isdecimal() or int(value) > 1000:
            raise Problem(f"{what} {value!r} is no usable number: use 0 to 1000")
    if product not in gpu.PRODUCTS:
        raise Problem(f"GPU product {product!r} is not known: choose one of {', '.join(gpu.PRODUCTS)}")
    running = host.require(s)
    api = Api(s.live / "pki", running.api_port)
    if int(count) == 0:
        _ask(api, "DELETE", f"/api/v1/nodes?labelSelector={FAKE_LABEL}")
        say("all fake nodes are removed")
        return
    _kwok(s, running)
    taken = {n["metadata"]["name"] for n in _fake_nodes(api)}
    free = (name for i in range(10000) if (name := f"fake-{product.lower()}-{i}") not in taken)
    began = time.monotonic()
    for _ in range(int(count)):
        _ask(api, "POST", "/api/v1/nodes", node(next(free), product, int(gpus)))
    _wait_ready(api, s)
    say(f"{count} fake nodes with {gpus} {product} each are ready after {time.monotonic() - began:.1f} s")


def node(name: str, product: str, gpus: int) -> dict[str, object]:
    """Manifest of one fake node."""
    amount = {"cpu": "128", "memory": "2Ti", "pods": "110", "ephemeral-storage": "4Ti", "nvidia.com/gpu": str(gpus)}
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        FAKE_LABEL: "true",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": _MARK, "labels": labels | gpu.labels(product, gpus)},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {"capacity": amount, "allocatable": amount},
    }


def _kwok(s: Settings, running: host.Running) -> None:
    """Start kwok inside the namespaces unless it runs; it ends with them."""
    note = s.live / "kwok.json"
    if note.exists():
        pid, start = json.loads(note.read_text())
        if host.start_time(pid) == start:
            return
    program = build("kwok", s.cache)
    command: list[str | Path] = [*host.entering(running), program / "kwok", f"--kubeconfig={s.inner_kubeconfig}",
               f"--config={program}/stages.yaml", "--manage-all-nodes=false", "--cidr=10.90.0.0/16",
               f"--node-lease-duration-seconds={_LEASE}",
               "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]  # fmt: skip
    env = {**os.environ, "HOME": str(s.live)}  # kwok looks for settings of its own there
    with (s.log / "kwok.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    note.write_text(json.dumps([process.pid, host.start_time(process.pid)]))


def _wait_ready(api: Api, s: Settings) -> None:
    deadline = time.monotonic() + 120
    while waiting := [n["metadata"]["name"] for n in _fake_nodes(api) if not _ready(n)]:
        if time.monotonic() > deadline:
            raise Problem(f"{len(waiting)} fake nodes are not ready after 120 s: see {s.log}/kwok.log")
        time.sleep(0.5)


def _fake_nodes(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_ask(api, "GET", f"/api/v1/nodes?labelSelector={FAKE_LABEL}"))["items"]
    return found


def _ready(found: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found["status"].get("conditions", []))


def _ask(api: Api, method: str, path: str, body: object = None) -> str:
    try:
        status, text = api.request(method, path, body)
    except OSError as e:
        raise Problem(f"the API server does not answer: {e}") from e
    if status >= 300:
        raise Problem(f"the API server refused: {json.loads(text).get('message', text)}")
    return text
