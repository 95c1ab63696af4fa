"""From a metric that falls to weight 0: real Prometheus and Alertmanager, the shipped rules, the operator's webhook."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from ddtree_operator.alerts.ledger import ANNOTATION_ALERTS
from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_REVISION
from ddtree_operator.core.units import epoch
from ddtree_operator.rollout.manifests import ANNOTATION_SWITCHED_AT
from integration.monitoring import ask, monitoring, now, post, send
from integration.operator_client import Client, start_client
from integration.operator_cluster import ALERTS_TOKEN, Installed, Object

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="Prometheus has to run beside the dev cluster's pods"),
]

NS, NAME = "op-alerts", "m"
LIMIT = 15.0  # seconds from the start of the alert to weight 0
REVISIONS = f"/apis/apps/v1/namespaces/{NS}/controllerrevisions"


@pytest.fixture(scope="module", autouse=True)
def _monitored(operator: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with monitoring(operator, NS, tmp_path_factory.mktemp("monitoring")):
        yield
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")


@pytest.fixture(scope="module")
def first(operator: Installed) -> str:
    """The first revision, promoted."""
    operator.apply(NS, NAME, operator.spec("DFLASH", replicas=2))
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    return str(status["revision"])


@pytest.fixture(scope="module")
def client(operator: Installed, first: str) -> Iterator[Client]:
    made = start_client(operator, NS, NAME, tokens=48)
    yield made
    operator.api(NS).kubectl("delete", "pod", "client", "--wait=false")


def service(operator: Installed) -> Object:
    found = operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}")
    assert found is not None
    return found


def serves(operator: Installed) -> str:
    return str(service(operator)["spec"]["selector"].get(LABEL_REVISION, "both"))


def recorded(operator: Installed, revision: str) -> list[Object]:
    found = operator.reader.get(f"{REVISIONS}/{NAME}-{revision}")
    assert found is not None
    rows: list[Object] = json.loads(found["metadata"]["annotations"].get(ANNOTATION_ALERTS, "[]"))
    return rows


def spoil(operator: Installed, revision: str) -> None:
    """From now on the engines of a revision accept little: the drafter no longer fits the traffic."""
    for pod in operator.children(NS, "pods", f"{LABEL_REVISION}={revision},ddtree.dev/pool=serving"):
        assert send(operator, f"http://{pod['status']['podIP']}:30000/sim", b'{"accept": "1.2"}') == 200


def measured(operator: Installed, revision: str, least: float) -> None:
    """Wait until Prometheus sees the accept length of a revision's traffic, and that it is well."""

    def look() -> bool:
        rows = ask(operator, f'ddtree:accept_length:ratio5m{{revision="{revision}"}}')
        return bool(rows) and float(rows[0]["value"][1]) > least

    operator.until(look, f"Prometheus sees an accept length above {least}")


def seconds_to_switch(operator: Installed, revision: str) -> float:
    """From the start of the first alert about a revision to the Service's last switch."""
    began = min(float(row["startsAt"]) for row in recorded(operator, revision))
    return epoch(service(operator)["metadata"]["annotations"][ANNOTATION_SWITCHED_AT]) - began


def test_a_canary_with_traffic_is_at_weight_0_within_seconds(operator: Installed, first: str, client: Client) -> None:
    steps = [{"analysis": {}}, {"weight": 50}, {"pause": {}}]
    operator.apply(NS, NAME, operator.spec("DDTREE", replicas=2, canary={"steps": steps}))
    status = operator.reaches(NS, NAME, "Paused", "RolledBack")
    assert status["phase"] == "Paused", status["message"]
    canary = status["revision"]
    assert serves(operator) == "both"
    measured(operator, canary, 2.0)
    assert recorded(operator, canary) == []
    spoil(operator, canary)
    status = operator.reaches(NS, NAME, "RolledBack", saying="DDTreeAcceptLengthLow")
    operator.until(lambda: serves(operator) == first, "the canary is at weight 0")
    seconds = seconds_to_switch(operator, canary)
    print(f"alert to weight 0: {seconds:.1f} s")
    assert seconds < LIMIT
    assert status["weight"] == 0
    assert status["stable"]["revision"] == first
    entry = next(h for h in status["history"] if h["revision"] == canary)
    assert (entry["result"], entry["by"]) == ("rolledBack", "alert DDTreeAcceptLengthLow")


def test_a_promoted_revision_is_taken_back_once_however_often_it_is_told(
    operator: Installed, first: str, client: Client
) -> None:
    watch = {"onDrop": "alert"}  # the operator's own watch would find it, too, but later
    spec = operator.spec("DDTREE", replicas=2, engine={"speculative": {"budget": 24}}, rollback=watch)
    operator.apply(NS, NAME, spec)
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    new = status["revision"]
    measured(operator, new, 2.0)
    spoil(operator, new)
    status = operator.reaches(NS, NAME, "RolledBack", saying="DDTreeAcceptLengthLow")
    operator.until(lambda: serves(operator) == first, "the first revision serves again")
    seconds = seconds_to_switch(operator, new)
    print(f"alert to the old revision serving again: {seconds:.1f} s, start of its pods included")
    assert status["stable"]["revision"] == first
    operator.until(lambda: running(operator) == {first}, "the other set is gone")

    # Alertmanager repeats every 3 s here. Now by hand, too: repeats, resolved, new starts, about what it went back to.
    rows = recorded(operator, new)
    labels = {"namespace": NS, "ddtreedeployment": NAME, "alertname": "DDTreeAcceptLengthLow"}
    for revision in (new, first):
        for state, print_ in (("firing", "a"), ("firing", "a"), ("resolved", "a"), ("firing", "b")):
            alert = {
                "status": state,
                "fingerprint": print_,
                "startsAt": now(),
                "labels": {**labels, "revision": revision},
            }
            assert post(operator, json.dumps({"version": "4", "alerts": [alert]}).encode(), ALERTS_TOKEN) == 200
    assert post(operator, json.dumps({"version": "4", "alerts": []}).encode(), "not-the-token") == 401
    judged = operator.until(lambda: alarms(operator, first), "alerts about the first revision were judged")
    assert {x["outcome"] for x in judged} == {"ignored"}
    assert serves(operator) == first
    assert recorded(operator, new) == rows
    assert [x["outcome"] for x in alarms(operator, new)].count("rolledBack") == 1
    events = [e for e in operator.events(NS, NAME, "RolledBack") if "DDTreeAcceptLengthLow" in e["message"]]
    assert len(events) <= 2  # one for each revision that was taken back, at most: equal ones are not repeated
    requests, failed = client.counts()
    assert (failed, client.errors()) == (0, [])
    assert requests > 100


def running(operator: Installed) -> set[str]:
    return {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)}


def alarms(operator: Installed, revision: str) -> list[Object]:
    found = operator.reader.get(f"{REVISIONS}/{NAME}-{revision}")
    assert found is not None
    assert found["metadata"]["labels"][LABEL_DEPLOYMENT] == NAME
    rows: list[Object] = json.loads(found["metadata"]["annotations"]["ddtree.dev/state"]).get("alarms", [])
    return rows


def test_the_operators_own_watch_finds_a_fall_without_any_alert(operator: Installed) -> None:
    quiet = {"alerts": {"enabled": False}}
    operator.apply(NS, "w", operator.spec("DFLASH", rollback=quiet))
    first = operator.reaches(NS, "w", "Stable")["revision"]
    operator.apply(NS, "w", operator.spec("DDTREE", rollback=quiet))
    status = operator.reaches(NS, "w", "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    spoil(operator, status["revision"])
    began = time.monotonic()
    status = operator.reaches(NS, "w", "RolledBack", saying="after promotion: accept length 1.")
    print(f"watch: rolled back after {time.monotonic() - began:.0f} s")
    entry = status["history"][-1]
    assert (entry["cause"], entry["wentBackTo"]) == ("watch", first)
    operator.until(lambda: operator.status(NS, "w")["stable"]["revision"] == first, "the first revision serves again")


def test_prometheus_sees_the_operators_own_numbers(operator: Installed, first: str) -> None:
    def value(query: str) -> float:
        rows = ask(operator, query)
        return float(rows[0]["value"][1]) if rows else -1.0

    assert value("sum(ddtree_operator_leader)") == 1
    assert value('ddtree_operator_rollbacks_total{cause="alert"}') == 2
    assert value(f'ddtree_deployment_phase{{namespace="{NS}", phase="RolledBack"}}') == 1
    assert value(f'ddtree_revision_accept_length{{revision="{first}"}}') > 1.5
    assert value('ddtree_operator_alert_notifications_total{code="401"}') >= 1
    assert value('ddtree_operator_alerts_total{result="recorded"}') >= 3
    assert value("ddtree_operator_watch_lag_seconds") < 30
