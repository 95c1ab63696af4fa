"""Objects of one build: a ConfigMap with the context and a Job that hands it to BuildKit, or to buildah. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from ddtree_operator.api.names import LABEL_MANAGED_BY, LABEL_RECIPE, LABEL_ROLE

from . import buildah
from .config import BuildConfig
from .context import LABEL_FACTS, LABEL_PACKAGES, SOURCE_DATE_EPOCH, WHEELHOUSE, context_files
from .errors import BuildError
from .failure import PERMANENT
from .fetching import FOLDER, fetch_step
from .recipe import Recipe
from .reference import parse_reference

ROLE_BUILDER = "builder"
CONTAINER = "build"
EXIT_PERMANENT = 10  # trying again is pointless; the Job fails at once
EXIT_TRANSIENT = 11
RETRIES = 2

# Reads the context, builds, pushes, and leaves the digest (or the end of the log) where Kubernetes keeps it: the
# operator needs neither registry credentials nor the pod's log. Files of a ConfigMap are links: copied first.
# First the image is made and its facts are read, then it is pushed with them as a label: the second call finds all in
# the builder's cache.
# BuildKit hashes whatever a server answers, an error page too, and calls that a digest mismatch; so the address in
# question is fetched once more without a checksum, which shows the server's status.
_SCRIPT = r"""
set -u
mkdir -p /tmp/context /tmp/again
for f in /context/*; do cp -rL "$f" /tmp/context/; done
{
  buildctl $BUILDER "$@" $CACHE --opt=target=facts --output=type=local,dest=/tmp/facts 2>&1 &&
    buildctl $BUILDER "$@" $KEEP_CACHE --opt=target=engine "--opt=label:$FACTS=$(cat /tmp/facts/facts.json)" \
      "--opt=label:$PACKAGES=$(cat /tmp/facts/packages.json)" --output="$OUTPUT" --metadata-file=/tmp/metadata.json 2>&1
  echo $? >/tmp/status
} | tee /tmp/log
if [ "$(cat /tmp/status)" = 0 ]; then
  digest=$(grep -o '"containerimage.digest": *"sha256:[0-9a-f]*"' /tmp/metadata.json | grep -o 'sha256:[0-9a-f]*')
  echo "digest: $digest" >/dev/termination-log
  exit 0
fi
if grep -q 'digest mismatch' /tmp/log; then
  url=$(sed -n 's/^ > .* ADD --checksum=[^ ]* \[\(.*\), \/wheels\/[^,]*\]:$/\1/p' /tmp/log | head -n 1)
  printf 'FROM scratch\nADD ["%s", "/wheel"]\n' "$url" >/tmp/again/Dockerfile
  if ! buildctl $BUILDER build --progress=plain --frontend=dockerfile.v0 --local=context=/tmp/again \
    --local=dockerfile=/tmp/again >/tmp/again.log 2>&1 && grep -q 'invalid response status' /tmp/again.log; then
    sed 's/digest mismatch/unusable answer/' /tmp/log >/tmp/log.new
    grep '^error:' /tmp/again.log | tail -n 1 | tee -a /tmp/log.new
    mv /tmp/log.new /tmp/log
  fi
fi
{ grep -E 'ddtree-(patches|build): error:' /tmp/log | head -n 2 | cut -c1-1000
  tail -c 2000 /tmp/log; } >/dev/termination-log
if grep -Eq "$PERMANENT" /tmp/log; then exit 10; fi
exit 11
"""


def build_name(recipe: Recipe, repository: str) -> str:
    """Name of the Job: the same for equal recipes that go to the same repository."""
    return f"ddtree-build-{hashlib.sha256(f'{recipe.digest} {repository}'.encode()).hexdigest()[:12]}"


def image_reference(recipe: Recipe, repository: str) -> str:
    """Tag that the built image is pushed under and looked up by."""
    return f"{repository}:{recipe.tag}"


def build_objects(
    recipe: Recipe,
    *,
    name: str,
    namespace: str,
    owner: Mapping[str, Any] | None,
    config: BuildConfig,
    plugins: Mapping[str, bytes],
    repository: str,
    secret: str = "",
    timeout: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """ConfigMap and Job that build ``recipe`` and push it to ``repository``.

    ``owner`` is an ownerReference or None; ``plugins`` maps wheel file names to contents; ``secret`` names a Secret of
    type dockerconfigjson in ``namespace``; ``timeout`` is seconds. Raises BuildError with one sentence.
    """
    if recipe.builder == "buildkit" and not (config.builder_image and config.builder_address):
        raise BuildError("a build needs the address of a builder and the image of its Jobs")
    files = context_files(recipe, plugins)
    keys = {f"f{i}": path for i, path in enumerate(sorted(files))}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {
            **(labels or {}),
            LABEL_ROLE: ROLE_BUILDER,
            LABEL_RECIPE: recipe.short,
            LABEL_MANAGED_BY: "ddtree-operator",
        },
    }
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    data = {key: base64.b64encode(files[path]).decode() for key, path in keys.items()}
    # Named by content: one recipe may need another context, with another wheelhouse say, while pods of an earlier Job
    # are there, and a kubelet never reads an immutable ConfigMap anew as long as one of its pods names it.
    context = f"{name}-{hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:8]}"
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": context},
        "immutable": True,
        "binaryData": data,
    }
    spec = _job_spec(recipe, config, keys, held=context, repository=repository, secret=secret, timeout=timeout)
    spec["template"]["metadata"] = {"labels": metadata["labels"]}
    return [config_map, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def _job_spec(
    recipe: Recipe,
    config: BuildConfig,
    keys: Mapping[str, str],
    *,
    held: str,
    repository: str,
    secret: str,
    timeout: int | None,
) -> dict[str, Any]:
    context: dict[str, Any] = {"name": "context", "mountPath": "/context", "readOnly": True}
    volumes: list[dict[str, Any]] = [
        {"name": "context", "configMap": {"name": held, "items": [{"key": k, "path": p} for k, p in keys.items()]}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"} if recipe.builder == "buildkit" else {}},
    ]
    mounts: list[dict[str, Any]] = [context, {"name": "tmp", "mountPath": "/tmp"}]
    credentials: dict[str, Any] | None = None
    if secret:
        item = {"key": ".dockerconfigjson", "path": "config.json"}
        volumes.append({"name": "registry", "secret": {"secretName": secret, "items": [item], "defaultMode": 0o440}})
        credentials = {"name": "registry", "mountPath": "/registry", "readOnly": True}
        mounts.append(credentials)
    fetch, more_volumes, more_mounts = fetch_step(recipe, config, context, credentials)
    volumes, mounts = volumes + more_volumes, mounts + more_mounts
    if recipe.builder == "buildah":
        container = buildah.container(recipe, image_reference(recipe, repository), config, credentials=credentials)
        more_volumes, more_mounts = buildah.volumes()
        volumes, mounts = volumes + more_volumes, mounts + more_mounts
    else:
        container = _buildkit(recipe, config, repository, bool(secret), bool(fetch))
        if config.builder_tls_secret:
            volumes.append({"name": "tls", "secret": {"secretName": config.builder_tls_secret, "defaultMode": 0o440}})
            mounts.append({"name": "tls", "mountPath": "/tls", "readOnly": True})
    container["env"].append({"name": "PERMANENT", "value": "|".join(PERMANENT)})
    container |= {"name": CONTAINER, "volumeMounts": mounts, "terminationMessagePolicy": "FallbackToLogsOnError"}
    restricted = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,  # the shell does not pass signals on; nothing is lost by ending it
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {**(restricted if recipe.builder == "buildkit" else {}), "fsGroup": 65532},
        **({"initContainers": fetch} if fetch else {}),
        "containers": [container],
        "volumes": volumes,
    }
    if config.service_account:
        pod["serviceAccountName"] = config.service_account
    return {
        "backoffLimit": RETRIES,
        "activeDeadlineSeconds": timeout or config.timeout,
        "ttlSecondsAfterFinished": 3600,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_PERMANENT]}}]
        },
        "template": {"spec": pod},
    }


def _buildkit(recipe: Recipe, config: BuildConfig, repository: str, secret: bool, fetched: bool) -> dict[str, Any]:
    """The container that hands the context to buildkitd, without name and mounts."""
    env = [
        {"name": "BUILDER", "value": " ".join(builder_flags(config))},
        {"name": "CACHE", "value": "--no-cache" if config.no_cache else _cache("--import-cache", config)},
        {"name": "KEEP_CACHE", "value": _cache("--export-cache", config, "mode=max", "ignore-error=true")},
        {"name": "OUTPUT", "value": output(recipe, repository, config)},
        {"name": "FACTS", "value": LABEL_FACTS},
        {"name": "PACKAGES", "value": LABEL_PACKAGES},
        {"name": "HOME", "value": "/tmp"},
        *([{"name": "DOCKER_CONFIG", "value": "/registry"}] if secret else []),
    ]
    local = [f"--opt=context:{WHEELHOUSE}=local:{WHEELHOUSE}", f"--local={WHEELHOUSE}={FOLDER}"] if fetched else []
    return {
        "image": config.builder_image,
        "command": ["/bin/sh", "-c", _SCRIPT, "build"],
        "args": [*buildctl_args(recipe), *local],
        "env": env,
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def builder_flags(config: BuildConfig) -> list[str]:
    """Flags of buildctl that say where the builder is."""
    flags = ["--addr", config.builder_address]
    if config.builder_tls_secret:
        flags += ["--tlscacert", "/tls/ca.crt", "--tlscert", "/tls/tls.crt", "--tlskey", "/tls/tls.key"]
        if config.builder_server_name:
            flags += ["--tlsservername", config.builder_server_name]
    return flags


def _cache(flag: str, config: BuildConfig, *more: str) -> str:
    """Flag that reads or writes the cache in a registry; "" without one. Steps are few, so one tag holds them all."""
    if not config.cache_repository:
        return ""
    settings = ["type=registry", f"ref={config.cache_repository}:cache", *more]
    if config.is_insecure(parse_reference(config.cache_repository).registry):
        settings.append("registry.insecure=true")
    if flag == "--export-cache":
        settings += ["image-manifest=true", "oci-mediatypes=true", "compression=zstd", "compression-level=1"]
    return f"{flag}={','.join(settings)}"


def buildctl_args(recipe: Recipe) -> list[str]:
    """Arguments of ``buildctl``: what to build, without target and output."""
    return [
        "build",
        "--progress=plain",
        "--frontend=dockerfile.v0",
        "--local=context=/tmp/context",
        "--local=dockerfile=/tmp/context",
        f"--opt=platform={recipe.platform}",
        f"--opt=build-arg:SOURCE_DATE_EPOCH={SOURCE_DATE_EPOCH}",
    ]


def output(recipe: Recipe, repository: str, config: BuildConfig) -> str:
    """Value of ``--output``: push under the recipe's tag, the same bytes each time."""
    settings = {
        "type": "image",
        "name": image_reference(recipe, repository),
        "push": "true",
        "oci-mediatypes": "true",
        "compression": "zstd",  # level 1: packs four times faster than gzip at the same size
        "compression-level": "1",
        "rewrite-timestamp": "true",
    }
    if config.is_insecure(parse_reference(repository).registry):
        settings["registry.insecure"] = "true"
    return ",".join(f"{key}={value}" for key, value in settings.items())
