"""Objects of the builder: buildkitd as a Deployment with its Service, settings and NetworkPolicy. Pure.

The chart templates the same; this is what tests and the documentation use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddtree_operator.api.names import LABEL_ROLE

from .job import ROLE_BUILDER

PORT = 1234


def buildkitd_toml(insecure_registries: Iterable[str], *, keep_storage_gb: int = 10, tls: bool = False) -> str:
    """Settings of buildkitd: one runc worker, no entitlements, bounded cache (GB), registries over plain http.

    With ``tls`` only clients whose certificate the authority in /tls signed may connect.
    """
    lines = [
        f'[grpc]\n  address = ["unix:///run/buildkit/buildkitd.sock", "tcp://0.0.0.0:{PORT}"]',
        *(['[grpc.tls]\n  cert = "/tls/tls.crt"\n  key = "/tls/tls.key"\n  ca = "/tls/ca.crt"'] if tls else []),
        "[worker.containerd]\n  enabled = false",
        '[worker.oci]\n  enabled = true\n  gc = true\n  max-parallelism = 2\n  networkMode = "host"\n'
        f'  reservedSpace = "{max(1, keep_storage_gb // 4)}GB"\n  maxUsedSpace = "{keep_storage_gb}GB"',
    ]
    lines += [f'[registry."{name}"]\n  http = true' for name in sorted(set(insecure_registries))]
    return "\n".join(lines) + "\n"


def builder_objects(
    *,
    image: str,
    namespace: str,
    name: str = "buildkitd",
    insecure_registries: Iterable[str] = (),
    storage: dict[str, Any] | None = None,
    keep_storage_gb: int = 10,
    memory: str = "4Gi",
    tls_secret: str = "",
) -> list[dict[str, Any]]:
    """Namespace, ConfigMap, Deployment, Service and NetworkPolicy of buildkitd.

    ``image`` holds buildkitd, buildctl and runc. ``storage`` is a volume source (emptyDir when left out).
    ``tls_secret`` names a Secret in ``namespace`` with ca.crt, tls.crt and tls.key: then clients need a certificate of
    that authority. The pod is privileged: BuildKit mounts and makes namespaces; hence a namespace of its own, with the
    PodSecurity label that allows it.
    """
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "ddtree-operator"}
    selector = {"app.kubernetes.io/name": name}

    def meta() -> dict[str, Any]:
        return {"name": name, "namespace": namespace, "labels": dict(labels)}

    toml = buildkitd_toml(insecure_registries, keep_storage_gb=keep_storage_gb, tls=bool(tls_secret))
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "storage", **(storage or {"emptyDir": {}})},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": "/etc/buildkit", "readOnly": True},
        {"name": "storage", "mountPath": "/var/lib/buildkit"},
        {"name": "run", "mountPath": "/run/buildkit"},
    ]
    if tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": tls_secret, "defaultMode": 0o400}})
        mounts.append({"name": "tls", "mountPath": "/tls", "readOnly": True})
    container = {
        "name": "buildkitd",
        "image": image,
        "command": ["buildkitd", "--config", "/etc/buildkit/buildkitd.toml"],
        "ports": [{"name": "grpc", "containerPort": PORT}],
        "securityContext": {"privileged": True, "runAsUser": 0},
        "readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 2, "failureThreshold": 3},
        "livenessProbe": {
            "exec": {"command": ["buildctl", "--addr", "unix:///run/buildkit/buildkitd.sock", "debug", "workers"]},
            "periodSeconds": 60,
            "timeoutSeconds": 30,
            "initialDelaySeconds": 30,
        },
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": memory}},
        "volumeMounts": mounts,
    }
    service_spec: dict[str, Any] = {
        "selector": selector,
        "ports": [{"name": "grpc", "port": PORT, "targetPort": "grpc"}],
    }
    peers = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {LABEL_ROLE: ROLE_BUILDER}}}]
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta(),
            "data": {"buildkitd.toml": toml},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta(),
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},  # two daemons must not share one storage folder
                "selector": {"matchLabels": selector},
                "template": {
                    "metadata": {"labels": dict(labels)},
                    "spec": {
                        "automountServiceAccountToken": False,
                        "enableServiceLinks": False,
                        "containers": [container],
                        "volumes": volumes,
                    },
                },
            },
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": meta(), "spec": service_spec},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta(),
            "spec": {
                "podSelector": {"matchLabels": selector},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": peers, "ports": [{"port": PORT, "protocol": "TCP"}]}],
            },
        },
    ]
