"""The operator with no more rights than the chart gives: enough for its work, and not more."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from integration.ddt_api import DIGEST, Api, as_account, open_api, render_chart, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NAME = "op-rights"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """A namespace with the chart's ServiceAccount and roles, and nothing else of it."""
    with open_api("rights") as found:
        objects = render_chart(found, **{"fullnameOverride": NAME, "rbac.secrets": "{regcred}"})
        rights = [d for d in objects if "Role" in d["kind"] or "Account" in d["kind"]]
        found.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
        try:
            yield found
        finally:
            wide = [d for d in rights if d["kind"].startswith("Cluster")]
            found.kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(wide))


@pytest.mark.parametrize(
    ("verb", "what", "allowed"),
    [
        ("patch", "ddtreedeployments", True),
        ("patch", "ddtreedeployments --subresource=status", True),
        ("create", "deployments.apps", True),
        ("create", "jobs.batch", True),
        ("get", "pods --subresource=log", True),
        ("list", "nodes", True),
        ("get", "secrets/regcred", True),
        ("get", "secrets/other", False),
        ("list", "secrets", False),
        ("delete", "ddtreedeployments", False),
        ("patch", "httproutes.gateway.networking.k8s.io", True),
        ("create", "httproutes.gateway.networking.k8s.io", False),
        ("create", "pods", False),
        ("create", "pods --subresource=exec", False),
        ("patch", "nodes", False),
        ("list", "namespaces", False),
    ],
)
def test_what_it_may_do(api: Api, verb: str, what: str, allowed: bool) -> None:
    assert may(api, verb, what, api.namespace) is allowed


@pytest.mark.parametrize("what", ["deployments.apps", "ddtreedeployments", "configmaps"])
def test_it_may_do_nothing_elsewhere(api: Api, what: str) -> None:
    assert not may(api, "get", what, "default")


def may(api: Api, verb: str, what: str, namespace: str) -> bool:
    account = f"--as=system:serviceaccount:{api.namespace}:{NAME}"
    done = Api(api.env, namespace).kubectl("auth", "can-i", verb, *what.split(), account, check=False)
    return done.stdout.strip() == "yes"


def test_the_operator_works_with_these_rights(api: Api, tmp_path: Path) -> None:
    """Rollout, command, rollback and cleanup, with an image that does not exist; not one refusal in the log."""
    [settings] = [d for d in render_chart(api) if d["kind"] == "ConfigMap"]
    config = tmp_path / "config.yaml"
    config.write_text(settings["data"]["config.yaml"])
    env = {**api.env, "KUBECONFIG": str(as_account(api, NAME, tmp_path))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "ddtree_operator", "--config", str(config), "--host=127.0.0.1", f"--port={port}"]
    spec = {
        "model": {"path": "/m"},
        "drafter": {"path": "/d"},
        "engine": {"image": f"registry.invalid/engine@{DIGEST}"},
        "placement": {"gpu": {"perReplica": 0}},
    }
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as operator:
        try:
            assert api.apply(spec, name="one", dry=False).returncode == 0
            until(lambda: phase(api) == "Starting")
            aborted = api.ddtreectl("rollout", "abort", "one", "--reason", "test", "--wait")
            assert aborted.returncode == 0, aborted.stderr + log.read_text()
            assert api.ddtreectl("rollout", "status", "one").returncode == 2
            assert api.ddtreectl("rollout", "retry", "one", "--wait").returncode == 0
            until(lambda: phase(api) == "Starting")
            api.kubectl("delete", "ddt", "one")
            until(
                lambda: not api.kubectl("get", "deployments,services,controllerrevisions", "-o", "name").stdout.strip()
            )
        finally:
            operator.terminate()
            operator.wait(60)
    assert "orbidden" not in log.read_text()


def phase(api: Api) -> str:
    found = json.loads(api.kubectl("get", "ddt", "one", "-o", "json").stdout)
    return str(found.get("status", {}).get("phase", ""))
