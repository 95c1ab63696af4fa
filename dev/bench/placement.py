"""What placement costs in a large fleet: 1,000 kwok nodes beside the real one, and 200 resources on their way.

usage: placement.py OUT_FOLDER      writes placement.json; prints the table

Real: etcd, the API server with the nodes and pods in it, the operator's own client, and in the last part the operator's
process. Not real: the fake nodes' kubelets (kwok). Goals are held against CPU seconds, the best of five rounds: the
cluster runs on the same cores. Wall seconds (medians) stand beside them, with the machine's load. The nodes of a fleet
are odd here and there (see ODD), so that every reason has to be found.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.aio import client as aio
from kubernetes.aio import config as aio_config
from operator_scale import GROUP, NAMESPACE, PLURAL, ROOT, Operator, resource, using

from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.handlers.kube import Kube
from ddtree_operator.handlers.neighbours import Neighbours
from ddtree_operator.handlers.places import place
from ddtree_operator.placement import ImageNeeds

SEED, RESOURCES, PODS, ROUNDS = 20261130, 200, 500, 5
PRODUCTS = {"NVIDIA-H200": 400, "NVIDIA-B200": 300, "NVIDIA-A100-SXM4-80GB": 300}
ODD_SHARE = 0.2

Object = dict[str, Any]


def label(key: str, value: str | None) -> Object:
    """A patch that sets one of NVIDIA's labels, or takes it away."""
    return {"metadata": {"labels": {f"nvidia.com/{key}": value}}}


ODD: tuple[Object, ...] = (
    {"spec": {"unschedulable": True}},
    {"spec": {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]}},
    label("gpu.product", "NVIDIA-H200-SHARED"),
    label("gpu.product", "NVIDIA-H200-MIG-1g.18gb"),
    label("gpu.product", "NVIDIA-H200-MIG-INVALID"),
    label("gpu.product", None),
    label("gpu.memory", "unknown"),
    label("gpu.memory", None),
    label("gpu.sharing-strategy", "mps"),
    label("cuda.driver-version.full", "570.133.20"),
)


def everywhere(work: Callable[[Any], object], items: list[Any]) -> None:
    """Eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, items))


def fleet_of_nodes(env: dict[str, str], rng: random.Random) -> int:
    """Make the nodes, odd ones among them, and pods with a GPU on some; the number of nodes."""
    tool = str(ROOT / "dev/cluster/cluster")
    subprocess.run([tool, "fake-nodes", "0"], env=env, check=True, stdout=subprocess.DEVNULL)
    for product, count in PRODUCTS.items():
        subprocess.run([tool, "fake-nodes", str(count), product, "8"], env=env, check=True)
    core = client.CoreV1Api()
    names = sorted(n.metadata.name for n in core.list_node(_request_timeout=60).items)
    fakes = [n for n in names if n.startswith("fake-")]
    zones = [
        (n, {"metadata": {"labels": {"topology.kubernetes.io/zone": f"zone-{i % 4}"}}}) for i, n in enumerate(fakes)
    ]
    odd = [(n, ODD[i % len(ODD)]) for i, n in enumerate(rng.sample(fakes, int(len(fakes) * ODD_SHARE)))]
    everywhere(lambda pair: core.patch_node(*pair), zones + odd)

    def pod(number: int) -> Object:
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        spec = {"nodeName": fakes[number % len(fakes)], "containers": [{"name": "c", "image": "x.invalid/x", **limits}]}
        return {"metadata": {"name": f"busy-{number}"}, "spec": spec | {"tolerations": [{"operator": "Exists"}]}}

    everywhere(lambda n: core.create_namespaced_pod(NAMESPACE, pod(n)), list(range(PODS)))
    return len(names)


def specs(rng: random.Random) -> list[DDTreeSpec]:
    """What 200 resources ask for."""
    made = []
    for _ in range(RESOURCES):
        gpu = {"product": rng.sample(list(PRODUCTS), rng.randint(0, 2)), "perReplica": rng.choice([1, 2, 4, 8])}
        zone = {"topology.kubernetes.io/zone": f"zone-{rng.randrange(4)}"} if rng.random() < 0.5 else {}
        placement = {"gpu": gpu, "nodeSelector": zone}
        made.append(
            DDTreeSpec.model_validate({"model": {"path": "/m"}, "drafter": {"path": "/d"}, "placement": placement})
        )
    return made


async def seconds(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """CPU seconds of the best round, and the median of wall seconds."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        began, used = time.monotonic(), time.process_time()
        await work()
        wall.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
    return min(cpu), statistics.median(wall)


async def direct(kubeconfig: str, wanted: list[DDTreeSpec]) -> tuple[dict[str, tuple[float, float]], Object]:
    """The operator's own functions on what its own client reads."""
    settings = aio.Configuration()
    await aio_config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
    kube = Kube(aio.ApiClient(configuration=settings))
    needs = ImageNeeds.from_label('{"cuda": "13.0", "arch": ["sm_90", "sm_100"]}')
    try:
        known = await Neighbours(kube, (), everywhere=True).inventory("", "", ())

        async def all_of_them() -> None:
            for spec in wanted:
                place(known, spec, keep={}, needed=2, needs=needs)

        async def one_look() -> None:
            read = await Neighbours(kube, (), everywhere=True).inventory("", "", ())
            place(read, wanted[0], keep={}, needed=2, needs=needs)

        async def everything() -> None:
            neighbours = Neighbours(kube, (), everywhere=True)
            for spec in wanted:
                place(await neighbours.inventory("", "", ()), spec, keep={}, needed=2, needs=needs)

        found = {
            "200 resources matched, placed and described, nodes known": await seconds(all_of_them),
            "one resource, nodes and pods read from the API server": await seconds(one_look),
            "200 resources, nodes and pods read once for all of them": await seconds(everything),
        }
        facts = [place(known, spec, keep={}, needed=2, needs=needs) for spec in wanted]
        reasons = Counter(row["reason"] for row in facts[0].nodes if not row["fits"])
        raw: Object = {
            "nodes": len(known.nodes),
            "classes": len(known.classes),
            "resources_that_fit": sum(fact.fits for fact in facts),
            "reasons_of_the_first": sorted(reasons)[:20],
        }
        return found, raw
    finally:
        await kube.close()


def operated(env: dict[str, str], folder: Path) -> tuple[dict[str, tuple[float, float]], Object]:
    """The operator's process with 200 resources that are placed and paused: how long its looks take, by its metrics."""
    tool = [str(ROOT / "dev/cluster/cluster"), "kubectl"]
    crd = yaml.safe_load((ROOT / "charts/ddtree-operator/crds/ddtreedeployments.yaml").read_text())
    objects = [resource(crd, i) for i in range(RESOURCES)]
    for obj in objects:
        obj["spec"]["placement"]["gpu"]["product"] = ["NVIDIA-H200"]
    operator = Operator(env, folder)
    operator.start()
    try:
        subprocess.run([*tool, "apply", "--server-side", "-f", "-"], env=env, input=yaml.safe_dump_all(objects),
                       text=True, check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        operator.settle(RESOURCES, 420)
        before, cpu = operator.looks(), operator.cpu()
        time.sleep(60)  # what is measured: looks at resources that are on their way, one resync after another
        after, cpu = operator.looks(), operator.cpu() - cpu
    finally:
        operator.stop()
    count = max(1, after[0] - before[0])
    most = next((edge for edge, n in after[2].items() if n - before[2].get(edge, 0) >= 0.99 * count), None)
    mean = (cpu / count, (after[1] - before[1]) / count)
    return {"the operator's process with 200 resources on their way: one look": mean}, {
        "looks": count,
        "p99_of_looks_below_s": most,
    }


def main(out: Path) -> int:
    """Measure, print, write."""
    rng = random.Random(SEED)
    env = using.environment("bench-placement")
    config.load_kube_config(env["KUBECONFIG"])
    tool = [str(ROOT / "dev/cluster/cluster"), "kubectl"]
    crd_file = ROOT / "charts/ddtree-operator/crds/ddtreedeployments.yaml"
    subprocess.run(
        [*tool, "apply", "--server-side", "-f", str(crd_file)], env=env, check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run([*tool, "wait", "--for=condition=Established", f"crd/{PLURAL}.{GROUP}"], env=env, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    client.CoreV1Api().create_namespace({"metadata": {"name": NAMESPACE}})
    made = fleet_of_nodes(env, rng)
    measured, raw = asyncio.run(direct(env["KUBECONFIG"], specs(rng)))
    with tempfile.TemporaryDirectory(prefix="ddtree-bench-") as folder:
        try:
            looks, more = operated(env, Path(folder))
        finally:
            log = Path(folder, "operator.log")
            if log.exists() and (text := log.read_text(errors="replace").strip()):
                print(f"the operator's log ends:\n{text[-1500:]}", file=sys.stderr)
    rows: list[Object] = []
    for what, (cpu, wall) in (measured | looks).items():
        rows.append({"what": what, "value": round(cpu, 4), "unit": "CPU s", "goal": 1.0, "ok": cpu < 1.0})
        rows.append({"what": what, "value": round(wall, 4), "unit": "s", "goal": None, "ok": None})
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()},
        "seed": SEED,
        "command": "make bench-placement",
        "rows": rows,
        "raw": raw | more | {"nodes_in_cluster": made, "rounds": ROUNDS, "load": os.getloadavg()[0]},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "placement.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        goal = "" if row["goal"] is None else f"   goal < {row['goal']:g}   {'ok' if row['ok'] else 'MISSED'}"
        print(f"{row['what']:<64} {row['value']:>8.3f} {row['unit']:<5}{goal}")
    return 0 if all(row["ok"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
