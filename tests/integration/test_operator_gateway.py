"""A canary's weights in a user's HTTPRoute, through a real Contour and Envoy, while a client asks all the time."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ddtree_operator.api.names import LABEL_REVISION
from integration.ddt_api import ROOT
from integration.operator_client import Client, start_client
from integration.operator_cluster import Installed, Object, condition
from integration.operator_streams import FAST, SLOW, Streams, engines_at, hurry_when_leaving, pace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-gateway", "m"
ADDRESS = "http://10.88.0.1:8080"
ROUTES = f"/apis/gateway.networking.k8s.io/v1/namespaces/{NS}/httproutes"
TESTERS = {"x-ddtree-canary": "true"}
PREFIX = {"path": {"type": "PathPrefix", "value": "/"}}
RULES: list[Object] = [
    {
        "matches": [{"path": {"type": "PathPrefix", "value": "/web"}, "method": "GET"}],
        "backendRefs": [{"name": "web", "port": 80, "weight": 3}],
    },
    {
        "matches": [PREFIX],
        "filters": [
            {"type": "ResponseHeaderModifier", "responseHeaderModifier": {"set": [{"name": "x-by", "value": "us"}]}}
        ],
        "backendRefs": [{"name": NAME, "port": 30000}],
        "timeouts": {"request": "0s"},  # none: Envoy's own of 15 s would cut every longer stream
    },
]


class Admin(http.client.HTTPConnection):
    """Envoy's admin socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("envoy")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


@pytest.fixture(scope="module")
def admin(operator: Installed) -> Path:
    """A Gateway that Contour and Envoy serve; Envoy's admin socket."""
    if "DDTREE_CLUSTER" not in operator.env:
        pytest.skip("needs the dev cluster's gateway")
    done = subprocess.run(
        [ROOT / "dev/cluster/cluster", "gateway", f"{NS}/gw"],
        env=operator.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Path(operator.env["KUBECONFIG"]).parent / "live" / "envoy-admin.sock"


def requests(admin: Path) -> dict[str, int]:
    """Requests that Envoy has sent to each Service of the namespace so far."""
    with closing(Admin(admin)) as connection:
        connection.request("GET", "/stats?filter=upstream_rq_total&format=json")
        stats = json.loads(connection.getresponse().read())["stats"]
    out: dict[str, int] = {}
    for stat in stats:
        if "value" in stat and stat["name"].startswith(f"cluster.{NS}_"):
            service = stat["name"].split(".")[1].split("_")[1]
            out[service] = out.get(service, 0) + int(stat["value"])
    return out


def refused(operator: Installed, client: Client) -> str:
    """What went wrong, in the client's words and in Envoy's, whose flags say why; "" when nothing did."""
    if not client.counts()[1]:
        return ""
    return "\n".join([*client.errors(), *answers(operator, "50")])


def answers(operator: Installed, status: str) -> list[str]:
    """Lines of Envoy's log about answers with such a status; the last ones come some seconds late."""
    log = (Path(operator.env["KUBECONFIG"]).parent / "log" / "envoy.log").read_text()
    return [line for line in log.splitlines() if f'" {status}' in line]


def rules(operator: Installed) -> list[Object]:
    found = operator.reader.get(f"{ROUTES}/r")
    assert found is not None
    return list(found["spec"]["rules"])


def weights(operator: Installed) -> dict[str, int]:
    return {ref["name"]: ref["weight"] for ref in rules(operator)[-1]["backendRefs"]}


@pytest.fixture(scope="module")
def written(operator: Installed, admin: Path) -> list[Object]:
    """The user's route, as the API server keeps it, and a first revision behind it."""
    api = operator.api(NS)
    web = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}
    spec = {"parentRefs": [{"name": "gw"}], "rules": RULES}
    route = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": "r"}, "spec": spec}
    api.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [web, route]}))
    operator.apply(NS, NAME, resource(operator, "DFLASH", [{"analysis": {}}]))
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    return rules(operator)


def resource(operator: Installed, algorithm: str, steps: list[Object], **more: object) -> Object:
    traffic = {"gateway": {"httpRoute": "r"}}
    return operator.spec(algorithm, replicas=2, traffic=traffic, canary={"steps": steps}, **more)


@pytest.fixture(scope="module")
def client(operator: Installed, written: list[Object]) -> Iterator[Client]:
    made = start_client(operator, NS, NAME, every=0.02, target=ADDRESS)
    yield made
    operator.api(NS).kubectl("delete", "pod", "client", "--wait=false")


def paused_at(operator: Installed, step: str) -> Object:
    return dict(
        operator.until(
            lambda: (s := operator.status(NS, NAME)).get("phase") == "Paused" and s.get("step") == step and s,
            f"paused at {step}: {operator.status(NS, NAME).get('message')}",
        )
    )


def share(client: Client, admin: Path, count: int) -> float:
    """Share of the canary in about so many requests, as Envoy counts them."""
    before = requests(admin)
    client.more(count)
    after = requests(admin)
    canary, main = (after.get(s, 0) - before.get(s, 0) for s in (f"{NAME}-canary", NAME))
    assert canary + main >= count * 0.9
    return canary / (canary + main)


STEPS: list[Object] = [
    {"headerRoute": {}},
    {"pause": {}},
    {"analysis": {}},
    {"weight": 10},
    {"pause": {}},
    {"weight": 50},
    {"pause": {}},
]


def test_testers_reach_the_canary_by_their_header_alone(
    operator: Installed, admin: Path, client: Client, written: list[Object]
) -> None:
    operator.apply(NS, NAME, resource(operator, "DDTREE", STEPS))
    status = paused_at(operator, "2/7 pause")
    assert condition(status, "Routed")["status"] == "True", condition(status, "Routed")
    before = requests(admin).get(f"{NAME}-canary", 0)
    ask = (
        "import json,urllib.request as u\n"
        "for _ in range(20):\n"
        "  b=json.dumps({'text':'a','sampling_params':{'max_new_tokens':2}}).encode()\n"
        f"  r=u.Request('{ADDRESS}/generate',b,{{'Content-Type':'application/json','x-ddtree-canary':'true'}})\n"
        "  a=u.urlopen(r,timeout=60); assert a.headers['x-by']=='us'; a.read()\n"
    )
    done = operator.api(NS).kubectl("exec", "client", "--", "python3", "-c", ask)
    assert done.returncode == 0, done.stderr
    client.more(20)
    assert requests(admin)[f"{NAME}-canary"] - before == 20
    assert weights(operator) == {NAME: 1, f"{NAME}-canary": 0}
    assert rules(operator)[1] == written[0]
    assert not refused(operator, client)


def test_envoy_divides_the_requests_as_the_steps_say(
    operator: Installed, admin: Path, client: Client, written: list[Object]
) -> None:
    for step, wanted in (("5/7 pause", 0.1), ("7/7 pause", 0.5)):
        assert operator.api(NS).ddtreectl("rollout", "promote", NAME).returncode == 0
        paused_at(operator, step)
        found = share(client, admin, 400)
        assert abs(found - wanted) < 0.07, f"{found:.3f} instead of {wanted}"  # 0.5 +- 2.8 sigma of 400
        assert not refused(operator, client)
        assert rules(operator)[1] == written[0]
        assert {k: v for k, v in rules(operator)[2].items() if k != "backendRefs"} == {
            k: v for k, v in written[1].items() if k != "backendRefs"
        }


def test_an_edit_by_hand_at_half_of_the_traffic_is_healed(
    operator: Installed, client: Client, written: list[Object]
) -> None:
    assert not refused(operator, client)
    before = len(answers(operator, "503 NC "))
    body = json.dumps([{"op": "replace", "path": "/spec/rules", "value": written}])
    operator.api(NS).kubectl("patch", "httproute", "r", "--type=json", "-p", body)
    operator.until(lambda: weights(operator) == {NAME: 50, f"{NAME}-canary": 50}, "the split is back", 60)
    client.more(50)
    # Contour takes a backend away in two updates, unordered. Whoever removes one that has weight has the requests
    # between them refused (flag NC); that was the edit, not the way back.
    failed = client.forgive()
    operator.until(lambda: len(answers(operator, "503 NC ")) == before + failed, f"{failed} refused: {client.errors()}")


def test_an_abort_gives_the_route_back_and_cuts_no_stream(
    operator: Installed, client: Client, written: list[Object]
) -> None:
    canary = engines_at(operator, NS, operator.status(NS, NAME)["revision"])
    pace(operator, NS, canary, SLOW)
    with Streams(operator, NS, ADDRESS, 3, TESTERS) as streams:
        began = time.monotonic()
        assert operator.api(NS).ddtreectl("rollout", "abort", NAME).returncode == 0
        operator.until(lambda: not weights(operator).get(f"{NAME}-canary"), "weight 0")
        assert time.monotonic() - began < 30
        operator.reaches(NS, NAME, "RolledBack")
        operator.until(lambda: rules(operator) == written, "the route is as it was written")
        operator.until(lambda: len(operator.engines(NS, NAME)) == 1, "the canary is gone")
        assert streams.under_way()
        assert hurry_when_leaving(operator, NS, canary) > 0
        streams.end()
    client.more(50)
    assert not refused(operator, client)


def test_a_promotion_and_its_undo_leave_the_route_as_it_was_written_and_cut_no_stream(
    operator: Installed, client: Client, written: list[Object]
) -> None:
    before = operator.status(NS, NAME)["stable"]["revision"]
    old = engines_at(operator, NS, before)
    pace(operator, NS, old, SLOW)
    steps = [{"headerRoute": {}}, {"weight": 10}, {"analysis": {}}, {"weight": 50}, {"pause": {}}]
    with Streams(operator, NS, ADDRESS, 3) as early:
        operator.apply(NS, NAME, resource(operator, "DDTREE", steps, engine={"speculative": {"budget": 24}}))
        status = paused_at(operator, "5/5 pause")
        new = engines_at(operator, NS, status["revision"])
        pace(operator, NS, new, SLOW)
        with Streams(operator, NS, ADDRESS, 3, TESTERS) as late:  # by the canary's Service, which goes before they end
            assert operator.api(NS).ddtreectl("rollout", "promote", NAME).returncode == 0
            operator.reaches(NS, NAME, "Stable")
            operator.until(lambda: rules(operator) == written, "the route is as it was written")
            operator.until(lambda: running(operator) == {status["revision"]}, "the old set is gone")
            assert early.under_way()
            assert hurry_when_leaving(operator, NS, old) > 0
            early.end()
            beside = f"/api/v1/namespaces/{NS}/services/{NAME}-canary"
            operator.until(lambda: operator.reader.get(beside) is None, "the canary's Service is gone")
            assert late.under_way()
            pace(operator, NS, new, FAST)
            late.end()
    client.more(50)
    assert operator.api(NS).ddtreectl("rollout", "undo", NAME).returncode == 0
    operator.reaches(NS, NAME, "RolledBack")
    operator.until(lambda: running(operator) == {before}, "the old revision serves again")
    client.more(50)
    assert not refused(operator, client)
    assert rules(operator) == written
    assert operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}-canary") is None
    found = operator.reader.get(f"{ROUTES}/r")
    assert found is not None
    assert not [k for k in found["metadata"].get("annotations", {}) if "ddtree" in k]


def running(operator: Installed) -> set[str]:
    return {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)}


def test_nobody_noticed(operator: Installed, client: Client) -> None:
    client.more(10)
    assert not refused(operator, client)
    assert client.counts()[0] > 800
