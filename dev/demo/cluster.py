"""The cluster that the demo runs on: the dev cluster, or the user's own by KUBECONFIG."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "dev" / "cluster" / "cluster"


class DemoError(Exception):
    """Something the demo cannot go on from; the message is for people."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach it. ``registry`` is the registry's name as nodes and pods know it; ``wheelhouse`` is "" where the
    demo has to bring its own.
    """

    kubeconfig: str
    kubectl: str
    helm: str
    registry: str
    registry_local: str
    wheelhouse: str
    ours: bool

    def run(self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 300) -> str:
        """kubectl; its output. Raises DemoError with kubectl's own words."""
        return _command([self.kubectl, *args], self.env, stdin, check, timeout)

    def helm_run(self, *args: str, timeout: float = 300) -> str:
        """helm; its output."""
        return _command([self.helm, *args], self.env, None, True, timeout)

    @property
    def env(self) -> dict[str, str]:
        """Environment for tools that talk to it."""
        return {**os.environ, "KUBECONFIG": self.kubeconfig}

    def apply(self, *objects: dict[str, Any]) -> None:
        """kubectl apply -f -."""
        self.run("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def get(self, *args: str) -> dict[str, Any] | None:
        """kubectl get -o json; None when it is not there."""
        out = self.run("get", *args, "-o", "json", "--ignore-not-found")
        return json.loads(out) if out.strip() else None


def _command(args: list[str], env: dict[str, str], stdin: str | None, check: bool, timeout: float) -> str:
    try:
        done = subprocess.run(args, env=env, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{Path(args[0]).name} {' '.join(args[1:4])}: no answer within {timeout:.0f} s") from None
    if check and done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise DemoError(f"{Path(args[0]).name} {' '.join(args[1:4])}: {words[-1] if words else 'failed'}")
    return done.stdout


def own_cluster() -> Cluster:
    """The dev cluster, started when it is not up. Its messages go through to the user."""
    done = subprocess.run([str(TOOL), "up"], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise DemoError("the dev cluster did not start; the lines above say why")
    out = _command([str(TOOL), "env"], dict(os.environ), None, True, 60)
    values = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines() if line.startswith("export "))
    return Cluster(
        kubeconfig=values["KUBECONFIG"],
        kubectl=values["DDTREE_KUBECTL"],
        helm=values["DDTREE_HELM"],
        registry=values["DDTREE_REGISTRY"],
        registry_local=values["DDTREE_REGISTRY_LOCAL"],
        wheelhouse="http://10.88.0.1:8081",
        ours=True,
    )


def given_cluster(kubeconfig: str) -> Cluster:
    """The user's cluster. Raises DemoError naming what it takes."""
    registry = os.environ.get("DDTREE_REGISTRY")
    if not registry:
        raise DemoError(
            "KUBECONFIG is set, so the demo uses that cluster; it also needs DDTREE_REGISTRY=HOST:PORT, a "
            "plain-HTTP registry that this machine pushes to and the nodes pull from: see "
            "docs/how-to/demo-on-your-cluster.md"
        )
    tools = {}
    for name in ("kubectl", "helm"):
        tools[name] = os.environ.get(f"DDTREE_{name.upper()}") or shutil.which(name) or ""
        if not tools[name]:
            raise DemoError(f"{name} is not on PATH; install it, or set DDTREE_{name.upper()} to its path")
    return Cluster(
        kubeconfig=kubeconfig,
        kubectl=tools["kubectl"],
        helm=tools["helm"],
        registry=registry,
        registry_local=os.environ.get("DDTREE_REGISTRY_LOCAL", registry),
        wheelhouse=os.environ.get("DDTREE_WHEELHOUSE", "").rstrip("/"),
        ours=False,
    )
