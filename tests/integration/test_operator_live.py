"""A rollout judged by what users send: they are waited for, their prompts decide, and nothing of them is left."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
from collections.abc import Iterator

import pytest

from ddtree_operator.api.names import LABEL_REVISION
from integration.operator_cluster import LIVE_NAME, Installed, Object

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-live", LIVE_NAME
WORD = "xylophone"  # in every user's prompt
LIVE: Object = {"canary": {"analysis": {"prompts": {"liveTraffic": {"whenQuiet": "wait"}}}}}
USERS = """
import json, sys, time, urllib.request
for i in range(600):
    body = json.dumps({"text": f"%s number {i}", "sampling_params": {"max_new_tokens": 4}}).encode()
    urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:30000/generate", body), timeout=30).read()
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def first(operator: Installed) -> Iterator[Object]:
    """A revision that serves, and the Secret that lets its prompts be read."""
    operator.api(NS).kubectl(
        "create", "secret", "generic", f"{NAME}-live-prompts", "--from-literal=token=only-for-these-tests-01"
    )
    operator.apply(NS, NAME, operator.spec("DFLASH", **LIVE))  # nobody is served yet: by the shipped prompts
    yield operator.reaches(NS, NAME, "Stable", "RolledBack")
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")


def test_users_decide_and_leave_no_trace(operator: Installed, first: Object) -> None:
    assert first["phase"] == "Stable", first["message"]
    operator.apply(NS, NAME, operator.spec("DDTREE", **LIVE))

    def waiting() -> bool:
        told: Object = operator.status(NS, NAME).get("analysis") or {}
        return str(told.get("reason", "")).startswith("waiting for users' prompts")

    operator.until(waiting, "the analysis waits for users")
    command = [operator.env.get("DDTREE_KUBECTL", "kubectl"), "-n", NS, "exec", f"deploy/{NAME}-{first['revision']}"]
    users = subprocess.Popen([*command, "--", "python3", "-c", USERS % WORD], env=operator.env)
    try:
        status = operator.reaches(NS, NAME, "Stable", "RolledBack", "Paused")
    finally:
        users.kill()
        users.wait()
    assert status["phase"] == "Stable", status["message"]
    told = operator.api(NS).ddtreectl("explain", NAME)
    assert told.returncode == 0, told.stdout
    assert "with prompts of users, whose text is not kept): the same verdict" in told.stdout
    maps = operator.children(NS, "configmaps", f"{LABEL_REVISION}={status['revision']}")
    lines = [gzip.decompress(base64.b64decode(m["binaryData"]["pairs.jsonl.gz"])).decode() for m in maps]
    assert lines
    rows = [json.loads(line) for text in lines for line in text.splitlines()[1:-1]]
    assert {row[1][0].rstrip("0123456789") for row in rows} == {"live-"}
    everything = json.dumps([maps, operator.events(NS, NAME), operator.get(NS, NAME)]) + "".join(lines)
    assert WORD not in everything + operator.last_words()
