"""The chart: what it renders, what it refuses, and how little it may do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ddtree-operator"
DIGEST = "sha256:" + "a" * 64
IMAGES = ["--set", f"image=r/op@{DIGEST},builder.image=r/bk@{DIGEST}"]


@pytest.fixture(scope="session")
def helm() -> str:
    given = os.environ.get("DDTREE_HELM")
    if given:
        return given
    tools = [ROOT / "dev/cluster/build-binaries", "tools"]
    return subprocess.run(tools, capture_output=True, text=True, check=True).stdout.strip() + "/helm"


def helm_template(helm: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm, "template", "ddtree-operator", str(CHART), "-n", "ops", *args], capture_output=True, text=True
    )


def render(helm: str, *args: str) -> list[dict[str, Any]]:
    done = helm_template(helm, *IMAGES, *args)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]


def one(objects: list[dict[str, Any]], kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
    found = [
        o
        for o in objects
        if (o["kind"], o["metadata"]["name"]) == (kind, name) and namespace in (None, o["metadata"].get("namespace"))
    ]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("builder.image=", "image is missing: set image to the operator's image by digest"),
        (f"image=r/op@{DIGEST}", "builder.image is missing"),
        ("image=r/op:latest", 'image is "r/op:latest": give an image by digest'),
        (f"image=r/op@{DIGEST},builder.enabled=false,build.baseImage=x", 'build.baseImage is "x"'),
        (f"image=r/op@{DIGEST},builder.enabled=false,imgae=x", "'imgae' not allowed"),
        (f"image=r/op@{DIGEST},builder.enabled=false,logLevel=loud", "at '/logLevel'"),
        (
            f"image=r/op@{DIGEST},builder.image=r/bk@{DIGEST},watchNamespaces={{ddtree-build}}",
            "give the privileged builder a namespace of its own",
        ),
        (f"image=r/op@{DIGEST},builder.image=r/bk@{DIGEST},builder.address=tcp://b:1", "a buildkitd elsewhere"),
    ],
)
def test_it_refuses_in_words(helm: str, values: str, words: str) -> None:
    done = helm_template(helm, "--set", values)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_configuration_is_what_the_operator_reads(helm: str) -> None:
    objects = render(
        helm,
        "--set",
        "watchNamespaces={a,b},build.insecureRegistries={10.0.0.1:5000},build.device=cpu,"
        "build.wheelhouse=http://w,engineDefaults.args={--x},engineDefaults.env.A=b",
    )
    config = yaml.safe_load(one(objects, "ConfigMap", "ddtree-operator")["data"]["config.yaml"])
    assert config == {
        "watchNamespaces": ["a", "b"],
        "allPods": False,
        "resyncSeconds": 30,
        "logFormat": "json",
        "lease": "ddtree-operator",
        "device": "cpu",
        "baseImage": "",
        "python": "cp311",
        "pushRepository": "",
        "pushSecret": "",
        "wheelhouse": "http://w",
        "cacheRepository": "",
        "serviceAccount": "ddtree-operator-builder",
        "insecureRegistries": ["10.0.0.1:5000"],
        "builderService": "ddtree-build/buildkitd",
        "builderImage": f"r/bk@{DIGEST}",
        "buildahImage": "",
        "fetchImage": f"r/op@{DIGEST}",
        "builderTlsSecret": "",
        "engineDefaults": {"env": {"A": "b"}, "args": ["--x"], "podTemplate": {}},
    }


def test_the_operator_accepts_the_configuration(helm: str) -> None:
    from ddtree_operator.handlers.settings import parse

    text = one(render(helm), "ConfigMap", "ddtree-operator")["data"]["config.yaml"]
    settings = parse(text)
    assert settings.namespaces == ("ops",)
    assert (settings.build.builder_service, settings.build.builder_address) == ("ddtree-build/buildkitd", "")


def test_a_changed_configuration_starts_a_new_pod(helm: str) -> None:
    def checksum(*args: str) -> str:
        template = one(render(helm, *args), "Deployment", "ddtree-operator")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum("--set", "resyncSeconds=60")


def test_the_operator_pod_is_restricted(helm: str) -> None:
    pod = one(render(helm), "Deployment", "ddtree-operator")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any("hostPath" in v for v in pod["volumes"])


def test_rights_are_namespaced_and_small(helm: str) -> None:
    objects = render(helm, "--set", "watchNamespaces={a,b},rbac.secrets={extra},build.pushSecret=regcred")
    account = {"kind": "ServiceAccount", "name": "ddtree-operator", "namespace": "ops"}
    for namespace in ("a", "b"):
        rules = one(objects, "Role", "ddtree-operator", namespace)["rules"]
        assert one(objects, "RoleBinding", "ddtree-operator", namespace)["subjects"] == [account]
        secrets = [r for r in rules if "secrets" in r["resources"]]
        assert [(r["resourceNames"], r["verbs"]) for r in secrets] == [(["extra", "regcred"], ["get"])]
        assert not any("*" in r["verbs"] + r["resources"] + r["apiGroups"] for r in rules)
    assert one(objects, "RoleBinding", "ddtree-operator-builder", "ddtree-build")["subjects"] == [account]
    assert one(objects, "Role", "ddtree-operator-builder", "ddtree-build")["rules"] == [
        {"apiGroups": [""], "resources": ["services"], "resourceNames": ["buildkitd"], "verbs": ["get"]}
    ]
    bound = {o["roleRef"]["name"] for o in objects if o["kind"] == "ClusterRoleBinding" and o["subjects"] == [account]}
    assert bound == {"ops-ddtree-operator-nodes"}
    assert one(objects, "ClusterRole", "ops-ddtree-operator-nodes")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}
    ]


def test_builder_jobs_have_an_account_without_rights_or_token(helm: str) -> None:
    objects = render(helm, "--set", "watchNamespaces={a,b},imagePullSecrets={pull}")
    for namespace in ("a", "b"):
        account = one(objects, "ServiceAccount", "ddtree-operator-builder", namespace)
        assert account["automountServiceAccountToken"] is False
        assert account["imagePullSecrets"] == [{"name": "pull"}]
    subjects = [s["name"] for o in objects if "Binding" in o["kind"] for s in o["subjects"]]
    assert "ddtree-operator-builder" not in subjects


def test_pods_of_all_namespaces_are_listed_only_when_asked_for(helm: str) -> None:
    name = "ops-ddtree-operator-nodes"
    assert "pods" not in str(one(render(helm), "ClusterRole", name)["rules"])
    asked = render(helm, "--set", "rbac.allPods=true")
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]} in one(asked, "ClusterRole", name)["rules"]
    assert yaml.safe_load(one(asked, "ConfigMap", "ddtree-operator")["data"]["config.yaml"])["allPods"] is True


def test_without_secrets_named_none_can_be_read(helm: str) -> None:
    assert "secrets" not in str(one(render(helm), "Role", "ddtree-operator")["rules"])


def test_the_builder_is_apart(helm: str) -> None:
    objects = render(helm, "--set", "build.insecureRegistries={10.0.0.1:5000}")
    space = one(objects, "Namespace", "ddtree-build")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    pod = one(objects, "Deployment", "buildkitd", "ddtree-build")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert (
        '[registry."10.0.0.1:5000"]\n  http = true' in one(objects, "ConfigMap", "buildkitd")["data"]["buildkitd.toml"]
    )
    privileged = [
        o["metadata"]["name"]
        for o in objects
        if o["kind"] == "Deployment"
        and any(c["securityContext"].get("privileged") for c in o["spec"]["template"]["spec"]["containers"])
    ]
    assert privileged == ["buildkitd"]


def test_the_builder_asks_for_certificates_when_it_has_its_own(helm: str) -> None:
    objects = render(helm, *IMAGES, "--set", "builder.serverTlsSecret=server,builder.tlsSecret=client")
    assert 'ca = "/tls/ca.crt"' in one(objects, "ConfigMap", "buildkitd")["data"]["buildkitd.toml"]
    pod = one(objects, "Deployment", "buildkitd")["spec"]["template"]["spec"]
    assert {"name": "tls", "secret": {"secretName": "server", "defaultMode": 0o400}} in pod["volumes"]
    assert "[grpc.tls]" not in one(render(helm, *IMAGES), "ConfigMap", "buildkitd")["data"]["buildkitd.toml"]


def test_the_builder_can_be_elsewhere(helm: str) -> None:
    objects = render(helm, "--set", "builder.enabled=false,builder.address=tcp://b.example:1234")
    assert not any(o["metadata"].get("namespace") == "ddtree-build" for o in objects)
    config = yaml.safe_load(one(objects, "ConfigMap", "ddtree-operator")["data"]["config.yaml"])
    assert config["builderAddress"] == "tcp://b.example:1234"
    assert "builderService" not in config


def test_monitoring_is_off_unless_asked_for(helm: str) -> None:
    assert not {"ServiceMonitor", "PrometheusRule"} & {o["kind"] for o in render(helm)}
    asked = render(helm, "--set", "metrics.serviceMonitor=true,metrics.prometheusRule=true,metrics.labels.release=p")
    assert one(asked, "ServiceMonitor", "ddtree-operator")["metadata"]["labels"]["release"] == "p"
    assert one(asked, "PrometheusRule", "ddtree-operator")


def test_chart_and_package_have_one_version() -> None:
    from ddtree_operator import __version__

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_alert_receiver_is_there_when_it_has_a_token(helm: str) -> None:
    from ddtree_operator.handlers.settings import AlertSettings, parse

    plain = render(helm)
    assert "NetworkPolicy" not in {o["kind"] for o in plain if o["metadata"].get("namespace") == "ops"}
    assert parse(one(plain, "ConfigMap", "ddtree-operator")["data"]["config.yaml"]).alerts is None
    objects = render(helm, "--set", "alerts.tokenSecret=token,alerts.tlsSecret=tls")
    settings = parse(one(objects, "ConfigMap", "ddtree-operator")["data"]["config.yaml"])
    assert settings.alerts == AlertSettings("/etc/ddtree-alerts/token", 9095, "/etc/ddtree-alerts-tls")
    assert settings.lease == "ddtree-operator"
    pod = one(objects, "Deployment", "ddtree-operator")["spec"]["template"]["spec"]
    [mounts] = [c["volumeMounts"] for c in pod["containers"]]
    assert {m["mountPath"] for m in mounts} >= {"/etc/ddtree-alerts", "/etc/ddtree-alerts-tls"}
    [secret] = [v["secret"] for v in pod["volumes"] if v["name"] == "alerts"]
    assert (secret["secretName"], secret["optional"]) == ("token", True)
    assert one(objects, "Service", "ddtree-operator-alerts")["spec"]["ports"][0]["targetPort"] == "alerts"
    policy = one(objects, "NetworkPolicy", "ddtree-operator", "ops")["spec"]
    opened = {r["ports"][0]["port"]: r.get("from") for r in policy["ingress"]}
    assert opened["http"] is None
    assert opened["alerts"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "alertmanager"}


def test_the_rules_come_from_one_file(helm: str) -> None:
    objects = render(helm, "--set", "metrics.prometheusRule=true,metrics.podMonitor=true")
    rules = yaml.safe_load((CHART / "files/ddtree-rules.yaml").read_text())
    assert one(objects, "PrometheusRule", "ddtree-operator")["spec"] == rules
    monitor = one(objects, "PodMonitor", "ddtree-operator-engines")["spec"]
    labels = {r["targetLabel"] for r in monitor["podMetricsEndpoints"][0]["relabelings"]}
    assert labels == {"ddtreedeployment", "revision", "pool"}
