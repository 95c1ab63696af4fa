"""What has to be there before the first rollout: models, images, operator, client."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import alarm, given, resources
from demo.cluster import ROOT, Cluster, DemoError
from demo.resources import NAME, NAMESPACE, SYSTEM
from demo.show import say
from demo.watch import Case, follow

IMAGES = ("base-python", "engine-cpu-base", "buildkit", "operator")
TOKENS = {"tiny": 4096, "smollm2": 4096}  # KV slots of an engine
PROMPT_SET = {"tiny": "tiny", "smollm2": "smollm2"}


def _step(*command: str, cluster: Cluster | None = None) -> str:
    """Run one of the project's own tools: its progress goes to the user, its output comes back."""
    env = cluster.env if cluster else None
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"{' '.join(command)} failed; the lines above say why")
    return done.stdout


@contextmanager
def preparing_models(model: str) -> Iterator[Callable[[], str]]:
    """Make the models beside what else is done: fetching waits for the network where compiling waits for the cores.

    Gives a function that waits for them and returns the folder with target, drafter and drafter-misfit.
    """
    with subprocess.Popen(["models/prepare", model], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:

        def folder() -> str:
            out = process.communicate()[0]
            if process.returncode != 0:
                raise DemoError(f"models/prepare {model} failed; the lines above say why")
            return out.strip().splitlines()[-1]

        try:
            yield folder
        finally:
            process.terminate()


def prepare_images(cluster: Cluster) -> dict[str, str]:
    """Images by name, each by digest."""
    _step("dev/wheelhouse")
    out = _step("dev/images", *IMAGES, cluster=cluster)
    found = dict(line.split(None, 1) for line in out.splitlines() if "@sha256:" in line)
    missing = [name for name in IMAGES if name not in found]
    if missing:
        raise DemoError(f"dev/images did not name {', '.join(missing)}")
    return {name: ref.strip() for name, ref in found.items()}


def prompt_text(model: str) -> str:
    """The prompt set of this model, as prompts.jsonl."""
    folder = ROOT / "operator" / "ddtree_operator" / "data" / "prompts"
    return (folder / f"{PROMPT_SET[model]}.jsonl").read_text()


def install(cluster: Cluster, images: dict[str, str], folder: str, model: str) -> None:
    """Namespaces, models, prompts, patch series, the chart."""
    leaving = cluster.get("namespace", NAMESPACE)
    if leaving and leaving["metadata"].get("deletionTimestamp"):
        cluster.run("wait", f"namespace/{NAMESPACE}", "--for=delete", "--timeout=180s", timeout=200)
    cluster.apply(*resources.namespaces())
    provide_models(cluster, folder, images["operator"])
    cluster.apply(resources.prompts(prompt_text(model)))
    for fault in sorted((ROOT / "dev" / "demo").glob("series-*")):
        cluster.apply(resources.series(fault.name, fault))
    values = ROOT / "build" / "demo-values.json"
    values.parent.mkdir(exist_ok=True)
    values.write_text(json.dumps(chart_values(cluster, images, model), indent=1))
    cluster.helm_run(
        "upgrade", "--install", "ddtree", str(ROOT / "charts" / "ddtree-operator"), "-n", SYSTEM,
        "--create-namespace", "-f", str(values), "--wait", "--timeout", "4m", timeout=300,
    )  # fmt: skip
    # helm installs CRDs once and never again: bring them up to date by hand.
    cluster.run("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "charts" / "ddtree-operator" / "crds"))


def provide_models(cluster: Cluster, folder: str, image: str) -> None:
    """A claim named models with the pair in it: the node's own folder on the dev cluster, a copy elsewhere."""
    claim = cluster.get("pvc", "models", "-n", NAMESPACE)
    key = Path(folder).name
    if claim and claim["metadata"].get("annotations", {}).get(resources.ANNOTATION_PAIR) != key:
        say("another model pair was used before: its volume and resource are replaced")
        forget(cluster)
        claim = None
    if claim:
        return
    if cluster.ours:
        cluster.apply(*resources.models_on_node(folder, key))
        return
    given.copy_models(cluster, folder, key, image)


def chart_values(cluster: Cluster, images: dict[str, str], model: str) -> dict[str, Any]:
    """Values for the chart."""
    return {
        "image": images["operator"],
        "watchNamespaces": [NAMESPACE],
        "build": {
            "device": "cpu",
            "baseImage": images["engine-cpu-base"],
            "pushRepository": f"{cluster.registry}/ddtree/engine",
            "wheelhouse": cluster.wheelhouse or given.serve_wheels(cluster, images["operator"]),
            "insecureRegistries": [cluster.registry],
            "builderImage": images["buildkit"],
        },
        "builder": {"image": images["buildkit"]},
        "alerts": {"tokenSecret": alarm.provide_token(cluster)},
        "engineDefaults": resources.engine_defaults(TOKENS[model]),
    }


def forget(cluster: Cluster) -> None:
    """Remove what an earlier demo left in the namespace."""
    cluster.run("delete", "ddt", "--all", "-n", NAMESPACE, "--ignore-not-found", "--wait=true", timeout=120)
    pods = ("pod", "client", "models")
    cluster.run("delete", *pods, "-n", NAMESPACE, "--ignore-not-found", "--wait=true", timeout=120)
    cluster.run("delete", "pvc", "models", "-n", NAMESPACE, "--ignore-not-found", "--wait=true", timeout=180)
    cluster.run("delete", "pv", "demo-models", "--ignore-not-found", "--wait=true", timeout=120)


def start_client(cluster: Cluster, image: str, model: str) -> None:
    """Start the client against the Service that the first rollout has just been given."""
    service = cluster.get("service", NAME, "-n", NAMESPACE)
    if service is None:
        raise DemoError(f"there is no Service {NAME}; the first rollout should have made it")
    target = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
    lines = [json.loads(line) for line in prompt_text(model).splitlines() if line.strip()][:20]
    cluster.run("delete", "pod", "client", "-n", NAMESPACE, "--ignore-not-found", "--wait=true", timeout=120)
    cluster.apply(*resources.client(image, [str(line["text"]) for line in lines], target))
    cluster.run("wait", "pod/client", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=120s", timeout=150)
    say("a client sends a request every second from now on, without retries")


def stop_client(cluster: Cluster) -> tuple[int, int, list[str]]:
    """Requests, failures, and the first failures in words."""
    try:
        log = cluster.run("logs", "client", "-n", NAMESPACE)
    except DemoError:
        return 0, 0, ["the client's log could not be read"]
    requests = failed = 0
    errors = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            errors.append(line[:300])
            continue
        if "requests" in entry:
            requests, failed = int(entry["requests"]), int(entry["failed"])
        else:
            errors.append(f"{time.strftime('%H:%M:%S', time.gmtime(entry['at']))} {entry['error'][:200]}")
    cluster.run("delete", "pod", "client", "-n", NAMESPACE, "--wait=false", check=False)
    return requests, failed, errors


def settle(cluster: Cluster, good: Case) -> None:
    """Put a shape back that was promoted before."""
    follow(cluster, Case("-", "back to a good one", good.resource, "Stable"), 300)


def versions() -> dict[str, str]:
    """Versions of what ran."""
    out = {"sglang": "0.5.23", "kubernetes": "1.36.3"}
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return out | ({"commit": head.stdout.strip()} if head.returncode == 0 else {})
