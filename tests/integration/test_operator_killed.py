"""The operator's pod killed at awkward moments: the same end, nothing done twice. And at rest, nothing is written."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_REVISION
from integration.operator_cluster import RELEASE, SYSTEM, Installed, Object, processes, recording

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-killed", "m"
MASKED = {
    "series": "0001-mask.patch\n",
    "0001-mask.patch": "--- a/sglang/srt/sim_profile.py\n+++ b/sglang/srt/sim_profile.py\n@@ -16,2 +16,2 @@\n "
    '# How the tree is masked in the verify step: "tree" or "causal".\n-MASK = "tree"\n+MASK = "causal"\n',
}


@pytest.fixture(scope="module", autouse=True)
def _cleaned(operator: Installed) -> Iterator[None]:
    new = f"# {uuid.uuid4()}\n"  # a recipe that no earlier run has built
    series = {"plain": {"series": new}, "masked": {**MASKED, "series": new + MASKED["series"]}}
    maps = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": n}, "data": d} for n, d in series.items()]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": maps})
    operator.api(NS).kubectl("apply", "-f", "-", stdin=listed)
    yield
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")


def jobs(operator: Installed) -> list[Object]:
    return operator.children(NS, "jobs", f"{LABEL_DEPLOYMENT}={NAME}", "/apis/batch/v1")


def killed_when(operator: Installed, moment: Callable[[], object], what: str) -> None:
    operator.until(moment, what)
    operator.kill_operator()


def once(operator: Installed, status: Object) -> None:
    """Promoted once, recorded once, one set serves."""
    events = [e for e in operator.events(NS, NAME, "Promoted") if status["revision"] in e["message"]]
    assert len(events) <= 1  # none when the operator died between the record and the Event
    assert [e["result"] for e in status["history"] if e["revision"] == status["revision"]] == ["promoted"]
    operator.until(
        lambda: {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)} == {status["revision"]},
        "one set is left",
    )


def test_killed_during_a_build_it_does_not_build_twice(operator: Installed) -> None:
    operator.apply(NS, "calm", operator.spec("NONE"))
    operator.apply(NS, NAME, operator.built("DFLASH"))
    killed_when(operator, lambda: jobs(operator), "the build Job is there")
    [before] = jobs(operator)
    status = operator.reaches(NS, NAME, "Stable", "RolledBack")
    assert status["phase"] == "Stable", status["message"]
    assert "@sha256:" in status["stable"]["image"]
    assert [j["metadata"]["uid"] for j in jobs(operator)] == [before["metadata"]["uid"]]
    assert jobs(operator)[0]["status"]["succeeded"] == 1
    once(operator, status)


def test_killed_during_the_analysis_it_goes_on_where_it_was(operator: Installed) -> None:
    image = operator.reaches(NS, NAME, "Stable")["stable"]["image"]
    with recording(operator.reader, NS) as seen:
        operator.apply(NS, NAME, operator.built("DDTREE", canary={"analysis": {"minPairs": 30, "maxTokens": 48}}))
        killed_when(operator, lambda: pairs(operator) >= 3, "the analysis is under way")
        killed_when(operator, lambda: selected(operator) == operator.status(NS, NAME).get("revision"), "it switched")
        status = operator.reaches(NS, NAME, "Stable", "RolledBack")
        assert status["phase"] == "Stable", status["message"]
        once(operator, status)
    assert status["stable"]["image"] == image  # the same recipe: found, not built
    assert len(jobs(operator)) == 1
    to_new = [v for v, _, s in seen.of("services") if s["spec"]["selector"].get(LABEL_REVISION) == status["revision"]]
    back = [
        v
        for v, _, s in seen.of("services")
        if v > min(to_new) and s["spec"]["selector"].get(LABEL_REVISION) != status["revision"]
    ]
    assert not back  # one switch, never undone


def selected(operator: Installed) -> str:
    service = operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}")
    return str(service["spec"]["selector"].get(LABEL_REVISION)) if service else ""


def pairs(operator: Installed) -> int:
    return int(operator.status(NS, NAME).get("analysis", {}).get("pairs", 0))


def test_killed_before_a_rollback_is_cleaned_up_it_cleans_up(operator: Installed) -> None:
    stable = operator.reaches(NS, NAME, "Stable")["revision"]
    operator.apply(NS, NAME, operator.built("DDTREE", series="masked"))
    killed_when(operator, lambda: operator.status(NS, NAME).get("phase") == "Building", "the second build is under way")
    status = operator.reaches(NS, NAME, "RolledBack", "Stable")
    assert status["phase"] == "RolledBack", status["message"]
    assert "refused to serve: self-check failed, the verify mask is causal" in status["message"]
    operator.until(
        lambda: {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)} == {stable},
        "the refused engines are gone",
    )
    assert len(jobs(operator)) == 2


def test_a_process_that_is_killed_is_started_anew_and_ready_by_its_own_word(operator: Installed) -> None:
    labels = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/name=ddtree-operator"

    def pod() -> Object:
        pods = operator.children(SYSTEM, "pods", labels)
        [one] = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
        return one

    name, before = pod()["metadata"]["name"], pod()["status"]["containerStatuses"][0]["restartCount"]
    began = time.monotonic()
    for process in processes(name):
        os.kill(process, signal.SIGKILL)

    def again() -> bool:
        [state] = pod()["status"]["containerStatuses"]
        return bool(state["ready"]) and state["restartCount"] > before

    if "DDTREE_CLUSTER" in operator.env:  # else the process is out of reach
        operator.until(again, "the operator runs again")
        print(f"process killed: ready again after {time.monotonic() - began:.1f} s")
    for path in ("healthz", "readyz"):
        url = f"/api/v1/namespaces/{SYSTEM}/pods/{name}:8080/proxy/{path}"
        assert operator.api(SYSTEM).kubectl("get", "--raw", url).stdout == "ok"


def test_at_rest_nothing_is_written(operator: Installed) -> None:
    """Half a minute, three resyncs: neither a blocked resource nor a stable one changes, nor anything of theirs."""
    operator.reaches(NS, NAME, "RolledBack")
    operator.reaches(NS, "calm", "Stable")
    operator.until(lambda: len(operator.engines(NS, "calm")) == 1, "its baseline is gone")
    operator.until(lambda: not [p for p in pods(operator) if "deletionTimestamp" in p["metadata"]], "no pod is leaving")
    path = f"/apis/ddtree.dev/v1alpha1/namespaces/{NS}/ddtreedeployments"
    before = versions(operator)
    listed = operator.reader.get(path)
    assert listed is not None
    changes = list(operator.reader.watch(path, 30, listed["metadata"]["resourceVersion"]))
    assert changes == []
    assert versions(operator) == before


def test_a_wiped_status_comes_back_as_it_was(operator: Installed) -> None:
    for name, phase in ((NAME, "RolledBack"), ("calm", "Stable")):
        before = operator.reaches(NS, name, phase)
        operator.api(NS).kubectl("patch", "ddt", name, "--subresource=status", "--type=merge", "-p", '{"status": null}')
        after = operator.reaches(NS, name, phase)
        for field in ("revision", "stable", "message", "history", "blocked", "acceptLength", "analysis"):
            assert after.get(field) == before.get(field), field


def pods(operator: Installed) -> list[Object]:
    return operator.children(NS, "pods", LABEL_DEPLOYMENT)


def versions(operator: Installed) -> dict[str, str]:
    """Resource versions of the resources and all their children."""
    kinds = {
        "ddtreedeployments": "/apis/ddtree.dev/v1alpha1",
        "deployments": "/apis/apps/v1",
        "controllerrevisions": "/apis/apps/v1",
        "jobs": "/apis/batch/v1",
        "services": "/api/v1",
        "configmaps": "/api/v1",
        "pods": "/api/v1",
    }
    return {
        f"{kind}/{obj['metadata']['name']}/{obj['metadata']['uid']}": obj["metadata"]["resourceVersion"]
        for kind, prefix in kinds.items()
        for obj in operator.children(NS, kind, prefix=prefix)
    }
