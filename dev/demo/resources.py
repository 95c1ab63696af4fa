"""What the demo applies: namespaces, models, client, and the resource in its five shapes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMESPACE = "demo"
SYSTEM = "ddtree-system"
NAME = "demo"

Object = dict[str, Any]

ANNOTATION_PAIR = "ddtree.dev/demo-pair"  # content key of the models in the claim
ANNOTATION_WHEELS = "ddtree.dev/demo-wheels"  # content key of the wheels that a pod serves
SIZE = {"storage": "5Gi"}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def namespaces() -> list[Object]:
    """The demo's namespace, in which every pod must be restricted, and the operator's."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}},
    ]


def models_on_node(folder: str, key: str) -> list[Object]:
    """The models' folder on the dev cluster's node, as a volume for one claim."""
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "demo-models", "labels": {"ddtree.dev/demo": "models"}},
        "spec": {
            "capacity": SIZE,
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": folder, "type": "Directory"},
            "claimRef": {"namespace": NAMESPACE, "name": "models"},
        },
    }
    claim = _claim(key, "ReadOnlyMany")
    claim["spec"] |= {"storageClassName": "", "volumeName": "demo-models"}
    return [volume, claim]


def models_by_copy(image: str, key: str) -> list[Object]:
    """A claim on the cluster's default storage, and a pod that the models are copied through."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "models", "namespace": NAMESPACE},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [
                {
                    "name": "models",
                    "image": image,
                    "command": ["python3", "-c", "import time; time.sleep(3600)"],
                    "securityContext": CONTAINER_SECURITY,
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                }
            ],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    }
    return [_claim(key, "ReadWriteOnce"), pod]


def wheel_server(image: str, port: int, key: str) -> list[Object]:
    """A pod that serves the wheels copied into it, and its Service."""
    labels = {"app": "wheelhouse"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "wheelhouse",
            "namespace": SYSTEM,
            "labels": labels,
            "annotations": {ANNOTATION_WHEELS: key},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [
                {
                    "name": "wheelhouse",
                    "image": image,
                    "command": ["python3", "-m", "http.server", str(port), "--directory", "/wheels"],
                    "securityContext": CONTAINER_SECURITY,
                    "readinessProbe": {"tcpSocket": {"port": port}},
                    "volumeMounts": [{"name": "wheels", "mountPath": "/wheels"}],
                }
            ],
            "volumes": [{"name": "wheels", "emptyDir": {}}],
        },
    }
    meta = {"name": "wheelhouse", "namespace": SYSTEM}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta}
    return [pod, {**service, "spec": {"selector": labels, "ports": [{"port": port}]}}]


def _claim(key: str, mode: str) -> Object:
    meta = {"name": "models", "namespace": NAMESPACE, "annotations": {ANNOTATION_PAIR: key}}
    spec: Object = {"accessModes": [mode], "resources": {"requests": SIZE}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}


def engine_defaults(max_total_tokens: int) -> Object:
    """What every engine of this installation gets: the models' volume, and sizes that fit two cores."""
    return {
        "env": {"OMP_NUM_THREADS": "1"},
        "args": ["--max-total-tokens", str(max_total_tokens), "--max-running-requests", "4"],
        "podTemplate": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
                        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                    }
                ],
                "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
            }
        },
    }


def series(name: str, folder: Path) -> Object:
    """A patch series as a ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "binaryData": {p.name: base64.b64encode(p.read_bytes()).decode() for p in sorted(folder.iterdir())},
    }


def prompts(text: str) -> Object:
    """The prompt set as a ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prompts", "namespace": NAMESPACE},
        "data": {"prompts.jsonl": text},
    }


def client(image: str, prompt_texts: list[str], target: str) -> list[Object]:
    """The client's pod and its script."""
    env = {"TARGET": target, "PROMPTS": json.dumps(prompt_texts), "EVERY": "1.0", "TOKENS": "2"}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "client", "namespace": NAMESPACE},
            "data": {"client.py": (HERE / "client.py").read_text()},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "client", "namespace": NAMESPACE},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": POD_SECURITY,
                "containers": [
                    {
                        "name": "client",
                        "image": image,
                        "command": ["python3", "-u", "/client/client.py"],
                        "env": [{"name": k, "value": v} for k, v in env.items()],
                        "securityContext": CONTAINER_SECURITY,
                        "volumeMounts": [{"name": "client", "mountPath": "/client"}],
                    }
                ],
                "volumes": [{"name": "client", "configMap": {"name": "client"}}],
            },
        },
    ]


def resource(
    *,
    algorithm: str,
    budget: int | None = None,
    draft_block: int | None = None,
    drafter: str = "/models/drafter",
    series_map: str | None = None,
    analysis: Object | None = None,
) -> Object:
    """The DDTreeDeployment in one of its shapes."""
    speculative: Object = {"algorithm": algorithm} | ({"budget": budget} if budget else {})
    speculative |= {"draftBlock": draft_block} if draft_block else {}
    engine: Object = {"speculative": speculative}
    if series_map:
        engine["build"] = {"series": {"configMapRef": series_map}}
    return {
        "apiVersion": "ddtree.dev/v1alpha1",
        "kind": "DDTreeDeployment",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "model": {"path": "/models/target"},
            "drafter": {"path": drafter},
            "engine": engine,
            "canary": {"analysis": {"prompts": {"configMapRef": "prompts"}, **(analysis or {})}},
            "traffic": {"drain": "10s"},
        },
    }
