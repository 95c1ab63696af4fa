"""Follow a rollout until it ends, and read off what came of it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import alarm
from demo.cluster import ROOT, Cluster, DemoError
from demo.resources import NAME, NAMESPACE, SYSTEM
from demo.show import Ticker

Object = dict[str, Any]
OPERATOR = "app.kubernetes.io/name=ddtree-operator"
ENDS = {"Stable", "RolledBack", "Invalid"}


@dataclass(slots=True)
class Case:
    """One rollout of the demo and what it must end in."""

    key: str
    what: str
    resource: Object
    expect: str  # phase
    because: str = ""  # words that must stand in the message
    alert_from: str = ""  # not a new spec but an alert about the promoted revision, sent from a pod of this image
    kill_operator: bool = False  # end the operator by force as soon as pairs are sent
    killed: bool = False  # whether that was done
    status: Object = field(default_factory=dict)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """promoted or rolled back."""
        return "promoted" if self.status.get("phase") == "Stable" else "rolled back"

    @property
    def problem(self) -> str:
        """What is not as it must be; "" when all is well."""
        phase, message = self.status.get("phase"), self.status.get("message", "")
        if phase != self.expect:
            return f"case {self.key} ended in {phase} ({message}), expected {self.expect}"
        if self.because not in message:
            return f"case {self.key} gave as reason {message!r}, expected {self.because!r} in it"
        if self.kill_operator and not self.killed:
            return f"case {self.key} ended before the operator could be killed"
        return ""

    @property
    def measured(self) -> list[Object]:
        """The metrics of this case's analysis; an alert has none (the status shows those of the revision's canary)."""
        return [] if self.alert_from else self.status.get("analysis", {}).get("metrics", [])

    def metric(self, name: str, side: str) -> str:
        """A metric's value on one side, "-" when it was not measured."""
        for m in self.measured:
            if m["metric"] == name and side in m:
                return f"{m[side]:.2f}"
        return "-"

    @property
    def parity(self) -> str:
        """Parity in a few words."""
        for m in self.measured:
            if m["metric"] == "parity":
                return {"pass": "equal", "fail": "DIFFERENT"}.get(m["outcome"], "not yet")
        return "not measured"


def keep_record(cluster: Cluster, case: Case, folder: Path, model: str) -> str:
    """Save the record of the case's verdict with ``ddtreectl explain``; its path, "" when nothing was measured.

    Raises DemoError when the record does not give the same verdict again.
    """
    if case.alert_from or not case.status.get("analysis", {}).get("pairs"):
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"demo-{model}-{case.key}.jsonl.gz"
    command = [sys.executable, "-m", "ddtreectl", "explain", NAME, str(case.status["revision"]), "-n", NAMESPACE]
    env = {**cluster.env, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'cli'}"}
    done = subprocess.run(
        [*command, "--export", str(path)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise DemoError(f"ddtreectl explain of case {case.key}: {said[-1] if said else 'failed'}")
    return str(path)


def _found(cluster: Cluster) -> Object:
    return cluster.get("ddt", NAME, "-n", NAMESPACE) or {}


def follow(cluster: Cluster, case: Case, limit: float) -> None:
    """Apply the case's resource and wait for its end. Raises DemoError when it takes too long."""
    began = time.monotonic()
    if case.alert_from:
        alarm.send(cluster, case.alert_from, str(_found(cluster)["status"]["revision"]))
    else:
        cluster.apply(case.resource)
    ends = {case.expect} if case.alert_from else ENDS
    ticker, last, since = Ticker(), "", began
    while True:
        found = _found(cluster)
        status = found.get("status") or {}
        generation = found.get("metadata", {}).get("generation")
        seen = status.get("observedGeneration") == generation
        phase = status.get("phase", "Pending") if seen else "Pending"
        if phase != last:
            now = time.monotonic()
            if last:
                case.phases[last] = round(case.phases.get(last, 0.0) + now - since, 1)
            last, since = phase, now
        pairs = status.get("analysis", {}).get("pairs")
        counted = f" [{pairs} pairs]" if phase == "Analyzing" and pairs else ""
        ticker.update(f"{phase}{counted}: {status.get('message', '')}"[:150] if seen else phase)
        if case.kill_operator and not case.killed and phase == "Analyzing":
            case.killed = True
            cluster.run("delete", "pod", "-n", SYSTEM, "-l", OPERATOR, "--grace-period=0", "--force", "--wait=false")
            ticker.update("the operator is killed in the middle of this; another one goes on")
        if phase in ends:
            break
        if time.monotonic() - began > limit:
            ticker.done()
            raise DemoError(f"case {case.key} is still {phase} after {limit:.0f} s: {status.get('message', '')}")
        time.sleep(1.0)
    ticker.done()
    case.status, case.seconds = status, round(time.monotonic() - began, 1)
