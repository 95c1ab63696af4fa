"""What the build tests need of a cluster: buildkitd in a pod, wheels on its file server, and a way to run one build."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree_operator.api.spec import BuildSpec
from ddtree_operator.build import (
    BuildConfig,
    BuildResult,
    Recipe,
    build_name,
    build_objects,
    builder_objects,
    job_result,
    push_repository,
    recipe_from_spec,
)
from ddtree_operator.handlers.builds import service_address
from simengine.wheel import build as simengine_wheel

REPO = Path(__file__).resolve().parents[2]
REGISTRY = "10.88.0.1:5000"
WHEELHOUSE = "http://10.88.0.1:8081"
BUILDER_NAMESPACE = "ddtree-build-test"
NAMESPACE = "build-test"
NOWHERE = "10.88.0.1:5999"  # nothing listens there
READONLY, GUARDED, FULL = (f"10.88.0.1:{port}" for port in (5991, 5992, 5993))  # registries of single tests


def wheel(name: str, files: Mapping[str, str | bytes], version: str = "0.1.0") -> tuple[str, bytes]:
    """File name and bytes of a small wheel, the same each time."""
    info = f"{name}-{version}.dist-info"
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, text in members.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    return f"{name}-{version}-py3-none-any.whl", out.getvalue()


def plugin_wheels() -> dict[str, bytes]:
    """Stand-ins for the engine's plugin wheels (no torch needed); the tool that applies patches is the real one."""
    source = REPO / "patches/sglang_ddtree/src/sglang_ddtree"
    tool = {f"sglang_ddtree/{n}": (source / n).read_text() for n in ("__init__.py", "patches.py", "series.py")}
    return dict([wheel("sglang_ddtree", tool), wheel("sglang_cpu", {"sglang_cpu/__init__.py": ""})])


@dataclass(frozen=True)
class BuildCluster:
    """A running cluster with a builder in it."""

    env: Mapping[str, str]
    config: BuildConfig
    plugins: Mapping[str, bytes]
    sglang: Mapping[str, str]  # url and sha256 of the simulated engine's wheel
    namespace: str = NAMESPACE  # of the Jobs

    @property
    def registry_local(self) -> str:
        """The registry as this process reaches it."""
        return self.env["DDTREE_REGISTRY_LOCAL"]

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Output of kubectl; raises with its error."""
        done = subprocess.run(
            [self.env["DDTREE_KUBECTL"], *args],
            input=stdin,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"kubectl {shlex.join(args)}: {done.stderr}")
        return done.stdout

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Server-side apply."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=listed)

    def get(self, *args: str) -> dict[str, Any]:
        """One object, or a list, as JSON."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *args, "-o", "json"))
        return found

    def address(self, builder: str) -> str:
        """Address of a builder's Service."""
        return service_address(self.get("service", builder, "-n", BUILDER_NAMESPACE))

    def recipe(self, series: Mapping[str, bytes], config: BuildConfig | None = None, **spec: Any) -> Recipe:
        """Recipe of the simulated engine with a series."""
        return recipe_from_spec(self.spec(**spec), config or self.config, series, self.plugins)

    def spec(self, **spec: Any) -> BuildSpec:
        """Build section with the simulated engine's wheel."""
        return BuildSpec.model_validate({"sglangWheel": self.sglang, **spec})

    def offer(self, name: str, files: Mapping[str, str], version: str = "0.1.0") -> dict[str, str]:
        """Put a wheel into the wheelhouse; its entry for kernelWheels."""
        filename, content = wheel(name, files, version)
        (cache() / "wheelhouse/build-test" / filename).write_bytes(content)
        return {"url": filename, "sha256": hashlib.sha256(content).hexdigest()}

    def build(self, series: Mapping[str, bytes], **options: Any) -> BuildResult:
        """Run one build to its end and read its result as the operator would. Options: see ``start``."""
        return self.wait_for(self.start(series, **options))

    @contextmanager
    def registry(self, address: str, folder: Path, extra: dict[str, Any], *, size: str = "") -> Iterator[None]:
        """A docker-registry of our own inside the cluster, at ``address``; with ``size``, on a disk that small."""
        storage: dict[str, Any] = {"filesystem": {"rootdirectory": str(folder)}, **extra.pop("storage", {})}
        config = {"version": "0.1", "storage": storage, "http": {"addr": address}, **extra}
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(config))
        folder.mkdir(exist_ok=True)
        serve = f"exec docker-registry serve {shlex.quote(str(file))}"
        if size:
            serve = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))} && {serve}"
        command = [REPO / "dev/cluster/cluster", "run", "unshare", "--mount", "sh", "-c", serve]
        log = folder.with_suffix(".log").open("wb")
        process = subprocess.Popen(
            command, env={**os.environ, **self.env}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            until(lambda: b"listening on" in folder.with_suffix(".log").read_bytes(), 60, f"registry {address} listens")
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # what runs inside the namespaces too
            process.wait(30)
            log.close()

    def start(
        self,
        series: Mapping[str, bytes],
        *,
        no_cache: bool = False,
        retries: bool = False,
        secret: str = "",
        **spec: Any,
    ) -> str:
        """Start one build, anew if need be; returns the name of its Job.

        ``no_cache`` ignores the builder's cache; without ``retries`` the first failed attempt is the last;
        ``secret`` holds credentials; the rest is the resource's build section.
        """
        config = replace(self.config, no_cache=no_cache)
        recipe = self.recipe(series, config, **spec)
        repository = push_repository(self.spec(**spec), config)
        name = build_name(recipe, repository)
        self.kubectl("delete", "job", name, "-n", self.namespace, "--ignore-not-found", "--wait")
        objects = build_objects(
            recipe,
            name=name,
            namespace=self.namespace,
            owner=None,
            config=config,
            plugins=self.plugins,
            repository=repository,
            secret=secret,
            timeout=900,
        )
        if not retries:
            objects[1]["spec"]["backoffLimit"] = 0
        self.apply(objects)
        return name

    def pods_of(self, name: str) -> list[dict[str, Any]]:
        """Pods of a Job."""
        found: list[dict[str, Any]] = self.get("pods", "-l", f"job-name={name}", "-n", self.namespace)["items"]
        return found

    def wait_for(self, name: str, seconds: float = 900) -> BuildResult:
        """Result of a Job once it has ended."""

        def ended() -> BuildResult | None:
            job = self.get("job", name, "-n", self.namespace)
            result = job_result(job, self.pods_of(name))
            return None if result.state == "running" else result

        return until(ended, seconds, f"Job {name} ends")


def until(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """First true answer of ``look``; looks again every half second."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.5)


def images(env: Mapping[str, str], *names: str) -> dict[str, str]:
    """References of images, built if they are missing."""
    printed = subprocess.run(
        [REPO / "dev/images", *names], env={**os.environ, **env}, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return dict(re.findall(r"^(\S+) (\S+@sha256:[0-9a-f]{64})$", printed, re.M))


def start(name: str) -> BuildCluster:
    """Bring the cluster ``name`` up (or take the running one) and put a builder into it."""
    base_env = {**os.environ, "DDTREE_CLUSTER": name}
    cluster = str(REPO / "dev/cluster/cluster")
    subprocess.run([cluster, "up"], env=base_env, check=True, stdout=subprocess.DEVNULL)
    exports = subprocess.run([cluster, "env"], env=base_env, check=True, capture_output=True, text=True).stdout
    env = {"DDTREE_CLUSTER": name}
    for line in exports.splitlines():
        key, _, value = line.removeprefix("export ").partition("=")
        env[key] = shlex.split(value)[0] if value else ""
    made_of = images(env, "base-python", "buildkit")
    path, _ = simengine_wheel(cache() / "wheelhouse" / "build-test")
    config = BuildConfig(
        base_image=made_of["base-python"],
        push_repository=f"{REGISTRY}/ddtree/build-test",
        wheelhouse=f"{WHEELHOUSE}/build-test",
        insecure_registries=frozenset({REGISTRY, NOWHERE, READONLY, GUARDED, FULL}),
        builder_image=made_of["buildkit"],
        fetch_image=made_of["base-python"],
        device="cpu",
    )
    sglang = {"url": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    made = BuildCluster(env, config, plugin_wheels(), sglang)
    for namespace in (NAMESPACE, BUILDER_NAMESPACE):  # of an earlier run, still on their way out
        made.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait", "--timeout=120s")
    made.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
            },
            *builder_objects(
                image=made_of["buildkit"],
                namespace=BUILDER_NAMESPACE,
                insecure_registries=config.insecure_registries,
                keep_storage_gb=2,
            ),
        ]
    )
    made.kubectl("rollout", "status", "deployment/buildkitd", "-n", BUILDER_NAMESPACE, "--timeout=180s")
    return replace(made, config=replace(config, builder_address=made.address("buildkitd")))


@contextmanager
def cluster_with_builder() -> Iterator[BuildCluster]:
    """The cluster $DDTREE_CLUSTER (it), with a builder for as long as this lasts."""
    made = start(os.environ.get("DDTREE_CLUSTER", "it"))
    try:
        yield made
    finally:
        made.kubectl("delete", "namespace", NAMESPACE, BUILDER_NAMESPACE, "--wait=false")


def cache() -> Path:
    """The cache folder of the project."""
    return Path(os.environ.get("DDTREE_CACHE") or Path.home() / ".cache/ddtree")
