"""The operator's own metrics. docs/reference/metrics-operator.md explains each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from ddtree_operator import __version__
from ddtree_operator.core.actions import QUIET, Action, SaveRevision, StartBuild
from ddtree_operator.core.facts import EngineSet, Observed, Revision

RESOURCE = ("namespace", "ddtreedeployment")
REVISION = (*RESOURCE, "revision")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Key = tuple[str, str]  # namespace, name


class Metrics:
    """Counters and gauges, and what keeps those of a resource in step with it."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        r = self.registry
        # the process
        self.info = Gauge("ddtree_operator_info", "Always 1; the label says the version.", ["version"], registry=r)
        self.info.labels(__version__).set(1)
        self.leader = Gauge("ddtree_operator_leader", "1 while this replica works, 0 on standby.", registry=r)
        self.resync_age = Gauge("ddtree_operator_resync_age_seconds", "Age of the last complete list.", registry=r)
        self.watch_lag = Gauge(
            "ddtree_operator_watch_lag_seconds", "For how long a listed change has not come by watch.", registry=r
        )
        # the work
        self.reconciles = Histogram(
            "ddtree_operator_reconcile_duration_seconds", "Duration of one look.", buckets=SECONDS, registry=r
        )
        self.failures = Counter("ddtree_operator_reconcile_errors_total", "Looks that ended in an error.", registry=r)
        self.queue_depth = Gauge("ddtree_operator_queue_depth", "Resources in line.", registry=r)
        self.queue_wait = Histogram(
            "ddtree_operator_queue_wait_seconds", "Time in line before a look.", buckets=SECONDS, registry=r
        )
        self.requests = Counter(
            "ddtree_operator_api_requests_total",
            "Requests to the API server; code 0 stands for no answer.",
            ["verb", "resource", "code"],
            registry=r,
        )
        self.decisions = Counter(
            "ddtree_operator_decisions_total", "Actions that the core decided on.", ["action"], registry=r
        )
        # what became of rollouts
        self.builds = Counter("ddtree_operator_builds_total", "Builds started.", registry=r)
        self.promotions = Counter("ddtree_operator_promotions_total", "Revisions promoted.", registry=r)
        self.rollbacks = Counter(
            "ddtree_operator_rollbacks_total", "Revisions rolled back, by what caused it.", ["cause"], registry=r
        )
        self.notifications = Counter(
            "ddtree_operator_alert_notifications_total", "Notifications by HTTP code.", ["code"], registry=r
        )
        self.alerts = Counter(
            "ddtree_operator_alerts_total", "Alerts in them, by what became of each.", ["result"], registry=r
        )
        # resources
        self.phase = Gauge("ddtree_deployment_phase", "1 for the present phase.", [*RESOURCE, "phase"], registry=r)
        self.ready = Gauge("ddtree_deployment_ready_engines", "Serving engines that are ready.", RESOURCE, registry=r)
        self.weight = Gauge(
            "ddtree_deployment_canary_weight_ratio", "Share of traffic the canary has, 0 to 1.", RESOURCE, registry=r
        )
        self.accept_length = Gauge(
            "ddtree_revision_accept_length", "Accept length that the canary showed.", REVISION, registry=r
        )
        self.divergences = Counter(
            "ddtree_parity_divergences_total",
            "Texts of promoted engines that differ from the canary's with no tie to explain it.",
            REVISION,
            registry=r,
        )
        self.restarts = Counter("ddtree_engine_restarts_total", "Engine restarts seen.", REVISION, registry=r)
        self._restarts: dict[Key, dict[str, int]] = {}  # pod -> restarts, as last seen
        self._revisions: dict[Key, set[str]] = {}
        self._phases: dict[Key, str] = {}

    def acted(self, observed: Observed, action: Action) -> None:
        """Count one action that was carried out."""
        if not isinstance(action, QUIET):
            self.decisions.labels(type(action).__name__).inc()
        if isinstance(action, StartBuild):
            self.builds.inc()
        if isinstance(action, SaveRevision):
            before = observed.revision(action.revision.hash)
            if action.revision.result != (before.result if before else ""):
                self._ended(action.revision)

    def _ended(self, revision: Revision) -> None:
        if revision.result == "promoted":
            self.promotions.inc()
        elif revision.blocked:
            self.rollbacks.labels(revision.cause or "person").inc()

    def looked(self, key: Key, observed: Observed, status: dict[str, Any]) -> None:
        """Bring the gauges of a resource up to date."""
        phase, before = str(status.get("phase")), self._phases.get(key)
        if before not in (None, phase):
            self.phase.remove(*key, str(before))
        self._phases[key] = phase
        self.phase.labels(*key, phase).set(1)
        self.ready.labels(*key).set(status.get("readyReplicas") or 0)
        self.weight.labels(*key).set((status.get("weight") or 0) / 100)
        current = {r.hash for r in observed.revisions}
        for gone in self._revisions.get(key, set()) - current:
            _drop([self.accept_length, self.restarts, self.divergences], [(*key, gone)])
        self._revisions[key] = current
        for revision in observed.revisions:
            self.divergences.labels(*key, revision.hash)  # from 0 on: the first one has to count as an increase
            measured = revision.summary.get("acceptLength")
            if isinstance(measured, int | float):
                self.accept_length.labels(*key, revision.hash).set(measured)
        self._count_restarts(key, observed.sets)

    def _count_restarts(self, key: Key, sets: Iterable[EngineSet]) -> None:
        """Pods leave with their counts, so that only what is added to a pod's count is a restart."""
        before = self._restarts.get(key)
        now: dict[str, int] = {}
        for engines in sets:
            counter = self.restarts.labels(*key, engines.revision)
            for pod in engines.pods:
                now[pod.name] = pod.restarts
                if before is not None:
                    counter.inc(max(0, pod.restarts - before.get(pod.name, 0)))
        self._restarts[key] = now

    def forget(self, key: Key) -> None:
        """A resource is gone."""
        _drop([self.phase], [(*key, self._phases.pop(key, ""))])
        _drop([self.ready, self.weight], [key])
        gone = [(*key, r) for r in self._revisions.pop(key, set())]
        _drop([self.accept_length, self.restarts, self.divergences], gone)
        self._restarts.pop(key, None)

    def forget_all(self) -> None:
        """On standby another replica speaks for the resources."""
        for key in list(self._revisions):
            self.forget(key)


def _drop(metrics: Iterable[Gauge | Counter], labels: Iterable[tuple[str, ...]]) -> None:
    rows = list(labels)
    for metric in metrics:
        for row in rows:
            metric.remove(*row)
