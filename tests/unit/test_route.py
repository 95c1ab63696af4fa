"""A user's HTTPRoute and the patches on it: what is ours changes, everything else stays byte for byte."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ddtree_operator.core.facts import Header, Share
from ddtree_operator.rollout import route
from ddtree_operator.rollout.route import Ours, RouteError
from faults.server import json_patch

pytestmark = pytest.mark.unit

OURS = Ours("m", "m-canary", "llm")
HEADER = Header("x-ddtree-canary", "true")


def rule(*refs: tuple[str, int], path: str = "/", **more: Any) -> dict[str, Any]:
    backends = [{"name": name, "port": 30000, "weight": weight} for name, weight in refs]
    return {"matches": [{"path": {"type": "PathPrefix", "value": path}}], "backendRefs": backends, **more}


def made(*rules: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "r", "namespace": "llm", "resourceVersion": "7", "generation": 1, **meta},
        "spec": {"parentRefs": [{"name": "gw"}], "rules": list(rules)},
    }


def given(live: dict[str, Any], share: Share, ours: Ours = OURS) -> dict[str, Any]:
    """The route after our patch; applied again there is nothing to do."""
    after = json_patch(live, route.patch(live, ours, share))
    assert route.patch(after, ours, share) == []
    assert route.share_of(after, ours) == share
    return after


NAMED = Share(named=True)
SHARES = [NAMED, Share(10), Share(50), Share(100), Share(0, HEADER), Share(50, HEADER)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("annotations", [None, {"a": "b"}])
def test_every_share_is_given_and_taken_back_without_a_trace(share: Share, annotations: Any) -> None:
    meta = {"annotations": annotations} if annotations else {}
    live = made(rule(("web", 1), path="/web"), rule(("m", 300), ("other", 100)), rule(("m", 4), path="/v1"), **meta)
    for other in SHARES:
        after = given(given(live, share), other)
        assert route.touched(after, OURS)
        assert route.named(after, OURS)
        back = given(after, Share())
        assert back["spec"] == live["spec"]
        assert (back["metadata"].get("annotations") or None) == annotations
        assert not route.touched(back, OURS)


def test_beside_a_foreign_backend_the_sum_of_ours_is_the_users() -> None:
    after = given(made(rule(("m", 300), ("other", 100))), Share(10))
    weights = {ref["name"]: ref["weight"] for ref in after["spec"]["rules"][0]["backendRefs"]}
    assert weights == {"m": 270, "m-canary": 30, "other": 100}
    with pytest.raises(RouteError, match="multiply all weights of that rule by 100"):
        route.patch(made(rule(("m", 1), ("other", 1))), OURS, Share(10))


def test_a_backend_that_the_user_gave_nothing_stays_at_nothing() -> None:
    live = made(rule(("m", 0), ("other", 1)), rule(("m", 1), path="/b"))
    after = given(live, Share(20, HEADER))
    weights = {ref["name"]: ref["weight"] for ref in after["spec"]["rules"][1]["backendRefs"]}
    assert weights == {"m": 0, "m-canary": 0, "other": 1}


def test_a_canary_that_is_only_named_gets_nothing_and_ours_keeps_its_weight() -> None:
    live = made(rule(("m", 7), ("other", 1)), rule(("m", 1), path="/b", name="b"))
    for ours, expected in ((OURS, [7, 1]), (Ours("m", "m-canary", "llm", ("b",)), [None, 1])):
        after = given(given(live, Share(100 if ours.rules else 0, HEADER), ours), NAMED, ours)
        assert len(after["spec"]["rules"]) == 2
        for one, before, main in zip(after["spec"]["rules"], live["spec"]["rules"], expected, strict=True):
            if main is None:
                assert one == before
            else:
                assert [r["weight"] for r in one["backendRefs"] if r["name"].startswith("m")] == [main, 0]


def test_a_route_that_lost_our_backend_is_let_go_when_the_canary_should_only_be_named() -> None:
    after = given(made(rule(("m", 1)), rule(("web", 1), path="/web")), Share(10))
    after["spec"]["rules"][0]["backendRefs"] = [r for r in after["spec"]["rules"][0]["backendRefs"] if r["weight"] < 50]
    back = json_patch(after, route.patch(after, OURS, NAMED))
    assert [ref["name"] for one in back["spec"]["rules"] for ref in one["backendRefs"]] == ["m", "web"]


def test_only_named_rules_are_touched() -> None:
    live = made(rule(("m", 1), name="a"), rule(("m", 1), path="/b", name="b"))
    ours = Ours("m", "m-canary", "llm", ("b",))
    after = given(live, Share(50), ours)
    assert after["spec"]["rules"][0] == live["spec"]["rules"][0]
    with pytest.raises(RouteError, match="no rule named c"):
        route.patch(live, Ours("m", "m-canary", "llm", ("c",)), Share(50))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([rule(("web", 1))], "no rule has a backendRef to Service m; add one"),
        ([rule(("m", 1), ("m", 2))], "rule 1 names Service m 2 times"),
        ([rule(("m", 1), path=f"/{i}") for i in range(9)], "it would have 18 rules"),
    ],
)
def test_a_route_that_cannot_carry_weights_is_told_so(rules: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RouteError, match=words):
        route.patch(made(*rules), OURS, Share(50, HEADER))


def test_a_backend_of_another_kind_or_namespace_is_not_ours() -> None:
    live = made(rule(("m", 1)))
    for over in ({"namespace": "else"}, {"kind": "ServiceImport", "group": "x"}):
        strange = copy.deepcopy(live)
        strange["spec"]["rules"][0]["backendRefs"][0] |= over
        with pytest.raises(RouteError):
            route.check(strange, OURS)


def test_our_backend_removed_by_hand_comes_back_where_the_canary_stands_alone() -> None:
    after = given(made(rule(("m", 1)), rule(("m", 100), ("other", 100), path="/b")), Share(10))
    for one in after["spec"]["rules"]:
        one["backendRefs"] = [ref for ref in one["backendRefs"] if ref["name"] != "m"]
    back = json_patch(after, route.patch(after, OURS, Share()))
    names = [[ref["name"] for ref in one["backendRefs"]] for one in back["spec"]["rules"]]
    assert names == [["m"], ["other"]]


def test_every_patch_names_the_version_that_it_was_made_from() -> None:
    first = route.patch(made(rule(("m", 1))), OURS, Share(10))[0]
    assert first == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}


def test_an_unreadable_annotation_is_written_anew() -> None:
    live = made(rule(("m", 95), ("m-canary", 5)), annotations={route.annotation("m"): "{"})
    assert route.share_of(live, OURS) is None
    weights = given(live, Share(10))["spec"]["rules"][0]["backendRefs"]
    assert [ref["weight"] for ref in weights] == [90, 10]


def status(**conditions: Any) -> dict[str, Any]:
    told = [{"type": t, "status": s, "observedGeneration": g, "reason": "R"} for t, (s, g) in conditions.items()]
    return {"parents": [{"parentRef": {"name": "gw"}, "conditions": told}]}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "no controller has answered for Gateway llm/gw"),
        (status(ResolvedRefs=("True", 1)), "it is not accepted by Gateway llm/gw yet"),
        (
            status(Accepted=("True", 0), ResolvedRefs=("True", 1)),
            "it is not accepted by Gateway llm/gw yet, as it was",
        ),
        (status(Accepted=("False", 1), ResolvedRefs=("True", 1)), "it is not accepted by Gateway llm/gw (R: )"),
        (status(Accepted=("True", 1), ResolvedRefs=("False", 1)), "it is not resolved by Gateway llm/gw (R: )"),
        (status(Accepted=("True", 1), ResolvedRefs=("True", 1)), ""),
    ],
)
def test_a_step_waits_for_the_route_as_it_is_written_now(state: dict[str, Any], words: str) -> None:
    found = route.readiness({**made(rule(("m", 1))), "status": state}, {})
    assert found.startswith(words) if words else found == ""


def test_a_step_waits_for_the_gateway() -> None:
    live = {**made(rule(("m", 1))), "status": status(Accepted=("True", 1), ResolvedRefs=("True", 1))}
    assert route.readiness(live, {("llm", "gw"): None}) == "Gateway llm/gw does not exist"
    waits = {"metadata": {"generation": 1}, "status": {"conditions": []}}
    assert route.readiness(live, {("llm", "gw"): waits}) == "Gateway llm/gw is not programmed yet"


def test_what_is_remembered_is_small() -> None:
    after = given(made(*(rule(("m", 1), path=f"/{i}") for i in range(16))), Share(10))
    text = after["metadata"]["annotations"][route.annotation("m")]
    assert len(json.loads(text)["weights"]) == 16
    assert len(text) < 500
