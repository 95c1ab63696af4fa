"""The Gateway API in the cluster, on demand: Contour and Envoy as processes beside it, serving one Gateway.

Both run in the cluster's namespaces and end with them. Only who asks for it builds Contour.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from . import host
from .binaries import build, envoy, kubectl_and_helm
from .say import Problem, say
from .settings import NODE_IP, Settings

PORT = 8080  # where Envoy listens for a Gateway's listener of port 80 (Contour adds 8000 to low ports)
CONTROLLER = "projectcontour.io/gateway-controller"
_XDS, _HTTP, _HEALTH, _STATS = 18001, 18010, 18011, 18012


def start(s: Settings, gateway: str = "default/gw") -> None:
    """CRDs, GatewayClass contour, that Gateway, Contour and Envoy; returns once the Gateway is programmed."""
    space, slash, name = gateway.partition("/")
    if not (space and slash and name):
        raise Problem(f"{gateway!r} names no Gateway: write NAMESPACE/NAME")
    running = host.require(s)
    note = s.live / "gateway.json"
    kept = json.loads(note.read_text()) if note.exists() else {"processes": []}
    runs = bool(kept["processes"]) and all(host.start_time(pid) == began for pid, began in kept["processes"])
    if runs and kept["gateway"] != gateway:
        raise Problem(f"this cluster serves Gateway {kept['gateway']}: only one at a time")
    folder, proxy = build("gateway", s.cache), envoy(s.cache)
    began = time.monotonic()
    _kubectl(s, "apply", "--server-side", "--force-conflicts", "-f", str(folder / "crds.yaml"))
    _kubectl(s, "wait", "--for=condition=Established", "--timeout=60s", "crd/httproutes.gateway.networking.k8s.io",
             "crd/gateways.gateway.networking.k8s.io", "crd/httpproxies.projectcontour.io")  # fmt: skip
    if not _kubectl(s, "get", "namespace", space, "--ignore-not-found", "-o", "name"):
        _kubectl(s, "create", "namespace", space)
    _kubectl(
        s, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects(space, name)})
    )
    if runs:
        _wait(s, space, name, kept["processes"])
        say(f"Gateway {gateway} is served already, at {NODE_IP}:{PORT}")
        return
    config = s.live / "contour.yaml"
    config.write_text(f"gateway:\n  gatewayRef: {{namespace: {space}, name: {name}}}\n")
    bootstrap, admin = s.live / "envoy.json", s.live / "envoy-admin.sock"
    enter = host.entering(running)
    contour = folder / "contour"
    done = subprocess.run(
        [*enter, contour, "bootstrap", bootstrap, "--xds-address=127.0.0.1", f"--xds-port={_XDS}",
         f"--admin-address={admin}"], cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"contour bootstrap failed: {done.stderr.strip()}")
    serve = [*enter, contour, "serve", "--insecure", f"--kubeconfig={s.inner_kubeconfig}", f"--config-path={config}",
             "--xds-address=127.0.0.1", f"--xds-port={_XDS}", "--http-address=127.0.0.1", f"--http-port={_HTTP}",
             "--health-address=127.0.0.1", f"--health-port={_HEALTH}", "--stats-address=127.0.0.1",
             f"--stats-port={_STATS}", f"--envoy-service-http-address={NODE_IP}", f"--envoy-service-http-port={PORT}",
             f"--envoy-service-namespace={space}", "--envoy-service-name=envoy",
             "--disable-leader-election"]  # fmt: skip
    proxied = [*enter, proxy, "-c", bootstrap, "--service-cluster", space, "--service-node", "n1", "--concurrency", "1",
               "--log-level", "warn"]  # fmt: skip
    processes = [_spawn(s, "contour", serve), _spawn(s, "envoy", proxied)]
    note.write_text(json.dumps({"gateway": gateway, "processes": processes}))
    _wait(s, space, name, processes)
    say(f"Gateway {gateway} is served at {NODE_IP}:{PORT} after {time.monotonic() - began:.1f} s")


def _objects(space: str, name: str) -> list[dict[str, Any]]:
    listener = {"name": "http", "protocol": "HTTP", "port": 80, "allowedRoutes": {"namespaces": {"from": "All"}}}
    api = "gateway.networking.k8s.io/v1"
    return [
        {
            "apiVersion": api,
            "kind": "GatewayClass",
            "metadata": {"name": "contour"},
            "spec": {"controllerName": CONTROLLER},
        },
        {
            "apiVersion": api,
            "kind": "Gateway",
            "metadata": {"name": name, "namespace": space},
            "spec": {"gatewayClassName": "contour", "listeners": [listener]},
        },
        {  # Contour looks here for the address of the Gateway
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "envoy", "namespace": space},
            "spec": {"ports": [{"port": 80, "targetPort": PORT, "name": "http"}]},
        },
    ]


def _spawn(s: Settings, name: str, command: list[Any]) -> tuple[int, Any]:
    env = {**os.environ, "HOME": str(s.live)}
    with (s.log / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return process.pid, host.start_time(process.pid)


def _wait(s: Settings, space: str, name: str, processes: list[tuple[int, Any]]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        text = _kubectl(s, "get", "gateways.gateway.networking.k8s.io", name, "-n", space, "-o", "json")
        told = json.loads(text).get("status", {}).get("conditions", [])
        if any(c["type"] == "Programmed" and c["status"] == "True" for c in told):
            return
        if any(host.start_time(pid) != began for pid, began in processes):
            break
        time.sleep(0.5)
    raise Problem(f"Gateway {space}/{name} is not programmed: see {s.log}/contour.log and {s.log}/envoy.log")


def _kubectl(s: Settings, *arguments: str, stdin: str | None = None) -> str:
    env = {**os.environ, **host.outer_environment(s)}
    program: Path = kubectl_and_helm(s.cache) / "kubectl"
    done = subprocess.run([program, *arguments], input=stdin, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"kubectl {' '.join(arguments[:2])} failed: {done.stderr.strip()}")
    return done.stdout
