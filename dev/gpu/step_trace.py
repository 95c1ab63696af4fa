# ruff: noqa: E501 (tables are printed in one piece)
"""What a decode step costs, read from a torch profiler trace (Chrome JSON, gzip or plain).

usage: step_trace.py TRACE GRAPHS       prints kernel time by name, idle time of the GPU, launches and host waits a step

GRAPHS: CUDA graphs a step launches (a chain 2, a tree 3 on one GPU, plain 1). Only the middle of the trace counts, where
every request decodes: from 30 % to 95 % of the graph launches, so prefill must have none. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def short(name: str) -> str:
    """A kernel's name without return type, arguments and long template lists."""
    name = name.replace("void ", "").split("(")[0]
    return name if len(name) <= 90 else name[:87] + "..."


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    raw = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    return [e for e in events if e.get("ph") == "X"]


def middle(events: list[dict[str, Any]], graphs: int) -> tuple[list[dict[str, Any]], int]:
    """Events of the steps in the middle of the trace, and how many steps: host events by when they begin, GPU events by
    when the kernels of the graphs at both ends begin."""
    launches = sorted((e for e in events if e.get("name") == "cudaGraphLaunch"), key=lambda e: e["ts"])
    steps = len(launches) // graphs
    first, last = int(steps * 0.3) * graphs, int(steps * 0.95) * graphs
    if last <= first:
        return [], 0
    begins: dict[int, float] = {}
    for e in events:
        if e.get("cat") == "kernel":
            at = e["args"].get("correlation")
            begins[at] = min(begins.get(at, e["ts"]), e["ts"])
    host = launches[first]["ts"], launches[last]["ts"]
    gpu = tuple(begins.get(launches[i]["args"].get("correlation"), 0.0) for i in (first, last))

    def within(e: dict[str, Any]) -> bool:
        low, high = gpu if e.get("cat") in GPU else host
        return bool(low <= e["ts"] < high)

    return [e for e in events if within(e)], (last - first) // graphs


def summarise(everything: list[dict[str, Any]], graph_launches: int, top: int = 28) -> dict[str, Any]:
    """Times and counts a step."""
    events, steps = middle(everything, graph_launches)
    gpu = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"])
    graphs = {e["args"].get("correlation") for e in everything if e.get("name") == "cudaGraphLaunch"}
    time: dict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    inside = outside = busy = 0.0
    end = 0.0
    gaps: list[float] = []
    outside_names: Counter[str] = Counter()
    for e in gpu:
        name = short(str(e["name"]))
        time[name] += e["dur"]
        count[name] += 1
        if e["args"].get("correlation") in graphs:
            inside += e["dur"]
        else:
            outside += e["dur"]
            outside_names[name] += 1
        begin = max(e["ts"], end)
        if end and e["ts"] > end:
            gaps.append(e["ts"] - end)
        busy += max(0.0, e["ts"] + e["dur"] - begin)
        end = max(end, e["ts"] + e["dur"])
    runtime = Counter(str(e["name"]) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    waits: dict[str, float] = defaultdict(float)
    for e in events:
        if e.get("cat") == "cuda_runtime" and e["name"] in WAITS:
            waits[str(e["name"])] += e["dur"]
    operators = Counter(str(e["name"]) for e in events if e.get("cat") == "cpu_op")
    span = (end - gpu[0]["ts"]) if gpu else 0.0
    per = max(1, steps)
    return {
        "steps": steps,
        "span": round(span / per, 1),
        "gpu busy": round(busy / per, 1),
        "gpu idle": round((span - busy) / per, 1),
        "idle in gaps over 5 us": round(sum(g for g in gaps if g > 5) / per, 1),
        "in graphs": round(inside / per, 1),
        "outside graphs": round(outside / per, 1),
        "launches outside graphs": round(sum(outside_names.values()) / per, 1),
        "kernels": [[n, round(t / per, 1), round(count[n] / per, 1)] for n, t in sorted(time.items(), key=lambda x: -x[1])[:top]],
        "outside": [[n, round(c / per, 2), round(time[n] / per, 1)] for n, c in outside_names.most_common(top)],
        "runtime": {n: round(c / per, 2) for n, c in runtime.most_common(16)},
        "waits": {n: round(t / per, 1) for n, t in waits.items()},
        "host": {n: round(operators[n] / per, 2) for n in ("aten::item", "aten::_local_scalar_dense", "aten::copy_", "aten::to") if operators[n]},
    }  # fmt: skip


def show(name: str, s: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [f"== {name}: a step of {s['steps']}: span {s['span']} busy {s['gpu busy']} idle {s['gpu idle']} "
             f"(gaps > 5 us {s['idle in gaps over 5 us']}) in graphs {s['in graphs']} outside {s['outside graphs']} "
             f"in {s['launches outside graphs']} launches"]  # fmt: skip
    lines += [f"   {t:9.1f} us {c:7.1f} x {n}" for n, t, c in s["kernels"]]
    lines.append("   outside graphs: " + "; ".join(f"{n} {c}x {t}us" for n, c, t in s["outside"]))
    lines.append(f"   runtime {s['runtime']}  waits us {s['waits']}  host {s['host']}")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    if len(sys.argv) != 3:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    print(show(path.name, summarise(read(path), int(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
