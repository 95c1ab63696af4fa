"""The operator with many resources: how fast it acts, what it holds, what it writes at rest, how fast it comes back.

usage: operator_scale.py OUT_FOLDER COUNT [REST_SECONDS]      adds its rows to operator.json

Real: etcd, kube-apiserver, kube-controller-manager, scheduler, the operator's process with its own client. Not
real: the nodes (kwok), so that engines are pods which nothing runs. The resources are paused, since an analysis
needs engines that answer: what is measured is a spec change up to the operator's first write for it (the new
revision's ControllerRevision), as the benchmark's own watch of the API server sees it.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config, watch

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, GROUP, PLURAL, PRODUCT = "bench", "ddtree.dev", "ddtreedeployments", "NVIDIA-H100-80GB-HBM3"
SEED = 7
CHANGES = 100  # one after the other
PACE = 0.2  # seconds between them
QUIET = 45.0  # seconds without a write, more than a resync, after which the resources count as at rest
IMAGE = "registry.example/engine@sha256:" + "1" * 64


def environment() -> dict[str, str]:
    """The cluster's, brought up when it is not."""
    env = os.environ | {"DDTREE_CLUSTER": os.environ.get("DDTREE_CLUSTER", "bench")}
    tool = str(ROOT / "dev/cluster/cluster")
    subprocess.run([tool, "up"], env=env, check=True, stdout=subprocess.DEVNULL)
    told = subprocess.run([tool, "env"], env=env, check=True, capture_output=True, text=True).stdout
    for line in told.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        env[name] = shlex.split(value)[0] if value else ""
    return env


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
    """Every ControllerRevision of the namespace, with the moment this process heard of it."""

    def __init__(self, api: client.AppsV1Api) -> None:
        self._api = api
        self.seen: dict[str, list[float]] = {}  # resource -> moments
        self._stop = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        known: set[str] = set()
        while not self._stop:
            try:
                stream = watch.Watch().stream(
                    self._api.list_namespaced_controller_revision, NAMESPACE, timeout_seconds=300
                )
                for event in stream:
                    name = event["object"].metadata.name
                    if event["type"] == "ADDED" and name not in known:
                        known.add(name)
                        self.seen.setdefault(name.rsplit("-", 1)[0], []).append(time.monotonic())
            except Exception as error:
                print(f"watch of the benchmark begins anew: {error}", file=sys.stderr)
                time.sleep(0.5)

    def count(self, name: str) -> int:
        """Revisions of a resource so far."""
        return len(self.seen.get(name, []))

    def wait(self, wanted: dict[str, int], limit: float) -> float:
        """Seconds until every resource has so many. Raises SystemExit after ``limit``."""
        began = time.monotonic()
        while missing := [name for name, count in wanted.items() if self.count(name) < count]:
            if time.monotonic() - began > limit:
                raise SystemExit(f"{len(missing)} resources have no new revision after {limit:.0f} s: {missing[:3]}")
            time.sleep(0.05)
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
        """End it in order."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def writes(self) -> dict[str, int]:
        """API writes it has counted, by verb and resource, Events included."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        lines = re.findall(r"^ddtree_operator_api_requests_total\{([^}]*)\} (\S+)$", text, re.M)
        assert lines, "the operator counts no requests"
        found: dict[str, int] = {}
        for labels, number in lines:
            verb, resource = (re.findall(rf'{key}="([^"]*)"', labels)[0] for key in ("verb", "resource"))
            if verb not in {"get", "list", "watch"}:
                found[f"{verb} {resource}"] = found.get(f"{verb} {resource}", 0) + round(float(number))
        return found

    def quiet(self, seconds: float, limit: float) -> None:
        """Wait until nothing was written for so long: engines of replaced revisions leave after their drain."""
        end, last, since = time.monotonic() + limit, self.writes(), time.monotonic()
        while time.monotonic() - since < seconds:
            if time.monotonic() > end:
                raise SystemExit(f"the operator still writes after {limit:.0f} s: {last}")
            time.sleep(1)
            if (now := self.writes()) != last:
                last, since = now, time.monotonic()

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
    return sorted(values)[min(len(values) - 1, int(len(values) * q))]


def phases(api: client.CustomObjectsApi, version: str) -> dict[str, int]:
    """How many resources are in each phase."""
    found: dict[str, int] = {}
    for item in api.list_namespaced_custom_object(GROUP, version, NAMESPACE, PLURAL)["items"]:
        phase = (item.get("status") or {}).get("phase", "none")
        found[phase] = found.get(phase, 0) + 1
    return found


def measure(count: int, rest: float, env: dict[str, str], folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All of it, for one number of resources."""
    kubectl = [str(ROOT / "dev/cluster/cluster"), "kubectl"]
    crd_file = ROOT / "charts/ddtree-operator/crds/ddtreedeployments.yaml"
    crd = yaml.safe_load(crd_file.read_text())
    version = crd["spec"]["versions"][0]["name"]

    def apply(objects: list[dict[str, Any]]) -> None:
        text = yaml.safe_dump_all(objects)
        done = subprocess.run([*kubectl, "apply", "--server-side", "-f", "-"], env=env, input=text, text=True,
                              capture_output=True)  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr[-800:])

    apply([crd, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}])
    subprocess.run([*kubectl, "wait", "--for=condition=Established", f"crd/{PLURAL}.{GROUP}"], env=env, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    nodes = str(-(-count * 4 // 8) + 2)
    subprocess.run([kubectl[0], "fake-nodes", nodes, PRODUCT, "8"], env=env, check=True)
    config.load_kube_config(env["KUBECONFIG"])
    custom, revisions = client.CustomObjectsApi(), Revisions(client.AppsV1Api())
    operator = Operator(env, folder)
    operator.start()
    names = [f"r{i:04}" for i in range(count)]
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}

    def row(what: str, value: float, unit: str, goal: float | None = None) -> None:
        ok = None if goal is None else value <= goal if unit == "writes" else value < goal
        rows.append(
            {"what": f"{count} resources: {what}", "value": round(value, 3), "unit": unit, "goal": goal, "ok": ok}
        )
        said = "" if goal is None else f"   goal {goal:g}   {'ok' if ok else 'MISSED'}"
        print(f"{name:<78} {value:>9.2f} {unit}{said}", flush=True)

    def change(name: str, budget: int) -> None:
        body = {"spec": {"engine": {"speculative": {"budget": budget}}}}
        custom.patch_namespaced_custom_object(GROUP, version, NAMESPACE, PLURAL, name, body)

    def settle(limit: float) -> float:
        began = time.monotonic()
        while (found := phases(custom, version)) != {"Paused": count}:
            if time.monotonic() - began > limit:
                raise SystemExit(f"not at rest after {limit:.0f} s: {found}")
            time.sleep(1)
        return time.monotonic() - began

    try:
        began = time.monotonic()
        for start in range(0, count, 100):
            apply([resource(crd, i) for i in range(start, min(start + 100, count))])
        revisions.wait(dict.fromkeys(names, 1), 600)
        row("made at once, until each has its revision", time.monotonic() - began, "s")
        settle(900)
        row("the same, until all are at rest", time.monotonic() - began, "s")
        rng, delays = random.Random(SEED), []
        for name in rng.sample(names, min(CHANGES, count)):
            before, at = revisions.count(name), time.monotonic()
            change(name, 15)
            revisions.wait({name: before + 1}, 120)
            delays.append(revisions.seen[name][before] - at)
            time.sleep(PACE)
        raw["delays"] = [round(d, 4) for d in delays]
        row("spec change to first write, median", statistics.median(delays), "s")
        row("spec change to first write, p99", quantile(delays, 0.99), "s", 2.0 if count <= 200 else 10.0)
        settle(900)
        operator.quiet(QUIET, 900)
        before, cpu, at = operator.writes(), operator.cpu(), time.monotonic()
        time.sleep(rest)
        more = {key: n - before.get(key, 0) for key, n in operator.writes().items() if n != before.get(key, 0)}
        raw["writes_at_rest"] = more
        row(f"at rest for {rest:.0f} s: writes", sum(more.values()), "writes", 0)
        row("at rest: share of a core", (operator.cpu() - cpu) / (time.monotonic() - at), "cores")
        operator.stop()
        wanted = {name: revisions.count(name) + 1 for name in names}
        for name in names:
            change(name, 31)
        at = time.monotonic()
        operator.start()
        revisions.wait(wanted, 600)
        row("started anew, all specs changed meanwhile: until the last first write", time.monotonic() - at, "s",
            30.0 if count <= 200 else None)  # fmt: skip
        now, peak = operator.memory()
        row("resident memory, most", peak, "MiB", 400.0)
        raw["memory_now"] = round(now, 1)
    finally:
        operator.stop()
    return rows, raw


def main() -> int:
    """Command line."""
    if len(sys.argv) < 3:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    rest = float(sys.argv[3]) if len(sys.argv) > 3 else 600.0
    env = environment()
    with tempfile.TemporaryDirectory(prefix="ddtree-bench-") as folder:
        try:
            rows, raw = measure(count, rest, env, Path(folder))
        except KeyboardInterrupt:
            raise SystemExit("stopped; nothing is written") from None
        finally:
            log = Path(folder, "operator.log")
            if log.exists() and (text := log.read_text(errors="replace").strip()):
                print(f"the operator's log ends:\n{text[-1500:]}", file=sys.stderr)
    path = out / "operator.json"
    old = json.loads(path.read_text()) if path.exists() else {"rows": [], "raw": {}}
    kept = [r for r in old["rows"] if not r["what"].startswith(f"{count} resources:")]
    record = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "kubernetes": client.__version__},
        "seed": SEED,
        "command": "make bench-operator",
        "rows": sorted(kept + rows, key=lambda r: int(r["what"].split()[0])),
        "raw": old["raw"] | {str(count): raw},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(r["ok"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
