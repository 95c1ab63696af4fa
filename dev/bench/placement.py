"""What matching costs on a large fleet: 1,000 nodes in every state, 6,000 pods, 200 resources.

usage: placement.py OUT_FOLDER      writes placement.json; prints the table. CPU seconds, best of five.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_operator.api.spec import PlacementSpec
from ddtree_operator.placement import ImageNeeds, Inventory, affinity, choose_group, match, summary

SEED, NODES, PODS, RESOURCES, ROUNDS = 20261130, 1000, 6000, 200, 5
PRODUCTS = {"NVIDIA-H200": ("143771", "9"), "NVIDIA-B200": ("183359", "10"), "NVIDIA-A100-SXM4-80GB": ("81920", "8")}

Object = dict[str, Any]


def node(rng: random.Random, number: int) -> Object:
    """A node; one in ten is cordoned, tainted, shared, sliced, or carries a label that makes no sense."""
    product = rng.choice(list(PRODUCTS))
    memory, major = PRODUCTS[product]
    labels = {
        "kubernetes.io/hostname": f"gpu-{number:04d}",
        "topology.kubernetes.io/zone": f"zone-{rng.randrange(4)}",
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.memory": memory,
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/cuda.driver-version.full": rng.choice(["580.95.05", "580.82.07"]),
        "nvidia.com/cuda.runtime-version.major": "13",
        "nvidia.com/cuda.runtime-version.minor": "0",
        **{f"feature.node.kubernetes.io/f{i}": "true" for i in range(60)},  # node feature discovery is talkative
    }
    spec: Object = {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]}
    odd = rng.randrange(50)
    if odd == 0:
        spec["unschedulable"] = True
    elif odd == 1:
        spec["taints"].append({"key": "team", "value": f"t{rng.randrange(5)}", "effect": "NoSchedule"})
    elif odd == 2:
        labels["nvidia.com/gpu.product"] += "-SHARED"
    elif odd == 3:
        labels["nvidia.com/gpu.product"] += "-MIG-1g.18gb"
    elif odd == 4:
        labels["nvidia.com/gpu.memory"] = "unknown"
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": f"gpu-{number:04d}", "labels": labels}, "spec": spec, "status": status}


def pod(rng: random.Random) -> Object:
    """A pod with one GPU somewhere."""
    container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    return {"spec": {"nodeName": f"gpu-{rng.randrange(NODES):04d}", "containers": [container]}, "status": {}}


def placements(rng: random.Random) -> list[PlacementSpec]:
    """Placements of 200 resources."""
    made = []
    for _ in range(RESOURCES):
        gpu = {"product": rng.sample(list(PRODUCTS), rng.randint(0, 2)), "perReplica": rng.choice([1, 2, 4, 8])}
        zone = {"topology.kubernetes.io/zone": f"zone-{rng.randrange(4)}"} if rng.random() < 0.5 else {}
        made.append(PlacementSpec.model_validate({"gpu": gpu, "nodeSelector": zone}))
    return made


def best(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main(out: Path) -> int:
    """Measure, print, write."""
    rng = random.Random(SEED)
    nodes, pods = [node(rng, i) for i in range(NODES)], [pod(rng) for _ in range(PODS)]
    wanted = placements(rng)
    needs = ImageNeeds.from_label('{"cuda": "13.0", "arch": ["sm_90", "sm_100"]}')
    inventory = Inventory.from_objects(nodes, pods)

    def whole(spec: PlacementSpec) -> str:
        fits = match(inventory, (), spec, needs)
        affinity(spec, choose_group(fits, 3, pin=spec.pin).pins)
        return summary(fits)

    measured = [
        ("read 1,000 nodes and 6,000 pods", best(lambda: Inventory.from_objects(nodes, pods)), 0.5),
        (
            "match 200 resources against 1,000 nodes",
            best(lambda: [match(inventory, (), p, needs) for p in wanted]),
            1.0,
        ),
        ("the same, with choice, affinity and summary", best(lambda: [whole(p) for p in wanted]), None),
        ("one resource from nothing", best(lambda: match(nodes, pods, wanted[0], needs)), 0.5),
    ]
    rows = [
        {"what": what, "value": round(s, 4), "unit": "CPU s", "goal": goal, "ok": None if goal is None else s < goal}
        for what, s, goal in measured
    ]
    fitting = sum(fit.fits for p in wanted for fit in match(inventory, (), p, needs))
    raw = {"pairs": NODES * RESOURCES, "fitting": fitting, "classes": len(inventory.classes), "rounds": ROUNDS}
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()},
        "seed": SEED,
        "command": "make bench-placement",
        "rows": rows,
        "raw": raw,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "placement.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        goal = "" if row["goal"] is None else f"   goal < {row['goal']:g}   {'ok' if row['ok'] else 'MISSED'}"
        print(f"{row['what']:<46} {row['value']:>8.3f} {row['unit']}{goal}")
    return 0 if all(row["ok"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
