"""kubectl, helm and ddtreectl against a real cluster, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddtree_operator.api import names

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ddtree-operator"
DIGEST = "sha256:" + "0" * 64
WAIT = 60.0

Done = subprocess.CompletedProcess[str]


class Api:
    """kubectl, helm and ddtreectl against one cluster, in one namespace of our own."""

    def __init__(self, env: dict[str, str], namespace: str) -> None:
        self.env, self.namespace = env, namespace

    def run(self, *args: str, stdin: str = "", timeout: float = 120) -> Done:
        return subprocess.run(args, input=stdin, capture_output=True, text=True, env=self.env, timeout=timeout)

    def kubectl(self, *args: str, stdin: str = "", check: bool = True) -> Done:
        done = self.run(self.env.get("DDTREE_KUBECTL", "kubectl"), "-n", self.namespace, *args, stdin=stdin)
        assert not check or done.returncode == 0, done.stderr
        return done

    def started(self, *args: str) -> subprocess.Popen[str]:
        """kubectl, while it runs."""
        words = [self.env.get("DDTREE_KUBECTL", "kubectl"), "-n", self.namespace, *args]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env)

    def helm(self, *args: str) -> Done:
        return self.run(self.env.get("DDTREE_HELM", "helm"), *args)

    def ddtreectl(self, *args: str, namespace: str = "") -> Done:
        where = ["-n", namespace or self.namespace]
        return self.run(sys.executable, "-m", "ddtreectl", *args, *where)

    def apply(self, spec: dict[str, Any] | str, name: str = "try", dry: bool = True) -> Done:
        spec = yaml.safe_load(spec) if isinstance(spec, str) else spec
        resource = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
        dry_run = ["--dry-run=server"] if dry else []
        return self.kubectl("apply", *dry_run, "-o", "json", "-f", "-", stdin=json.dumps(resource), check=False)

    def status(self, name: str, **status: Any) -> None:
        self.kubectl("patch", "ddt", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


@contextmanager
def open_api(prefix: str) -> Iterator[Api]:
    """A namespace of our own, and the CRD in force. The cluster is $KUBECONFIG's, else the dev cluster that runs."""
    env = dict(os.environ)
    if "KUBECONFIG" not in env:
        env["DDTREE_CLUSTER"] = env.get("DDTREE_CLUSTER", "it")
        told = subprocess.run([ROOT / "dev/cluster/cluster", "env"], capture_output=True, text=True, env=env)
        assert told.returncode == 0, f"no cluster: set KUBECONFIG or run dev/cluster/cluster up ({told.stderr.strip()})"
        for line in told.stdout.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            env[name] = value.strip("'")
    env["PYTHONPATH"] = f"{ROOT / 'operator'}{os.pathsep}{ROOT / 'cli'}"
    found = Api(env, f"{prefix}-{uuid.uuid4().hex[:8]}")
    found.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"))
    found.kubectl("wait", "--for=condition=Established", "crd/ddtreedeployments.ddtree.dev", "--timeout=60s")
    found.kubectl("create", "namespace", found.namespace)
    until(lambda: found.kubectl("get", "ddt", check=False).returncode == 0)
    try:
        yield found
    finally:
        found.kubectl("delete", "namespace", found.namespace, "--wait=false", check=False)


def until(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    """Wait for a condition; fail when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def as_account(api: Api, account: str, folder: Path) -> Path:
    """A kubeconfig that acts as a service account of the namespace."""
    token = api.kubectl("create", "token", account).stdout.strip()
    config = yaml.safe_load(api.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "yaml").stdout)
    config["users"][0]["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def render_chart(api: Api, **values: str) -> list[dict[str, Any]]:
    """Objects of the chart, watching our namespace, without a builder unless ``values`` say otherwise."""
    given = {"image": f"r.example/op@{DIGEST}", "watchNamespaces": f"{{{api.namespace}}}", **values}
    if "builder.image" not in given:
        given["builder.enabled"] = "false"
    settings = ",".join(f"{k}={v}" for k, v in given.items())
    done = api.helm("template", "op", str(CHART), "-n", api.namespace, "--set", settings)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]
