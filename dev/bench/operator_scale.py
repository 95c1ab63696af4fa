"""The operator with many resources: how fast it acts, what it holds, what it writes at rest, how fast it comes back.

usage: operator_scale.py [--rest SECONDS] [--changes N] OUT_FOLDER COUNT      adds its rows to operator.json

Real: etcd, kube-apiserver, kube-controller-manager, scheduler, the operator's process with its own client. Not
real: the nodes (kwok), so that engines are pods which nothing runs. The resources are paused, since an analysis
needs engines that answer: what is measured is a spec change up to the operator's first write for it (the new
revision's ControllerRevision), as a watch of the API server by kubectl sees it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "cluster"))
from ddcluster import using  # noqa: E402

NAMESPACE, GROUP, PLURAL, PRODUCT = "bench", "ddtree.dev", "ddtreedeployments", "NVIDIA-H100-80GB-HBM3"
SEED = 7
PACE = 0.2  # seconds between two changes
TELL = 10.0  # seconds between two words on how far a stage is
IMAGE = "registry.example/engine@sha256:" + "1" * 64


def say(text: str) -> None:
    """One line on how far it is."""
    print(f"· {text}", file=sys.stderr, flush=True)


def wait_while(missing: Callable[[], str], limit: float, every: float) -> None:
    """Wait until ``missing`` says "": it says what is waited for, which is told now and then.

    Raises SystemExit, with what it says, after ``limit`` seconds.
    """
    began = told = time.monotonic()
    while text := missing():
        now = time.monotonic()
        if now - began > limit:
            raise SystemExit(f"after {limit:.0f} s: {text}")
        if now - told > TELL:
            told = now
            say(f"{now - began:.0f} s: {text}")
        time.sleep(every)


def resource(crd: dict[str, Any], number: int) -> dict[str, Any]:
    """A small, paused one."""
    version = crd["spec"]["versions"][0]["name"]
    return {
        "apiVersion": f"{crd['spec']['group']}/{version}",
        "kind": crd["spec"]["names"]["kind"],
        "metadata": {"name": f"r{number:04}", "namespace": NAMESPACE},
        "spec": {
            "paused": True,
            "replicas": 1,
            "model": {"path": "/models/target"},
            "drafter": {"path": "/models/drafter"},
            "engine": {"image": IMAGE, "speculative": {"algorithm": "DDTREE", "budget": 7}},
            "placement": {"gpu": {"perReplica": 1, "product": [PRODUCT]}},
        },
    }


class Revisions:
    """Every ControllerRevision of the namespace, with the moment a watch told of it."""

    def __init__(self, kubectl: list[str], env: dict[str, str]) -> None:
        self._command = [*kubectl, "get", "controllerrevisions", "-n", NAMESPACE, "--watch", "-o", "name"]
        self._env = env
        self.seen: dict[str, list[float]] = {}  # resource -> moments
        self._ends = False
        self._process: subprocess.Popen[str] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        known: set[str] = set()
        while not self._ends:
            self._process = subprocess.Popen(self._command, env=self._env, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            for line in self._process.stdout:
                name = line.strip().rsplit("/", 1)[-1]
                if name not in known:
                    known.add(name)
                    self.seen.setdefault(name.rsplit("-", 1)[0], []).append(time.monotonic())
            self._process.wait()
            if not self._ends:
                say("the benchmark's watch ended and begins anew")
                time.sleep(0.5)

    def close(self) -> None:
        """End the watch."""
        self._ends = True
        if self._process is not None:
            self._process.terminate()

    def count(self, name: str) -> int:
        """Revisions of a resource so far."""
        return len(self.seen.get(name, []))

    def wait(self, wanted: dict[str, int], limit: float) -> float:
        """Seconds until every resource has so many. Raises SystemExit after ``limit``."""
        began = time.monotonic()

        def missing() -> str:
            names = [name for name, count in wanted.items() if self.count(name) < count]
            return f"{len(names)} resources wait for a revision ({', '.join(names[:3])})" if names else ""

        wait_while(missing, limit, 0.02)
        return max(self.seen[name][count - 1] for name, count in wanted.items()) - began


class Operator:
    """The operator's process."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._env, self._folder = env, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        (folder / "config.yaml").write_text(yaml.safe_dump({"watchNamespaces": [NAMESPACE], "logFormat": "text"}))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its log is kept."""
        with (self._folder / "operator.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ddtree_operator", f"--config={self._folder / 'config.yaml'}",
                 "--host=127.0.0.1", f"--port={self._port}", "--log-level=WARNING"],
                env=self._env | {"PYTHONPATH": str(ROOT / "operator")}, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        """End it in order, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def requests(self) -> dict[str, int]:
        """Requests that the API server answered, by verb and resource, Events included."""
        lines = re.findall(r"^ddtree_operator_api_requests_total\{([^}]*)\} (\S+)$", self._metrics(), re.M)
        found: dict[str, int] = {}
        for labels, number in lines:
            key = " ".join(re.findall(rf'{label}="([^"]*)"', labels)[0] for label in ("verb", "resource"))
            found[key] = found.get(key, 0) + round(float(number))
        return found

    def writes(self) -> dict[str, int]:
        """Those of them that write."""
        found = self.requests()
        assert found, "the operator counts no requests"
        return {key: n for key, n in found.items() if key.split()[0] not in {"get", "list", "watch"}}

    def effort(self) -> dict[str, float]:
        """Since the process began: looks, their mean time, mean time in line, requests, CPU seconds."""
        text = self._metrics()

        def of(name: str) -> tuple[float, float]:
            count, total = (
                float(re.findall(rf"^ddtree_operator_{name}_seconds_{part} (\S+)$", text, re.M)[0])
                for part in ("count", "sum")
            )
            return count, total / max(count, 1)

        looks, look = of("reconcile_duration")
        requests = self.requests()
        return {
            "looks": looks,
            "secondsALook": round(look, 4),
            "secondsInLine": round(of("queue_wait")[1], 4),
            "cpuSeconds": round(self.cpu(), 1),
            **{key: float(n) for key, n in sorted(requests.items())},
        }

    def looks(self) -> tuple[int, float, dict[float, int]]:
        """How many looks at resources there were, their seconds in all, and how many took at most so many seconds."""
        name, text = "ddtree_operator_reconcile_duration_seconds", self._metrics()
        count, total = (float(re.findall(rf"^{name}_{part} (\S+)$", text, re.M)[0]) for part in ("count", "sum"))
        edges = re.findall(rf'^{name}_bucket\{{le="([^"]+)"\}} (\S+)$', text, re.M)
        return int(count), total, {float(edge): int(float(n)) for edge, n in edges}

    def phases(self) -> dict[str, int]:
        """How many resources are in each phase, as it says: listing a thousand would slow what is measured. {} while it
        does not answer yet.
        """
        found: dict[str, int] = {}
        try:
            text = self._metrics()
        except OSError:
            return found
        for phase in re.findall(r'^ddtree_deployment_phase\{.*phase="(\w*)"\} 1', text, re.M):
            found[phase] = found.get(phase, 0) + 1
        return found

    def settle(self, count: int, limit: float) -> None:
        """Wait until so many resources are in their pause, and none in another phase."""

        def missing() -> str:
            found = self.phases()
            if found == {"Paused": count}:
                return ""
            return ", ".join(f"{n} {phase}" for phase, n in sorted(found.items())) or "no answer yet"

        wait_while(missing, limit, max(1.0, count / 200))  # each answer costs the operator some time

    def quiet(self, seconds: float, limit: float) -> None:
        """Wait until nothing was written for so long: engines of replaced revisions leave after their drain."""
        last, since = self.writes(), time.monotonic()

        def missing() -> str:
            nonlocal last, since
            if (new := self.writes()) != last:
                last, since = new, time.monotonic()
            calm = time.monotonic() - since
            return f"nothing was written for {calm:.0f} s, of {seconds:.0f}" if calm < seconds else ""

        wait_while(missing, limit, 1.0)

    def memory(self) -> tuple[float, float]:
        """Resident MiB now, and the most so far."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        now, peak = (int(re.findall(rf"^{key}:\s+(\d+)", text, re.M)[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        return now, peak

    def cpu(self) -> float:
        """CPU seconds so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], q: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[max(0, math.ceil(len(values) * q) - 1)]


class Rows:
    """What was measured, said as it comes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, value: float, unit: str, goal: float | None = None) -> None:
        """One more; with a goal, whether it is met."""
        ok = None if goal is None else value <= goal if unit == "writes" else value < goal
        full = f"{self._count} resources: {what}"
        self.rows.append({"what": full, "value": round(value, 3), "unit": unit, "goal": goal, "ok": ok})
        said = "" if goal is None else f"   goal {goal:g}   {'ok' if ok else 'MISSED'}"
        print(f"{full:<92} {value:>9.2f} {unit}{said}", flush=True)


class Bench:
    """One number of resources in a cluster that has none yet."""

    def __init__(self, count: int, env: dict[str, str]) -> None:
        self.count, self._env = count, env
        self.names = [f"r{i:04}" for i in range(count)]
        self.rows = Rows(count)
        self.raw: dict[str, Any] = {"effort": {}}
        self._kubectl = [str(ROOT / "dev/cluster/cluster"), "kubectl"]
        self._crd = yaml.safe_load((ROOT / "charts/ddtree-operator/crds/ddtreedeployments.yaml").read_text())
        self._version = self._crd["spec"]["versions"][0]["name"]
        self._apply([self._crd, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}])
        wait = [*self._kubectl, "wait", "--for=condition=Established", f"crd/{PLURAL}.{GROUP}"]
        subprocess.run(wait, env=env, check=True, stdout=subprocess.DEVNULL)
        # Two engines at rest, two more while a revision replaces another; and two nodes that stay free.
        nodes = str(-(-count * 4 // 8) + 2)
        subprocess.run([self._kubectl[0], "fake-nodes", nodes, PRODUCT, "8"], env=env, check=True)
        config.load_kube_config(env["KUBECONFIG"])
        self._custom = client.CustomObjectsApi()
        self.revisions = Revisions(self._kubectl, env)

    def _apply(self, objects: list[dict[str, Any]]) -> None:
        command = [*self._kubectl, "apply", "--server-side", "-f", "-"]
        text = yaml.safe_dump_all(objects)
        done = subprocess.run(command, env=self._env, input=text, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr[-800:])

    def make(self) -> None:
        """All resources."""
        for start in range(0, self.count, 100):
            self._apply([resource(self._crd, i) for i in range(start, min(start + 100, self.count))])

    def change(self, name: str, budget: int) -> None:
        """A new spec for one of them."""
        body = {"spec": {"engine": {"speculative": {"budget": budget}}}}
        self._custom.patch_namespaced_custom_object(GROUP, self._version, NAMESPACE, PLURAL, name, body)

    def measure(self, operator: Operator, rest: float, changes: int) -> None:
        """Fill in the rows, and what they were computed from. Raises SystemExit when a stage takes for ever."""
        count, revisions, rows, raw = self.count, self.revisions, self.rows, self.raw
        say(f"{count} resources are made")
        began = time.monotonic()
        operator.start()
        self.make()
        revisions.wait(dict.fromkeys(self.names, 1), 600)
        rows.add("made at once, until each has its revision", time.monotonic() - began, "s")
        operator.settle(count, 900)
        rows.add("the same, until all are at rest", time.monotonic() - began, "s")
        raw["effort"]["until all are at rest"] = operator.effort()
        say(f"{changes} specs are changed, one after the other")
        delays = self._delays(changes)
        raw["delays"] = [round(d, 4) for d in delays]
        rows.add("spec change to first write, median", statistics.median(delays), "s")
        goal = 2.0 if count <= 200 else 10.0
        rows.add("spec change to first write, p99", quantile(delays, 0.99), "s", goal)
        raw["effort"]["and after the changes"] = operator.effort()
        operator.settle(count, 900)
        say("waiting for replaced engines to leave")
        operator.quiet(max(45.0, count / 10 * 1.2), 900)  # longer than between two looks at a resource at rest
        before, cpu, at = operator.writes(), operator.cpu(), time.monotonic()
        while (left := rest - (time.monotonic() - at)) > 0:
            say(f"at rest, {left:.0f} s to go")
            time.sleep(min(60.0, left))
        more = {key: n - before.get(key, 0) for key, n in operator.writes().items() if n != before.get(key, 0)}
        raw["writesAtRest"] = more
        rows.add(f"at rest for {rest:.0f} s: writes", sum(more.values()), "writes", 0)
        rows.add("at rest: share of a core", (operator.cpu() - cpu) / (time.monotonic() - at), "cores")
        now, first = operator.memory()
        operator.stop()
        say("the operator is down; all specs change")
        wanted = {name: revisions.count(name) + 1 for name in self.names}
        for name in self.names:
            self.change(name, 31)
        at = time.monotonic()
        operator.start()
        revisions.wait(wanted, 600)
        goal_restart = 30.0 if count <= 200 else None
        what = "started anew, all specs changed meanwhile: until the last first write"
        rows.add(what, time.monotonic() - at, "s", goal_restart)
        raw["effort"]["started anew, until the last first write"] = operator.effort()
        rows.add("resident memory, most", max(first, operator.memory()[1]), "MiB", 400.0)
        raw["memoryAtRest"] = round(now, 1)

    def _delays(self, changes: int) -> list[float]:
        """Seconds from a spec change to the operator's first write for it."""
        found = []
        for name in random.Random(SEED).sample(self.names, min(changes, self.count)):
            before, at = self.revisions.count(name), time.monotonic()
            self.change(name, 15)
            self.revisions.wait({name: before + 1}, 120)
            found.append(self.revisions.seen[name][before] - at)
            time.sleep(PACE)
        return found


def write(path: Path, count: int, rows: list[dict[str, Any]], raw: dict[str, Any]) -> None:
    """Put them in the place of earlier ones that measured the same; each says when that was."""
    old = json.loads(path.read_text()) if path.exists() else {"rows": [], "raw": {}}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows = [row | {"at": at} for row in rows]
    kept = [r for r in old["rows"] if r["what"] not in {row["what"] for row in rows}]
    record = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "kubernetes": client.__version__},
        "seed": SEED,
        "command": "make bench-operator",
        "rows": sorted(kept + rows, key=lambda r: int(r["what"].split()[0])),
        "raw": old["raw"] | {str(count): raw},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="The operator with many resources on kwok nodes.")
    parser.add_argument("out", type=Path, help="folder of operator.json")
    parser.add_argument("count", type=int, help="resources")
    parser.add_argument("--rest", type=float, default=600.0, help="seconds at rest in which writes are counted")
    parser.add_argument("--changes", type=int, default=100, help="spec changes that are timed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    env = using.environment("bench")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    ended = ""
    with tempfile.TemporaryDirectory(prefix="ddtree-bench-") as folder:
        bench = Bench(args.count, env)
        operator = Operator(env, Path(folder))
        try:
            bench.measure(operator, args.rest, args.changes)
        except KeyboardInterrupt:
            raise SystemExit("stopped; nothing is written") from None
        except SystemExit as error:  # what was measured so far counts, and why there is no more
            ended = str(error)
            bench.raw["ended"] = ended
            if operator.process is not None and operator.process.poll() is None:
                bench.rows.add("resident memory, most", operator.memory()[1], "MiB", 400.0)
        finally:
            operator.stop()
            bench.revisions.close()
            log = Path(folder, "operator.log")
            if log.exists() and (text := log.read_text(errors="replace").strip()):
                print(f"the operator's log ends:\n{text[-1500:]}", file=sys.stderr)
    write(args.out / "operator.json", args.count, bench.rows.rows, bench.raw)
    if ended:
        print(f"not all was measured: {ended}", file=sys.stderr)
    return 0 if not ended and all(r["ok"] is not False for r in bench.rows.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
