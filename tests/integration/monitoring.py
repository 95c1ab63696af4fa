"""Prometheus and Alertmanager as docs/how-to/alerts.md sets them up, beside the pods of the dev cluster.

The configuration is the page's own and the rules are the shipped ones. Only times are shortened, so that a fall shows
within seconds, and addresses are given as numbers: the dev cluster has no DNS.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from integration.ddt_api import ROOT
from integration.operator_cluster import ALERTS_IP, ALERTS_TOKEN, SYSTEM, Installed

PAGE = ROOT / "docs/how-to/alerts.md"
RULES = ROOT / "charts/ddtree-operator/files/ddtree-rules.yaml"
NODE = "10.88.0.1"
PROMETHEUS, ALERTMANAGER = 19090, 19093


def block(name: str) -> Any:
    """The YAML example on the page whose first line is a comment with this name."""
    found = re.search(rf"```yaml\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.S)
    assert found, f"{PAGE} has no example {name}"
    return yaml.safe_load(found[1])


def prometheus_config(namespace: str, kubeconfig: str, rules: Path) -> dict[str, Any]:
    """prometheus.yml."""
    config = block("prometheus.yml")
    for job in config["scrape_configs"]:
        job["scrape_interval"] = "1s"
        for discovery in job["kubernetes_sd_configs"]:
            discovery["kubeconfig_file"] = kubeconfig
            discovery["namespaces"]["names"] = [SYSTEM if job["job_name"] == "ddtree-operator" else namespace]
    more = {
        "global": {"evaluation_interval": "1s"},
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"{NODE}:{ALERTMANAGER}"]}]}]},
    }
    return config | more | {"rule_files": [str(rules)]}


def quick_rules() -> str:
    """The shipped rules with short windows."""
    text = RULES.read_text().replace("[5m]", "[10s]")
    return re.sub(r"for: \d+m", "for: 2s", text)


def alertmanager_config(token_file: Path) -> dict[str, Any]:
    """alertmanager.yml."""
    config = block("alertmanager.yml")
    [hook] = config["receivers"][1]["webhook_configs"]
    hook["url"] = f"http://{ALERTS_IP}:9095/alerts"
    hook["http_config"]["authorization"]["credentials_file"] = str(token_file)
    config["route"]["routes"][0] |= {"group_wait": "1s", "group_interval": "2s", "repeat_interval": "3s"}  # repeats!
    return dict(config)


def inside(operator: Installed, *command: str | Path) -> list[str]:
    """A command that runs where pods can be reached, and ends with its parent."""
    return [str(ROOT / "dev/cluster/cluster"), "run", "setpriv", "--pdeathsig", "KILL", *map(str, command)]


@contextmanager
def monitoring(operator: Installed, namespace: str, folder: Path) -> Iterator[None]:
    """Both, running, while the block does."""
    env = {k: v for k, v in operator.env.items() if k != "KUBECONFIG"}
    programs = Path(
        subprocess.run(
            [ROOT / "dev/cluster/build-binaries", "prometheus"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    )
    where = subprocess.run(
        inside(operator, "printenv", "KUBECONFIG"), env=env, check=True, capture_output=True, text=True
    )
    token, rules = folder / "token", folder / "rules.yml"
    token.write_text(ALERTS_TOKEN)
    rules.write_text(quick_rules())
    configs = {
        "prometheus": prometheus_config(namespace, where.stdout.strip(), rules),
        "alertmanager": alertmanager_config(token),
    }
    for name, config in configs.items():
        (folder / f"{name}.yml").write_text(yaml.safe_dump(config))
    check = subprocess.run([programs / "promtool", "check", "config", folder / "prometheus.yml"], capture_output=True)
    assert check.returncode == 0, check.stdout.decode() + check.stderr.decode()
    commands = [
        [programs / "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
         f"--web.listen-address={NODE}:{PROMETHEUS}"],
        [programs / "alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am",
         f"--web.listen-address={NODE}:{ALERTMANAGER}", "--cluster.listen-address="],
    ]  # fmt: skip
    started = []
    try:
        for name, command in zip(configs, commands, strict=True):
            with (folder / f"{name}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(inside(operator, *command), env=env, stdout=log, stderr=log, cwd=os.sep)
                )
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


def ask(operator: Installed, query: str) -> list[dict[str, Any]]:
    """Series that Prometheus answers with; [] while it does not answer."""
    quoted = urllib.request.quote(query)  # type: ignore[attr-defined]
    url = f"http://{NODE}:{PROMETHEUS}/api/v1/query?query={quoted}"
    env = {k: v for k, v in operator.env.items() if k != "KUBECONFIG"}
    done = subprocess.run(inside(operator, "curl", "-sf", "-m", "10", url), env=env, capture_output=True, text=True)
    return list(yaml.safe_load(done.stdout)["data"]["result"]) if done.returncode == 0 else []


def post(operator: Installed, body: bytes, token: str) -> int:
    """Send a notification to the operator's Service; the HTTP code."""
    return send(operator, f"http://{ALERTS_IP}:9095/alerts", body, f"Authorization: Bearer {token}")


def send(operator: Installed, url: str, body: bytes, header: str = "X-Test: 1") -> int:
    """POST JSON to an address inside the cluster; the HTTP code."""
    headers = ["-H", "Content-Type: application/json", "-H", header]
    env = {k: v for k, v in operator.env.items() if k != "KUBECONFIG"}
    command = inside(
        operator, "curl", "-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", *headers, "-d", "@-", url
    )
    done = subprocess.run(command, env=env, input=body, capture_output=True)
    return int(done.stdout or 0)


def now() -> str:
    """RFC 3339."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
