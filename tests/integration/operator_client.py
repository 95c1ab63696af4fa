"""A client in a pod that asks a resource's Service all the time, each request on a new connection, none retried."""

from __future__ import annotations

import json
from dataclasses import dataclass

from integration.ddt_api import ROOT
from integration.operator_cluster import Installed


@dataclass
class Client:
    """The running client."""

    operator: Installed
    namespace: str
    forgiven: int = 0  # failures that are not held against anybody

    def counts(self) -> tuple[int, int]:
        """Requests so far and how many of them failed without being forgiven."""
        requests = failed = 0
        for entry in self._log():
            requests, failed = entry.get("requests", requests), entry.get("failed", failed)
        return requests, failed - self.forgiven

    def forgive(self) -> int:
        """Count no failure so far; how many were not forgiven before."""
        failed = self.counts()[1]
        self.forgiven += failed
        return failed

    def errors(self) -> list[str]:
        """What went wrong, in the client's words."""
        return [str(e["error"]) for e in self._log() if "error" in e]

    def failures(self) -> list[tuple[float, float]]:
        """Begin (epoch) and length in seconds of each request that failed."""
        return [(float(str(e["at"])), float(str(e["seconds"]))) for e in self._log() if "error" in e]

    def more(self, requests: int) -> None:
        """Wait until so many further requests were answered."""
        before, _ = self.counts()
        self.operator.until(lambda: self.counts()[0] >= before + requests, f"{requests} more requests")

    def _log(self) -> list[dict[str, object]]:
        text = self.operator.api(self.namespace).kubectl("logs", "client").stdout
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def start_client(
    operator: Installed,
    namespace: str,
    name: str,
    every: float = 0.1,
    tokens: int = 4,
    target: str = "",
    patience: float = 120,
    node: str = "",
) -> Client:
    """Start it against the Service of a resource, or another address; on a node, where one is named."""
    service = operator.reader.get(f"/api/v1/namespaces/{namespace}/services/{name}")
    assert service is not None, f"there is no Service {name}"
    target = target or f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
    prompts = [f"Tell me about number {i}." for i in range(20)]
    env = {"TARGET": target, "PROMPTS": json.dumps(prompts), "EVERY": str(every), "TOKENS": str(tokens)}
    env["PATIENCE"] = str(patience)
    script = (ROOT / "dev/demo/client.py").read_text()
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "client",
        "image": operator.images["simengine"],
        "command": ["python3", "-u", "-c", script],
        "env": [{"name": k, "value": v} for k, v in env.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "client"},
        "spec": {"restartPolicy": "Never", "securityContext": security, "containers": [container]}
        | ({"nodeName": node} if node else {}),
    }
    api = operator.api(namespace)
    api.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    made = Client(operator, namespace)
    operator.until(lambda: api.kubectl("logs", "client", check=False).returncode == 0, "the client's pod runs")
    made.more(1)
    return made
