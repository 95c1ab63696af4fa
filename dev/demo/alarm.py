"""An alert about the promoted revision, sent as Alertmanager would send it.

A pod sends it, so that it takes the way of a real one: the operator's Service, the token, the network policy.
"""

from __future__ import annotations

import base64
import json
import secrets
import time

from demo.cluster import Cluster, DemoError
from demo.resources import CONTAINER_SECURITY, NAME, NAMESPACE, POD_SECURITY, SYSTEM, Object

SECRET = "ddtree-alerts"
SERVICE = "ddtree-operator-alerts"
SCRIPT = """
import os, urllib.request
head = {"Authorization": "Bearer " + os.environ["TOKEN"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["URL"], os.environ["BODY"].encode(), head)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


def provide_token(cluster: Cluster) -> str:
    """The Secret that operator and sender share, made on first use; its name."""
    if cluster.get("secret", SECRET, "-n", SYSTEM) is None:
        token = base64.b64encode(secrets.token_hex(32).encode()).decode()
        meta = {"name": SECRET, "namespace": SYSTEM}
        cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {"token": token}})
    return SECRET


def notification(revision: str, now: float) -> Object:
    """Alertmanager's webhook body, version 4, with one firing alert about ``revision``."""
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    labels = {"alertname": "DemoAlert", "namespace": NAMESPACE, "ddtreedeployment": NAME, "revision": revision}
    words = {"summary": "sent by the demo"}
    alert = {"status": "firing", "fingerprint": secrets.token_hex(8), "startsAt": began, "labels": labels}
    return {"version": "4", "status": "firing", "alerts": [{**alert, "annotations": words}]}


def send(cluster: Cluster, image: str, revision: str) -> None:
    """Send the alert; returns when the operator has answered that it is recorded."""
    service = cluster.get("service", SERVICE, "-n", SYSTEM)
    if service is None:
        raise DemoError(f"there is no Service {SERVICE}: the operator was installed without its alert webhook")
    pod = sender(image, f"http://{service['spec']['clusterIP']}:9095/alerts", notification(revision, time.time()))
    cluster.run("delete", "pod", "alert", "-n", SYSTEM, "--ignore-not-found", "--wait=true", timeout=120)
    cluster.apply(pod)
    try:
        cluster.run("wait", "pod/alert", "-n", SYSTEM, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    except DemoError:
        said = cluster.run("logs", "alert", "-n", SYSTEM, check=False).strip().splitlines()
        raise DemoError(f"the alert could not be delivered: {said[-1] if said else 'its pod did not end'}") from None
    answer = cluster.run("logs", "alert", "-n", SYSTEM).strip()
    if "recorded" not in answer:
        raise DemoError(f"the operator did not record the alert: {answer}")


def sender(image: str, url: str, body: Object) -> Object:
    """The pod that sends it. The network policy lets it in by its label."""
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "token"}}},
        {"name": "URL", "value": url},
        {"name": "BODY", "value": json.dumps(body)},
    ]
    container = {"name": "alert", "image": image, "command": ["python3", "-c", SCRIPT], "env": env}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "alert",
            "namespace": SYSTEM,
            "labels": {"app.kubernetes.io/name": "alertmanager"},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [{**container, "securityContext": CONTAINER_SECURITY}],
        },
    }
