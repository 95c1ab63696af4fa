"""A registry that takes its time: who needs it waits for it, everybody else goes on; a real one behind a slow proxy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_operator.api import names
from ddtree_operator.handlers.queue import WORKERS
from integration.ddt_api import ROOT
from integration.operator_cluster import NOWHERE, Installed, Object, condition
from integration.test_operator_inputs import NO_SERIES, put_config_map

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS = "op-slow"
SLOW = [f"slow-{i}" for i in range(WORKERS + 2)]
DELAY = 12  # seconds before each answer: less than the operator's patience with one, far more than a look takes


@pytest.fixture(scope="module")
def slow(operator: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Resources whose images are looked for in a slow registry, and one where the answer never gets whole."""
    if "DDTREE_CLUSTER" not in operator.env:
        pytest.skip("needs the dev cluster, to put a proxy into its namespaces")
    log = tmp_path_factory.mktemp("slow") / "log"
    proxy = [ROOT / "dev/cluster/cluster", "run", sys.executable, Path(__file__).with_name("slow_proxy.py")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*proxy, NOWHERE, operator.registry, str(DELAY), "12"],
            env=os.environ | operator.env, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        operator.until(lambda: b"listening on" in log.read_bytes(), "the proxy listens")
        put_config_map(operator, NS, "plain", NO_SERIES)
        specs = {name: at(operator, f"ddtree/{name}") for name in SLOW}
        specs |= {"trickle": at(operator, "ddtree/trickle/engine"), "other": operator.spec()}
        items = [
            {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
            for name, spec in specs.items()
        ]
        together = {"apiVersion": "v1", "kind": "List", "items": items}
        operator.api(NS).kubectl("apply", "-f", "-", stdin=json.dumps(together))
        yield
        operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=true")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def at(operator: Installed, path: str) -> Object:
    return operator.built(engine={"build": {"push": {"repository": f"{NOWHERE}/{path}"}}})


def test_others_go_on_and_who_waits_says_for_what(operator: Installed, slow: None) -> None:
    told = f"waiting for the registry: the registry {NOWHERE} has not answered yet"
    for name in SLOW:
        operator.reaches(NS, name, "Building", saying=told)
    assert operator.reaches(NS, "other", "Starting", "Analyzing", "Stable", seconds=DELAY)
    operator.api(NS).kubectl("delete", "ddt", *SLOW[1:], "--wait=false")  # before each has a Job
    assert operator.reaches(NS, "other", "Stable", "RolledBack")["phase"] == "Stable"


def test_a_late_answer_is_an_answer(operator: Installed, slow: None) -> None:
    """The registry has no such image, so the builder is asked."""
    operator.until(lambda: operator.status(NS, SLOW[0]).get("build", {}).get("job"), "a Job builds it")


def test_an_answer_that_never_gets_whole_fails_nothing_before_its_time(operator: Installed, slow: None) -> None:
    told = f"waiting for the registry: the registry {NOWHERE} does not answer within 15 s"
    status = operator.reaches(NS, "trickle", "Building", saying=told)
    assert condition(status, "Built")["reason"] == "RegistryUnreachable"
    assert operator.reaches(NS, "trickle", "Building", "RolledBack", "Pending")["phase"] == "Building"
