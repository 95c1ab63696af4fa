"""Puts the operator into a cluster by its chart, and takes it out again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from integration.ddt_api import ROOT

sys.path.insert(0, str(ROOT / "dev" / "cluster"))
from ddcluster import using

from integration.operator_cluster import (
    ALERTS_IP,
    ALERTS_TOKEN,
    BUILDER,
    CHART,
    LIVE_NAME,
    NAMESPACES,
    NOWHERE,
    RELEASE,
    SYSTEM,
    Installed,
    Reader,
)
from simengine.wheel import build as simengine_wheel

# Serves $DDTREE_CACHE/wheelhouse to pods.
WHEELHOUSE = os.environ.get("DDTREE_WHEELHOUSE", "http://10.88.0.1:8081")
IMAGES = ("operator", "simengine", "buildkit", "base-python")


def cluster_env(own: str = "") -> dict[str, str]:
    """Environment for the cluster's tools: $KUBECONFIG's cluster, else the dev cluster, started when it is not up.

    ``own``: the dev cluster of that name beside it.
    """
    env = dict(os.environ)
    if own or "KUBECONFIG" not in env:
        env = using.environment(own or "it", own=bool(own))
    assert env.get("DDTREE_REGISTRY"), (
        "with KUBECONFIG, DDTREE_REGISTRY has to name a registry that the nodes pull from"
    )
    env["PYTHONPATH"] = f"{ROOT / 'operator'}{os.pathsep}{ROOT / 'cli'}"
    return env


def build_images(env: dict[str, str]) -> dict[str, str]:
    """Images by name, by digest; built where they are missing."""
    done = subprocess.run([ROOT / "dev/images", *IMAGES], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return dict(re.findall(r"^(\S+) (\S+@sha256:[0-9a-f]{64})$", done.stdout, re.M))


def put_wheel() -> dict[str, str]:
    """The simulated engine's wheel in the wheelhouse, by name and hash."""
    cache = Path(os.environ.get("DDTREE_CACHE") or Path.home() / ".cache/ddtree")
    path, _ = simengine_wheel(cache / "wheelhouse" / "op-test")
    return {"url": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def chart_values(env: dict[str, str], images: dict[str, str]) -> dict[str, Any]:
    """Values: short probes and looks, so that a rollout of simulated engines takes seconds."""
    registry = env["DDTREE_REGISTRY"]
    probes = {"startupProbe": {"periodSeconds": 1}, "readinessProbe": {"periodSeconds": 1}}
    return {
        "fullnameOverride": RELEASE,
        "image": images["operator"],
        "watchNamespaces": list(NAMESPACES),
        "resyncSeconds": 10,
        "build": {
            "device": "cpu",
            "baseImage": images["base-python"],
            "pushRepository": f"{registry}/ddtree/op-test",
            "wheelhouse": f"{WHEELHOUSE}/op-test",
            "insecureRegistries": [registry, NOWHERE],
            "builderImage": images["buildkit"],
        },
        "builder": {"image": images["buildkit"], "namespace": BUILDER, "keepStorageGB": 2},
        "rbac": {"secrets": ["regcred", f"{LIVE_NAME}-live-prompts"]},
        "alerts": {"tokenSecret": "alerts", "clusterIP": ALERTS_IP},
        "engineDefaults": {
            "env": {"SIM_HEALTH_DELAY": "0", "SIM_STEP_DELAY": "0.005"},
            "podTemplate": {"spec": {"containers": [{"name": "engine", **probes}]}},
        },
    }


@contextmanager
def installed(own: str = "") -> Iterator[Installed]:
    """The operator, installed; gone afterwards, with everything that was made for it.

    ``own``: see cluster_env; that cluster is new, and who asked for it takes it down.
    """
    env = cluster_env(own)
    images = build_images(env)
    made = Installed(env, images, put_wheel(), Reader(env["KUBECONFIG"]))
    api = made.api(SYSTEM)
    if not own:
        remove(made, wait=True)  # what an interrupted run left
    for namespace in (SYSTEM, *NAMESPACES):
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        manifest["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
        api.run(env.get("DDTREE_KUBECTL", "kubectl"), "apply", "-f", "-", stdin=json.dumps(manifest))
    api.kubectl("create", "secret", "generic", "alerts", f"--from-literal=token={ALERTS_TOKEN}")
    try:
        api.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"))
        values = json.dumps(chart_values(env, images))
        done = api.run(
            env.get("DDTREE_HELM", "helm"), "upgrade", "--install", RELEASE, str(CHART), "-n", SYSTEM,
            "-f", "-", "--wait", "--timeout", "4m", stdin=values, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{made.last_words()}"
        yield made
    finally:
        if not own:
            remove(made, wait=False)
        made.reader.close()


def remove(made: Installed, *, wait: bool) -> None:
    """Take the operator and the namespaces of these tests away."""
    api = made.api(SYSTEM)
    api.run(made.env.get("DDTREE_HELM", "helm"), "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found")
    waits = ["--wait", "--timeout=180s"] if wait else ["--wait=false"]
    gone = ["namespace", SYSTEM, BUILDER, *NAMESPACES, "--ignore-not-found"]
    api.run(made.env.get("DDTREE_KUBECTL", "kubectl"), "delete", *gone, *waits, timeout=200)
