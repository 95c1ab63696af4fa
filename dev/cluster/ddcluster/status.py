"""What `cluster status` shows."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from . import further, host
from .api import Api
from .cache import human, size
from .parts import COMPONENTS
from .settings import FAKE_LABEL, NODE, Settings


def show(s: Settings) -> int:
    """Print the state of the cluster; 0 when it runs and its node is ready, else 1. Raises Problem."""
    others = [n for n in host.neighbours(s) if n != s.name]
    beside = f" (running beside it: {', '.join(others)})" if others else ""
    running = host.find(s)
    if not running:
        print(f"cluster   {s.name} is not running{beside}")
        return 1
    age = time.time() - (s.state / "running.json").stat().st_mtime
    print(f"cluster   {s.name}, up for {_span(age)}{beside}")
    print(f"reach     API https://127.0.0.1:{running.api_port}   registry 127.0.0.1:{running.registry_port}")
    healthy = _parts(s, running)
    healthy = _node(s, running) and healthy
    free = shutil.disk_usage(s.cache).free
    print(f"disk      images {human(size(s.containerd_root))}   registry {human(size(s.registry_root))}"
          f"   {human(free)} free")  # fmt: skip
    return 0 if healthy else 1


def _parts(s: Settings, running: host.Running) -> bool:
    try:
        table = json.loads((s.live / COMPONENTS).read_text())
    except OSError:
        table = {}
    proc = Path(f"/proc/{running.init}/root/proc")
    dead = [name for name, c in table.items() if not (proc / str(c["pid"])).exists()]
    again = [f"{name} (started {c['starts']} times)" for name, c in table.items() if c["starts"] > 1]
    text = f"{len(table) - len(dead)} of {len(table)} run"
    if dead:
        text += f"; not running: {', '.join(dead)}"
    if again:
        text += f"; ended and restarted: {', '.join(again)}"
    print(f"parts     {text}   logs: {s.log}")
    return bool(table) and not dead


def _node(s: Settings, running: host.Running) -> bool:
    try:
        api = Api(s.live / "pki", running.api_port)
        node = api.get(f"/api/v1/nodes/{NODE}")
        fakes = len((api.get(f"/api/v1/nodes?labelSelector={FAKE_LABEL}") or {}).get("items", []))
        pods = (api.get("/api/v1/pods") or {}).get("items", [])
    except OSError as e:
        print(f"node      the API server does not answer: {e.strerror or e}")
        return False
    if not node:
        print("node      not registered yet")
        return False
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
    offer = node["status"]["allocatable"]
    gpus = offer.get("nvidia.com/gpu", "0")
    product = node["metadata"]["labels"].get("nvidia.com/gpu.product", "")
    live = [p for p in pods if p["status"].get("phase") in ("Pending", "Running")]
    asked = sum(_gpus(p) for p in live if p["spec"].get("nodeName") == NODE)
    memory = int(offer["memory"].removesuffix("Ki")) / 1024**2
    print(f"node      {NODE} {'Ready' if ready else 'NOT READY'} {node['status']['nodeInfo']['kubeletVersion']}"
          f"   {offer['cpu']} CPU   {memory:.1f} GiB   {gpus} GPU {product} ({asked} taken)")  # fmt: skip
    for machine in further.known(s):
        print(f"further   {machine.name} {'runs' if further.find(s, machine) else 'is lost'}   logs: {machine.log}")
    if fakes:
        print(f"fakes     {fakes} nodes that only claim to run pods")
    phases = [p["status"].get("phase", "Unknown") for p in pods]
    counts = ", ".join(f"{phases.count(x)} {x.lower()}" for x in sorted(set(phases)))
    print(f"pods      {counts or 'none'}")
    return ready


def _gpus(pod: dict[str, Any]) -> int:
    limits = (c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"])
    return sum(int(x.get("nvidia.com/gpu", 0)) for x in limits)


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
