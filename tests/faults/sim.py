"""The whole operator, edges included, on the server in memory, with kubelet, engines, prompts and clock simulated."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_operator.analysis.policy import Policy
from ddtree_operator.api.names import API_VERSION, KIND, LABEL_DEPLOYMENT, LABEL_POOL, LABEL_REVISION
from ddtree_operator.core.facts import AnalysisFact, WatchFact
from ddtree_operator.handlers import act, alerting, reconcile, routes
from ddtree_operator.handlers.alerting import Recorder
from ddtree_operator.handlers.kube import ApiError, Kube
from ddtree_operator.handlers.metrics import Metrics
from ddtree_operator.handlers.reconcile import Reconciler
from ddtree_operator.handlers.settings import Settings
from ddtree_operator.probe.engine import EngineInfo
from faults.server import Crash, Object, Server

NS, NAME = "llm", "m"
KEY = (NS, NAME)
IMAGE = "r/e@sha256:" + "1" * 64
START = 10.0  # seconds an engine takes until it is ready
ANALYSIS = 30.0  # seconds until a verdict


class Analyses:
    """Stands in for the operator's: a verdict after a while. Forgotten with the process, like the real ones' tasks."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._since: dict[tuple[Any, ...], float] = {}
        self.rested = 0  # looks after which nothing was to be sent, though an analysis was under way

    def fact(self, key: Any) -> AnalysisFact | None:
        if key not in self._since:
            return None
        done = self._sim.now - self._since[key] >= ANALYSIS
        outcome, reason = self._sim.verdict(key[2]) if done else ("notYet", "3 pairs")
        kept = {"outcome": outcome, "reason": reason, "acceptLength": 2.5, "digest": "sha256:0"}
        return AnalysisFact(key[2], key[3], key[4], outcome, reason, self._since[key], summary=kept, kept=kept)

    def known(self, key: Any) -> bool:
        return key in self._since

    def adopt(self, key: Any, policy: Policy, *_: Any) -> None:
        self.policy = policy
        self._since[key] = self._sim.now

    def ensure(self, key: Any, **_: Any) -> None:
        """Nothing to run."""

    def there(self, namespace: str, name: str, urls: Any) -> None:
        """Nothing runs."""

    def rest(self, namespace: str, name: str) -> None:
        self.rested += any(self.fact(key).outcome == "notYet" for key in self._since)  # type: ignore[union-attr]

    def forget(self, namespace: str, name: str, *, keep: Any = None) -> None:
        self._since = {k: v for k, v in self._since.items() if k == keep}

    async def close(self) -> None:
        """Nothing to end."""


class Watches:
    """Stands in for the watch after promotion: never finds anything."""

    def __init__(self) -> None:
        self._epochs: dict[Any, int] = {}
        self.begun: list[Any] = []

    def fact(self, key: Any) -> WatchFact | None:
        return None

    def epoch(self, key: Any) -> int | None:
        return self._epochs.get(key)

    def begin(self, key: Any, watch: Any, *_: Any) -> None:
        self._epochs = {key: watch.epoch}
        self.begun.append(key)

    def there(self, namespace: str, name: str, urls: Any) -> None:
        """Nothing runs."""

    def reach(self, key: Any, urls: Any) -> None:
        """Nothing to reach."""

    def forget(self, namespace: str, name: str, *, keep: Any = None) -> None:
        self._epochs = {k: v for k, v in self._epochs.items() if k == keep}

    async def close(self) -> None:
        """Nothing to end."""


class Sim:
    """One resource, its operator, and time."""

    def __init__(self, patch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.server = Server()
        self.now = 1_700_000_000.0
        self.verdict: Callable[[str], tuple[str, str]] = lambda revision: ("pass", "fine")
        self.outages: list[str] = []
        self.crashes = 0
        self._served = False
        self.accepts = True  # whether the Gateway's controller works
        self._written: dict[str, float] = {}  # generation of a route -> since when
        self._known: dict[str, float] = {}  # backend that a route names -> since when; proxies know it a second later
        self._pods: dict[str, float] = {}  # pod -> since when
        self.ill: Callable[[str], bool] = lambda pod: False  # pods that are not ready, however old they are
        clock = SimpleNamespace(time=lambda: self.now)
        for module in (reconcile, act, alerting, routes):
            patch.setattr(module, "time", clock)

        async def info(*_: Any) -> EngineInfo:
            return EngineInfo("/m", "DFLASH", 16, "float32", False, "0.5.23", {})

        patch.setattr(act.Actor, "_info", info)
        base: Object = {
            "replicas": 2,
            "model": {"path": "/m"},
            "drafter": {"path": "/d"},
            "engine": {"image": IMAGE, "speculative": {"algorithm": "DFLASH"}},
            "placement": {"gpu": {"perReplica": 0}, "pin": "none"},
            "traffic": {"drain": "10s"},
        }
        self.server.put("nodes", {"metadata": {"name": "n"}, "status": {}})
        meta = {"name": NAME, "namespace": NS, "annotations": {}}
        self.server.put(
            "ddtreedeployments", {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": base | spec}
        )
        self.server.watcher = self._watch
        self.start()

    def start(
        self,
        kube: Kube | None = None,
        wake: Callable[[str, str], None] = lambda *_: None,
        settings: Settings | None = None,
    ) -> None:
        """A new process: what was only remembered is gone."""
        kube = kube or Kube(self.server)
        self.recorder = Recorder(kube, wake)
        self.reconciler = Reconciler(kube, settings or Settings(), None, wake, Metrics())  # type: ignore[arg-type]
        analyses, watches = Analyses(self), Watches()
        self.analyses, self.watches = analyses, watches
        for part in (self.reconciler._observer, self.reconciler._actor):
            part._analyses, part._watches = analyses, watches  # type: ignore[assignment]
        self.reconciler.analyses, self.reconciler.watches = analyses, watches  # type: ignore[assignment]

    # the world -----------------------------------------------------------------------------------------------------

    @property
    def resource(self) -> Object:
        return self.server.objects["ddtreedeployments", NS, NAME]

    @property
    def status(self) -> Object:
        found: Object = self.resource.get("status") or {}
        return found

    def of(self, plural: str) -> list[Object]:
        return [o for (p, _, _), o in sorted(self.server.objects.items()) if p == plural]

    def revisions(self) -> dict[str, Object]:
        """What the operator remembers of each revision, by hash."""
        return {
            o["metadata"]["labels"][LABEL_REVISION]: json.loads(
                o["metadata"]["annotations"].get("ddtree.dev/state", "{}")
            )
            for o in self.of("controllerrevisions")
        }

    def serves(self) -> str:
        service = self.server.objects.get(("services", NS, NAME))
        return str(service["spec"]["selector"].get(LABEL_REVISION, "both")) if service else "none"

    def sets(self) -> set[str]:
        return {o["metadata"]["labels"][LABEL_REVISION] for o in self.of("deployments")}

    def edit(self, **spec: Any) -> None:
        """A person changes the spec."""
        obj = copy.deepcopy(self.resource)
        obj["spec"] |= spec
        self.server.put("ddtreedeployments", obj)

    def retuned(self, budget: int) -> None:
        self.edit(engine={"image": IMAGE, "speculative": {"algorithm": "DDTREE", "budget": budget}})

    def advance(self, seconds: float) -> None:
        """Let time pass: the kubelet starts and stops pods."""
        self.now += seconds
        self.kubelet()
        self.gateway()

    def kubelet(self) -> None:
        """Pods of every Deployment, ready some seconds after they were made."""
        wanted: dict[str, Object] = {}
        for deployment in self.of("deployments"):
            template = deployment["spec"]["template"]["metadata"]["labels"]
            owner = {"uid": deployment["metadata"]["uid"], "kind": "Deployment"}
            for i in range(deployment["spec"]["replicas"]):
                name = f"{deployment['metadata']['name']}-{deployment['metadata']['uid']}-{i}"
                since = self._pods.setdefault(name, self.now)
                ready = str(self.now - since >= START and not self.ill(name))
                meta = {"name": name, "namespace": NS, "labels": template, "ownerReferences": [owner]}
                conditions = [{"type": "Ready", "status": ready}]
                wanted[name] = {"metadata": meta, "status": {"podIP": "10.0.0.1", "conditions": conditions}}
        for pod in self.of("pods"):
            if pod["metadata"]["namespace"] == NS and pod["metadata"]["name"] not in wanted:
                self.server.remove(("pods", NS, pod["metadata"]["name"]))
        for pod in wanted.values():
            live = self.server.objects.get(("pods", NS, pod["metadata"]["name"]))
            if live is None or live["status"] != pod["status"]:
                meta = {**(live["metadata"] if live else {}), **pod["metadata"]}
                self.server.put("pods", {**pod, "metadata": meta})

    def gateway(self) -> None:
        """The controller of HTTPRoutes: accepts each some seconds after it was written."""
        for live in self.of("httproutes"):
            generation = live["metadata"]["generation"]
            since = self._written.setdefault(live["metadata"]["uid"] + str(generation), self.now)
            if self.now - since < 2 or not self.accepts:
                continue
            told = [
                {"type": t, "status": "True", "observedGeneration": generation} for t in ("Accepted", "ResolvedRefs")
            ]
            parents = [{"parentRef": ref, "conditions": told} for ref in live["spec"]["parentRefs"]]
            if live.get("status") != {"parents": parents}:
                self.server.put("httproutes", {**live, "status": {"parents": parents}})

    def _routed(self) -> None:
        """After every write: each backend of ours with a weight is one that proxies know, with a ready engine."""
        refs = [ref for live in self.of("httproutes") for rule in live["spec"]["rules"] for ref in rule["backendRefs"]]
        self._known = {ref["name"]: self._known.get(ref["name"], self.now) for ref in refs}
        for live in self.of("httproutes"):
            for ref in (ref for rule in live["spec"]["rules"] for ref in rule["backendRefs"]):
                if not ref["name"].startswith(NAME) or not ref["weight"] or not self._served:
                    continue
                service = self.server.objects.get(("services", NS, ref["name"]))
                selector = service["spec"]["selector"].items() if service else None
                ready = [
                    p
                    for p in self.of("pods")
                    if selector is not None
                    and selector <= p["metadata"]["labels"].items()
                    and p["status"]["conditions"][0]["status"] == "True"
                ]
                if ref["name"] != NAME and self.now - self._known[ref["name"]] < 1:
                    self.outages.append(f"at {self.now}: proxies do not know {ref} yet, {self.server.log[-1:]}")
                if not ready:
                    self.outages.append(f"at {self.now}: route names {ref} after {self.server.log[-1:]}")

    def _watch(self) -> None:
        """After every write: once something served, a ready engine is selected."""
        service = self.server.objects.get(("services", NS, NAME))
        if service is None:
            return
        selector = service["spec"]["selector"].items()
        owners = {d["metadata"]["uid"] for d in self.of("deployments")}
        reached = [
            p["metadata"]["name"]
            for p in self.of("pods")
            if selector <= p["metadata"]["labels"].items()
            and p["metadata"]["labels"].get(LABEL_POOL) == "serving"
            and p["metadata"]["labels"].get(LABEL_DEPLOYMENT) == NAME
            and p["status"]["conditions"][0]["status"] == "True"
            and p["metadata"]["ownerReferences"][0]["uid"] in owners
        ]
        self._served = self._served or bool(reached)
        self._routed()
        if self._served and not reached and self.resource["spec"].get("replicas", 1):
            self.outages.append(f"at {self.now}: {dict(selector)} after {self.server.log[-1]}")

    # the operator --------------------------------------------------------------------------------------------------

    async def look(self) -> float:
        """One look; seconds until the next. The process may end in it."""
        try:
            again = await self.reconciler.reconcile(KEY)
            return 60.0 if again is None else again
        except ApiError:
            return 1.0
        except Crash:
            self.crashes += 1
            self.start()
            return 0.0

    async def run(self, seconds: float, every: float | None = None) -> None:
        """Looks for so much time; ``every``: only on resync, as if no watch ever said anything."""
        end = self.now + seconds
        while self.now < end:
            again = await self.look()
            self.advance(max(0.05, min(again, 5.0) if every is None else every))

    async def until(self, *phases: str, limit: float = 2000.0, every: float | None = None) -> Sim:
        """Until the resource is in one of these phases."""
        end = self.now + limit
        while self.now < end:
            again = await self.look()
            current = self.status.get("observedGeneration") == self.resource["metadata"]["generation"]
            if current and self.status.get("phase") in phases:
                return self
            self.advance(max(0.05, min(again, 5.0) if every is None else every))
        raise AssertionError(f"{phases} not reached: {self.status.get('phase')}: {self.status.get('message')}")

    def end(self) -> Object:
        """What counts in the end: what serves, what runs, what became of each revision, and how often."""
        return {
            "serves": self.serves(),
            "sets": sorted(self.sets()),
            "phase": self.status.get("phase"),
            "results": {h: (s.get("result", ""), s.get("by", "")) for h, s in self.revisions().items()},
            "alarms": {h: [a["outcome"] for a in s.get("alarms", [])] for h, s in self.revisions().items()},
            "attempts": {h: s.get("attempt", 0) for h, s in self.revisions().items()},
        }


def run(work: Any) -> Any:
    """Run a coroutine in a loop of its own."""
    return asyncio.run(work)


__all__ = ["KEY", "NAME", "NS", "Crash", "Sim", "run"]
