"""``replicas`` taken out of a manifest: what the API server then shows, and what becomes of the set."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ddtree_operator.core.held_size import LAST_APPLIED, left_out
from faults.sim import Sim, run

pytestmark = pytest.mark.unit

Object = dict[str, Any]


def entry(manager: str, *, replicas: bool, applied: bool = False, sub: str = "", operation: str = "Update") -> Object:
    """One of managedFields, as far as it matters here; seen at a real API server in these combinations."""
    fields: Object = {"f:spec": {"f:model": {}} | ({"f:replicas": {}} if replicas else {})}
    if applied:
        fields["f:metadata"] = {"f:annotations": {".": {}, f"f:{LAST_APPLIED}": {}}}
    return {"manager": manager, "operation": operation, "fieldsV1": fields} | ({"subresource": sub} if sub else {})


APPLY = "kubectl-client-side-apply"
SCALED = entry("kubectl", replicas=True, sub="scale")


@pytest.mark.parametrize(
    ("wanted", "replicas", "applied", "fields"),
    [
        (True, 1, {}, [entry(APPLY, replicas=True, applied=True)]),
        (True, 1, {}, [entry("argocd-controller", replicas=True, applied=True), entry("kubectl-edit", replicas=False)]),
        (False, 1, {"replicas": 1}, [entry(APPLY, replicas=False, applied=True)]),
        (False, 4, {}, [SCALED, entry(APPLY, replicas=False, applied=True)]),
        (False, 1, {}, [SCALED, entry(APPLY, replicas=False, applied=True)]),  # an autoscaler wants one
        (False, 1, {}, [entry(APPLY, replicas=True), entry(APPLY, replicas=False, applied=True)]),  # scaled from 1 to 1
        (False, 1, {}, [entry("kubectl-patch", replicas=True), entry(APPLY, replicas=False, applied=True)]),
        (False, 1, {}, [entry(APPLY, replicas=False, applied=True)]),  # scaled to 2 and back after an omission
        (False, 1, None, [entry("kubectl", replicas=False, operation="Apply")]),  # server-side
        (False, 1, None, [entry("helm", replicas=True)]),
        (False, 1, {}, []),
    ],
)
def test_only_a_default_that_an_applied_manifest_left_to_is_nobodys_choice(
    wanted: bool, replicas: int, applied: Object | None, fields: list[Object]
) -> None:
    notes = {} if applied is None else {LAST_APPLIED: json.dumps({"spec": applied})}
    assert (
        left_out({"metadata": {"annotations": notes, "managedFields": fields}, "spec": {"replicas": replicas}})
        is wanted
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", "{}", '{"spec": null}'])
def test_an_annotation_of_any_kind_is_no_reason_to_fail(text: str) -> None:
    meta = {"annotations": {LAST_APPLIED: text}, "managedFields": [entry(APPLY, replicas=True, applied=True), {}]}
    assert not left_out({"metadata": meta, "spec": {"replicas": 1}})


def write(sim: Sim, fields: list[Object], **spec: Any) -> None:
    """A person applies a manifest, or scales."""
    obj = copy.deepcopy(sim.resource)
    obj["spec"] |= spec
    obj["metadata"]["managedFields"] = fields
    obj["metadata"]["annotations"][LAST_APPLIED] = json.dumps({"spec": {"model": {"path": "/m"}}})
    sim.server.put("ddtreedeployments", obj)


def test_the_set_keeps_its_size_through_a_rollout_and_a_lost_status_until_somebody_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        sim = Sim(monkeypatch, replicas=4)

        def sizes() -> list[int]:
            return sorted(d["spec"]["replicas"] for d in sim.of("deployments"))

        def left_out_events() -> list[str]:
            return [e["message"] for e in sim.server.events if e["reason"] == "ReplicasLeftOut"]

        await sim.until("Stable")
        write(sim, [entry(APPLY, replicas=True, applied=True)], replicas=1)
        await sim.run(60)
        assert sizes() == [4]
        assert (sim.status["replicas"], sim.status["heldReplicas"]) == (4, 4)
        assert sim.status["message"].count("4 are kept until somebody sets them") == 1
        assert len(left_out_events()) == 1
        sim.retuned(15)
        await sim.until("Stable")
        await sim.run(60)
        assert sizes() == [4]  # and so does the revision that took over
        sim.resource["status"].clear()
        await sim.run(60)
        assert sizes() == [4]
        write(sim, [SCALED], replicas=2)
        await sim.run(60)
        assert sizes() == [2]
        assert "heldReplicas" not in sim.status
        write(sim, [SCALED], replicas=1)
        await sim.run(60)
        assert sizes() == [1]

    run(story())
