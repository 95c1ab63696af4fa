"""ddtreectl on rollouts that wait for a person, with the exit codes that scripts rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddtree_operator.api.names import LABEL_REVISION
from integration.ddt_api import Done
from integration.operator_cluster import NOWHERE, Installed, Object

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-commands", "m"
# A check that nobody answers: no verdict can come of that, however good the pairs are.
UNREAD = {"name": "nobody", "address": f"http://{NOWHERE}", "query": "vector(1)", "min": 1, "errorLimit": 1000}
FEW = {"analysis": {"maxPairs": 12, "prometheus": [UNREAD]}}


@pytest.fixture(scope="module", autouse=True)
def _cleaned(operator: Installed) -> Iterator[None]:
    yield
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")


def rollout(operator: Installed, *words: str) -> Done:
    """ddtreectl rollout VERB NAME …"""
    verb, *more = words
    return operator.api(NS).ddtreectl("rollout", verb, NAME, *more)


def code(operator: Installed, *words: str) -> int:
    return rollout(operator, *words).returncode


def serves(operator: Installed) -> str:
    """Revision that the Service selects."""
    service = operator.reader.get(f"/api/v1/namespaces/{NS}/services/{NAME}")
    return str(service["spec"]["selector"].get(LABEL_REVISION, "")) if service else ""


def tree(operator: Installed, budget: int, **more: object) -> Object:
    return operator.spec("DDTREE", engine={"speculative": {"budget": budget}}, **more)


def test_too_few_samples_never_pass_and_a_person_may(operator: Installed) -> None:
    operator.apply(NS, NAME, operator.spec("DFLASH", canary=FEW))
    status = operator.reaches(NS, NAME, "Paused", "Stable", "RolledBack")
    assert status["phase"] == "Paused", status["message"]
    assert status["analysis"]["outcome"] == "notYet"
    assert status["analysis"]["pairs"] == 12
    assert "all 12 pairs (maxPairs) are used up" in status["message"]
    assert operator.events(NS, NAME, "Paused")
    shown = rollout(operator, "status")
    assert shown.returncode == 3
    assert "it waits for a person" in shown.stderr
    assert serves(operator) == "none"
    done = rollout(operator, "promote", "--reason", "looked at it", "--wait")
    assert done.returncode == 0, done.stderr
    followed = rollout(operator, "status", "--watch", "--timeout", "3m")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert serves(operator) == status["revision"]


def test_abort_blocks_the_spec_and_retry_lifts_it(operator: Installed) -> None:
    stable = operator.reaches(NS, NAME, "Stable")["revision"]
    operator.apply(NS, NAME, tree(operator, 16, canary=FEW))
    operator.reaches(NS, NAME, "Paused")
    done = rollout(operator, "abort", "--reason", "not today", "--wait")
    assert done.returncode == 0, done.stderr
    status = operator.reaches(NS, NAME, "RolledBack")
    assert "not today" in status["message"]
    assert status["history"][-1]["result"] == "aborted"
    assert code(operator, "status") == 2
    assert code(operator, "promote") == 1  # nothing to promote
    assert serves(operator) == stable

    operator.kill_operator()  # what is blocked is not remembered in the process
    operator.until(lambda: operator.status(NS, NAME).get("phase") == "RolledBack", "still blocked")
    operator.until(lambda: running(operator) == {stable}, "only the stable set runs")
    api = operator.api(NS)
    assert api.apply(tree(operator, 16, canary=FEW), name=NAME, dry=False).returncode == 0  # the same again
    assert operator.status(NS, NAME)["phase"] == "RolledBack"

    assert code(operator, "retry", "--wait") == 0
    status = operator.reaches(NS, NAME, "Paused")
    assert "blocked" not in status
    assert code(operator, "promote", "--wait") == 0
    operator.reaches(NS, NAME, "Stable")
    assert code(operator, "retry") == 1  # nothing is blocked


def running(operator: Installed) -> set[str]:
    return {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)}


def test_undo_returns_to_the_revision_before_and_leaves_the_spec_alone(operator: Installed) -> None:
    status = operator.reaches(NS, NAME, "Stable")
    new = status["revision"]
    [old] = [e["revision"] for e in status["history"] if e["result"] == "promoted" and e["revision"] != new]
    spec = operator.get(NS, NAME)["spec"]
    assert code(operator, "undo", "--to-revision", "77") == 4
    done = rollout(operator, "undo", "--reason", "slow at noon", "--wait")
    assert done.returncode == 0, done.stderr
    operator.until(lambda: serves(operator) == old, "the old revision serves")
    status = operator.reaches(NS, NAME, "RolledBack", saying="slow at noon")
    assert status["stable"]["revision"] == old
    assert code(operator, "status") == 2
    operator.until(lambda: running(operator) == {old}, "the undone set is gone")
    assert operator.get(NS, NAME)["spec"] == spec


def test_pause_resume_and_skip(operator: Installed) -> None:
    steps = [{"weight": 0}, {"pause": {}}, {"analysis": {}}]
    operator.apply(NS, NAME, tree(operator, 24, canary={"steps": steps, **FEW}))
    status = operator.reaches(NS, NAME, "Paused", saying="waiting for promote")
    assert status["step"] == "2/3 pause"
    scaled(operator, serves(operator), 2)  # in the middle of a canary, as an autoscaler does
    assert operator.reaches(NS, NAME, "Paused")["revision"] == status["revision"]
    assert code(operator, "promote", "--wait") == 0
    operator.reaches(NS, NAME, "Paused", saying="inconclusive")
    assert code(operator, "skip") == 1  # needs a reason
    assert code(operator, "skip", "--reason", "measured elsewhere", "--wait") == 0
    status = operator.reaches(NS, NAME, "Stable")
    assert serves(operator) == status["revision"]
    assert status["readyReplicas"] == 2  # it was promoted at the size that was asked for meanwhile
    assert operator.api(NS).ddtreectl("rollout", "status", "nobody").returncode == 4


def scaled(operator: Installed, revision: str, replicas: int) -> None:
    """Scale the resource, and wait until so many engines of a revision are ready."""
    operator.api(NS).kubectl("scale", "ddt", NAME, f"--replicas={replicas}")

    def ready() -> bool:
        mine = [d for d in operator.engines(NS, NAME) if d["metadata"]["labels"][LABEL_REVISION] == revision]
        return [d["status"].get("readyReplicas") for d in mine] == [replicas]

    operator.until(ready, f"{replicas} engines of {revision} are ready")


def test_scaling_needs_no_canary(operator: Installed) -> None:
    before = operator.reaches(NS, NAME, "Stable")
    scaled(operator, before["revision"], 3)
    operator.until(lambda: operator.status(NS, NAME).get("readyReplicas") == 3, "three engines serve")
    scaled(operator, before["revision"], 1)
    status = operator.reaches(NS, NAME, "Stable")
    assert status["revision"] == before["revision"]
    assert len(status["history"]) == len(before["history"])


def test_a_command_for_a_revision_that_is_gone_does_nothing(operator: Installed) -> None:
    before = operator.reaches(NS, NAME, "Stable")["revision"]
    request = '{"id": "stale-1", "verb": "undo", "by": "t", "revision": "0123456789"}'
    operator.api(NS).kubectl("annotate", "ddt", NAME, f"ddtree.dev/action={request}", "--overwrite")
    status = operator.until(
        lambda: (s := operator.status(NS, NAME)).get("lastAction", {}).get("id") == "stale-1" and s, "it is answered"
    )
    assert "undo refused: it names revision 0123456789" in status["lastAction"]["result"]
    assert serves(operator) == before
    assert operator.events(NS, NAME, "RequestRefused")
