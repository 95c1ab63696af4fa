"""Configuration files of the components, as text; nothing here touches the machine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from .settings import NODE, PAUSE_IMAGE, REGISTRY, Machine, Settings


def kubeconfig(pki: Path, user: str, server: str, context: str) -> str:
    """A self-contained kubeconfig for one identity of certs.make (JSON is YAML)."""

    def embedded(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    return _json(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": context, "cluster": {"server": server, "certificate-authority-data": embedded("ca.crt")}}
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": embedded(f"{user}.crt"),
                        "client-key-data": embedded(f"{user}.key"),
                    },
                }
            ],
            "contexts": [{"name": context, "context": {"cluster": context, "user": user}}],
            "current-context": context,
        }
    )


def containerd(m: Machine, *, cri: bool) -> str:
    """containerd 1.6 and 1.7 (config version 2).

    Without `cri` it only serves `ctr`: what an earlier life left behind is removed before the CRI service sees it.
    Negative oom_score_adj is not allowed without CAP_SYS_RESOURCE, hence restrict_oom_score_adj; the host's
    AppArmor is none of the cluster's business.
    """
    return f"""version = 2
root = "{m.containerd_root}"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [{"" if cri else '"io.containerd.grpc.v1.cri"'}]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{m.live}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  max_concurrent_downloads = 4
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "runc"
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{m.live}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{m.live}/hosts"
"""


def hosts_toml() -> str:
    """Lets containerd speak plain http to the cluster's registry."""
    return f'server = "http://{REGISTRY}"\n[host."http://{REGISTRY}"]\n  capabilities = ["pull", "resolve"]\n'


def registry(s: Settings) -> str:
    """docker-registry: plain http, deletable, no cache (several clusters may share the storage)."""
    return _json(
        {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {
                "filesystem": {"rootdirectory": str(s.registry_root)},
                "delete": {"enabled": True},
                "maintenance": {"uploadpurging": {"enabled": False}},
            },
            "http": {"addr": REGISTRY},
        }
    )


def cni(m: Machine) -> str:
    """One bridge for all pods, whose address is the node's."""
    return _json(
        {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": m.name == NODE,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": m.cidr, "rangeStart": m.first_pod}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
    )


def kubelet(m: Machine, pki: Path, grace: int | None) -> str:
    """Kubelet that lets pods have nearly all of the machine and never throws images away.

    It renews its Lease each quarter of `grace` seconds (None: as Kubernetes has it, every 10 s).
    """
    return _json(
        ({"nodeLeaseDurationSeconds": grace} if grace else {})
        | {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": m.ip,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/{m.kubelet}.crt",
            "tlsPrivateKeyFile": f"{pki}/{m.kubelet}.key",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{m.cgroup}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "resolvConf": "/etc/resolv.conf",
            "clusterDomain": "cluster.local",
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "evictionHard": {"memory.available": "64Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "shutdownGracePeriod": "0s",
        }
    )


def proxy(m: Machine, kubeconfig_path: Path) -> str:
    """kube-proxy in iptables mode; connection tracking limits belong to the host and stay as they are."""
    return _json(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(kubeconfig_path)},
            "clusterCIDR": m.cidr,
            "hostnameOverride": m.name,
            "bindAddress": m.ip,
            "oomScoreAdj": 0,
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "iptables": {"minSyncPeriod": "100ms"},
        }
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
