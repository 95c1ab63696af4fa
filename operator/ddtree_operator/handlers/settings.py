"""The operator's settings: one YAML file (the chart's ConfigMap), checked at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddtree_operator.build.config import BuildConfig
from ddtree_operator.rollout.manifests import EngineDefaults

DEFAULT_PATH = "/etc/ddtree/config.yaml"

# Keys of the file that go to the builder as they are.
_BUILD_TEXT = {
    "baseImage": "base_image",
    "pushRepository": "push_repository",
    "pushSecret": "push_secret",
    "wheelhouse": "wheelhouse",
    "cacheRepository": "cache_repository",
    "builderAddress": "builder_address",
    "builderService": "builder_service",
    "builderImage": "builder_image",
    "buildahImage": "buildah_image",
    "fetchImage": "fetch_image",
    "builderTlsSecret": "builder_tls_secret",
    "serviceAccount": "service_account",
    "artefacts": "artefacts",
    "device": "device",
    "python": "python",
}
_OTHER = {
    "insecureRegistries",
    "engineDefaults",
    "watchNamespaces",
    "resyncSeconds",
    "logLevel",
    "logFormat",
    "lease",
    "allPods",
    "alerts",
}


class SettingsError(ValueError):
    """The file is not usable; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """The receiver of Alertmanager's notifications."""

    token_file: str  # bearer tokens, one a line
    port: int = 9095
    tls_folder: str = ""  # with tls.crt and tls.key, and ca.crt when clients need a certificate; "" for plain http


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything an installation decides."""

    namespaces: tuple[str, ...] = ()
    build: BuildConfig = field(default_factory=BuildConfig)
    engine: EngineDefaults = field(default_factory=EngineDefaults)
    all_pods: bool = False  # whether the operator may list the pods of every namespace, to count GPUs
    resync: float = 30.0  # seconds after which a resource is looked at without any event
    alerts: AlertSettings | None = None  # None: no receiver
    lease: str = ""  # name of the Lease that the working replica holds; "" when there is only ever one
    log_format: str = "json"  # json | text


def parse(text: str, where: str = DEFAULT_PATH) -> Settings:
    """Settings from YAML. Raises SettingsError with one sentence."""
    try:
        raw = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SettingsError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise SettingsError(f"{where}: the top level must be a mapping of settings")
    unknown = sorted(set(raw) - set(_BUILD_TEXT) - _OTHER)
    if unknown:
        raise SettingsError(
            f"{where}: unknown setting {unknown[0]}; known are {', '.join(sorted({*_BUILD_TEXT, *_OTHER}))}"
        )
    build: dict[str, Any] = {}
    for key, name in _BUILD_TEXT.items():
        value = raw.get(key)
        if value in (None, ""):
            continue
        if not isinstance(value, str):
            raise SettingsError(f"{where}: {key} must be text, not {value!r}")
        build[name] = value.rstrip("/")
    if build.get("device", "cuda") not in {"cpu", "cuda"}:
        raise SettingsError(f"{where}: device must be cpu or cuda, not {build['device']!r}")
    service = build.get("builder_service")
    if service and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", service):
        raise SettingsError(f"{where}: builderService must be namespace/name of a Service, not {service!r}")
    if service and build.get("builder_address"):
        raise SettingsError(f"{where}: builderService and builderAddress are both given; keep one")
    build["insecure_registries"] = frozenset(_texts(raw, "insecureRegistries", where))
    engine = raw.get("engineDefaults") or {}
    if not isinstance(engine, dict) or set(engine) - {"args", "env", "podTemplate"}:
        raise SettingsError(f"{where}: engineDefaults takes args, env and podTemplate")
    env = engine.get("env") or {}
    if isinstance(env, list):
        env = {e["name"]: e.get("value", "") for e in env if isinstance(e, dict) and "name" in e}
    resync = raw.get("resyncSeconds", 30)
    if not isinstance(resync, int | float) or not 1 <= resync <= 3600:
        raise SettingsError(f"{where}: resyncSeconds must be a number from 1 to 3600, not {resync!r}")
    if not isinstance(raw.get("allPods", False), bool):
        raise SettingsError(f"{where}: allPods must be true or false, not {raw['allPods']!r}")
    log_format = raw.get("logFormat", "json")
    if log_format not in {"json", "text"}:
        raise SettingsError(f"{where}: logFormat must be json or text, not {log_format!r}")
    return Settings(
        namespaces=tuple(_texts(raw, "watchNamespaces", where)),
        build=BuildConfig(**build),
        engine=EngineDefaults(
            args=[str(a) for a in engine.get("args") or []],
            env={str(k): str(v) for k, v in env.items()},
            pod_template=engine.get("podTemplate") or {},
        ),
        all_pods=raw.get("allPods") is True,
        resync=float(resync),
        alerts=_alerts(raw.get("alerts"), where),
        lease=str(raw.get("lease") or ""),
        log_format=log_format,
    )


def _alerts(raw: Any, where: str) -> AlertSettings | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or set(raw) - {"tokenFile", "port", "tlsFolder"} or not raw.get("tokenFile"):
        raise SettingsError(f"{where}: alerts takes tokenFile, port and tlsFolder, and needs tokenFile")
    port = raw.get("port", 9095)
    if not isinstance(port, int) or not 1 <= port <= 65535:
        raise SettingsError(f"{where}: alerts.port must be a port from 1 to 65535, not {port!r}")
    return AlertSettings(str(raw["tokenFile"]), port, str(raw.get("tlsFolder") or ""))


def _texts(raw: dict[str, Any], key: str, where: str) -> list[str]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise SettingsError(f"{where}: {key} must be a list of texts, not {value!r}")
    return value


def load(path: str) -> Settings:
    """Settings from a file. Raises SettingsError."""
    try:
        return parse(Path(path).read_text(), path)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}); give --config or install with the chart"
        ) from None
