"""The step of a build Job that fetches wheels from where the builder cannot: volumes, ConfigMaps, artefacts. Pure."""

from __future__ import annotations

import json
from typing import Any

from .config import BuildConfig
from .errors import BuildError
from .recipe import Recipe
from .reference import parse_reference
from .wheels import WheelRef

CONTAINER = "fetch"
FOLDER = "/wheels"
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
}

Object = dict[str, Any]


def wheels_to_fetch(recipe: Recipe) -> list[WheelRef]:
    """What the Job fetches itself: all for buildah, which checks no sum; else what BuildKit has no way to."""
    return [
        w for w in (recipe.sglang, *recipe.kernels) if recipe.builder == "buildah" or w.scheme not in ("http", "https")
    ]


def fetch_step(
    recipe: Recipe, config: BuildConfig, context: Object, credentials: Object | None
) -> tuple[list[Object], list[Object], list[Object]]:
    """Init containers, volumes, and mounts of the builder's container; three times [] when there is nothing to fetch.

    ``context`` is the mount of the build context, ``credentials`` that of the registry Secret. Raises BuildError.
    """
    wheels = wheels_to_fetch(recipe)
    if not wheels:
        return [], [], []
    if not config.fetch_image:
        raise BuildError("the operator has no image to fetch wheels with; set the chart's image")
    volumes: list[Object] = [{"name": "wheels", "emptyDir": {}}]
    mounts: list[Object] = []
    entries: list[dict[str, str]] = []
    mounted: dict[tuple[str, str], str] = {}
    for wheel in wheels:
        source = wheel.url
        if wheel.scheme in ("pvc", "configmap"):
            key = (wheel.scheme, wheel.place)
            if key not in mounted:
                mounted[key] = f"/wheelhouse/{len(mounted)}"
                name = f"wheelhouse-{len(mounted) - 1}"
                volumes.append({"name": name, **_volume(*key)})
                mounts.append({"name": name, "mountPath": mounted[key], "readOnly": True})
            source = f"{mounted[key]}/{wheel.member}"
        elif wheel.scheme == "oci":
            source = f"oci://{wheel.place}"
        entries.append({"name": wheel.filename, "sha256": wheel.sha256, "from": source})
    registries = {parse_reference(w.place).registry for w in wheels if w.scheme == "oci"}
    env = [
        {"name": "WHEELS", "value": json.dumps(entries)},
        {"name": "MESSAGE", "value": "/dev/termination-log"},
        {"name": "INSECURE", "value": " ".join(sorted(r for r in registries if config.is_insecure(r)))},
    ]
    out = {"name": "wheels", "mountPath": FOLDER}
    mounts += [context, out]
    if registries and credentials:
        mounts.append(credentials)
        env.append({"name": "DOCKER_CONFIG", "value": credentials["mountPath"]})
    container = {
        "name": CONTAINER,
        "image": config.fetch_image,
        "command": ["python3", "-B", "/context/fetch.py", FOLDER],
        "env": env,
        "volumeMounts": mounts,
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}},
        "securityContext": RESTRICTED,
    }
    return [container], volumes, [{**out, "readOnly": True}]


def _volume(scheme: str, name: str) -> Object:
    if scheme == "pvc":
        return {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
    return {"configMap": {"name": name}}
