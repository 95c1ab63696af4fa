"""A build by buildah in the Job's own pod: no daemon, no privileges, root of a user namespace only. Pure."""

from __future__ import annotations

from typing import Any

from .config import BuildConfig
from .context import FACTS_PATH, LABEL_FACTS, LABEL_PACKAGES, PACKAGES_PATH, SOURCE_DATE_EPOCH, USER
from .errors import BuildError
from .recipe import Recipe
from .reference import parse_reference

# Steps run in a user namespace that holds every id (files of the image belong to many), and in a network namespace with
# nothing in it: only pulling the base and pushing the result use the pod's network. `buildah unshare` of 1.28 cannot
# make one for the root of a pod, hence unshare and the two maps by hand; exec in the mapped namespace gives the rights.
# As with BuildKit, facts are read from the image before it is pushed with them as labels, which takes a second run: a
# label alone makes no new image of a finished one.
SCRIPT = r"""
set -u
mkdir -p /tmp/context
for f in /context/*; do cp -rL "$f" /tmp/context/; done
cd /tmp/context
isolated() {
  mkfifo /tmp/go || return 1
  unshare --user --keep-caps --mount --net -- sh -c 'read go </tmp/go; exec "$@"' isolated "$@" &
  while [ "$(readlink /proc/$!/ns/user)" = "$(readlink /proc/self/ns/user)" ]; do :; done  # "" once it has failed
  if ! { echo '0 0 4294967295' >/proc/$!/gid_map && echo '0 0 4294967295' >/proc/$!/uid_map; }; then
    echo "ddtree-build: error: $NO_NAMESPACE"
    kill $!
    rm /tmp/go
    return 1
  fi
  echo go >/tmp/go
  wait $!
  ended=$?
  rm /tmp/go
  return $ended
}
bud() {
  isolated buildah bud --pull-never --network=host --layers --timestamp="$EPOCH" "$@" /tmp/context
}
read_facts() {
  isolated sh -c 'c=$(buildah from --pull-never localhost/engine:latest) && m=$(buildah mount "$c") &&
    cp "$m$0" "$m$1" /tmp/' "$FACTS_PATH" "$PACKAGES_PATH"
}
# shellcheck disable=SC2086 -- flags are lists
{
  { buildah pull -q $PULL "$BASE" &&
    bud --build-context=wheelhouse=/wheels --target=engine --tag=localhost/engine:latest && read_facts &&
    printf 'FROM localhost/engine:latest\nUSER %s\n' "$USER_ID" >/tmp/labels &&
    bud --quiet --file=/tmp/labels --tag=localhost/labelled:latest "--label=$FACTS=$(cat /tmp/facts.json)" \
      "--label=$PACKAGES=$(cat /tmp/packages.json)" &&
    buildah push $PUSH --format=oci --compression-format=zstd --compression-level=1 --digestfile=/tmp/digest \
      localhost/labelled:latest "docker://$IMAGE"; } 2>&1
  echo $? >/tmp/status
} | grep --line-buffered -v -E 'subuid|subgid|ID ranges set aside' | tee /tmp/log
if [ "$(cat /tmp/status)" = 0 ]; then
  echo "digest: $(cat /tmp/digest)" >/dev/termination-log
  exit 0
fi
{ grep -E 'ddtree-(patches|build): error:' /tmp/log | head -n 2 | cut -c1-1000
  tail -c 2000 /tmp/log; } >/dev/termination-log
if grep -Eq "$PERMANENT" /tmp/log; then exit 10; fi
exit 11
"""

NO_NAMESPACE = (
    "this node lets a pod make no user namespace (seccomp or AppArmor, or user.max_user_namespaces is 0), which "
    "buildah needs; use builder: buildkit, or see docs/how-to/build.md"
)

# What it needs of its node's kernel: writing the maps of its own user namespace. No seccomp profile is named, because
# the runtime's default one forbids making a namespace. PodSecurity "baseline" lets this through, "restricted" does not.
SECURITY: dict[str, Any] = {
    "runAsUser": 0,
    "runAsGroup": 0,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"], "add": ["SETFCAP", "SETGID", "SETUID"]},
}

Object = dict[str, Any]


def container(recipe: Recipe, image: str, config: BuildConfig, *, credentials: Object | None) -> Object:
    """The builder's container, without name and mounts; ``image`` is the tagged reference that is pushed.

    ``credentials`` is the mount of the registry Secret. Raises BuildError.
    """
    if not config.buildah_image:
        raise BuildError(
            "spec.engine.build.builder is buildah, but the operator has no image of it; "
            "set the chart's build.buildahImage or use buildkit"
        )
    login = [f"--authfile={credentials['mountPath']}/config.json"] if credentials else []

    def flags(reference: str) -> str:
        insecure = config.is_insecure(parse_reference(reference).registry)
        return " ".join([*login, *(["--tls-verify=false"] if insecure else [])])

    env = {
        "BASE": recipe.base_image,
        "IMAGE": image,
        "PULL": flags(recipe.base_image),
        "PUSH": flags(image),
        "EPOCH": str(SOURCE_DATE_EPOCH),
        "FACTS": LABEL_FACTS,
        "PACKAGES": LABEL_PACKAGES,
        "FACTS_PATH": FACTS_PATH,
        "PACKAGES_PATH": PACKAGES_PATH,
        "USER_ID": USER,
        "NO_NAMESPACE": NO_NAMESPACE,
        "BUILDAH_ISOLATION": "chroot",
        "STORAGE_DRIVER": "overlay",
        "TMPDIR": "/tmp",
        "HOME": "/tmp",
    }
    return {
        "image": config.buildah_image,
        "command": ["/bin/bash", "-c", SCRIPT, "build"],
        "env": [{"name": k, "value": v} for k, v in env.items()],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "8Gi"}},
        "securityContext": SECURITY,
    }


def volumes() -> tuple[list[Object], list[Object]]:
    """Volumes and mounts for its store, gone with the pod: there is no cache from one build to the next."""
    places = {"store": "/var/lib/containers", "run": "/run", "scratch": "/var/tmp"}
    return (
        [{"name": name, "emptyDir": {}} for name in places],
        [{"name": name, "mountPath": path} for name, path in places.items()],
    )
