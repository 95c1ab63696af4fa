"""The image that a rollback needs is tagged before a canary starts; a rollout stops when its registry lost it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ddtree_operator.api.names import LABEL_REVISION
from ddtree_operator.build import RegistryClient
from integration.operator_cluster import Installed, Object
from integration.test_operator_inputs import put_config_map

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

NS, NAME = "op-way-back", "m"


@dataclass(frozen=True)
class Followed:
    """What ``build logs -f`` said while the build ran: exit code, the log, and what stood on the terminal."""

    code: int
    log: str
    screen: str


def follow(operator: Installed) -> Followed:
    """``build logs -f`` with its stderr on a terminal, to its end."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "ddtreectl", "build", "logs", NAME, "-f", "-n", NS]
    env = operator.env | {"COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        screen: list[bytes] = []
        reader = threading.Thread(target=_read, args=(ours, screen))
        reader.start()
        log, _ = process.communicate(timeout=240)
        reader.join(60)
    os.close(ours)
    return Followed(process.returncode, log, b"".join(screen).decode())


def _read(terminal: int, into: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while data := os.read(terminal, 65536):
            into.append(data)


@pytest.fixture(scope="module")
def followed(operator: Installed) -> Iterator[Followed]:
    """The build of an image that no other test uses, watched while it runs."""
    put_config_map(operator, NS, "own", {"series": f"# {uuid.uuid4().hex}\n"})
    operator.apply(NS, NAME, operator.built("DFLASH", series="own"))
    operator.until(lambda: operator.status(NS, NAME).get("build", {}).get("job"), "the build has a Job")
    yield follow(operator)
    operator.api(NS).kubectl("delete", "ddt", "--all", "--wait=false")


@pytest.fixture(scope="module")
def first(operator: Installed, followed: Followed) -> Object:
    """A revision that serves, from that image."""
    return operator.reaches(NS, NAME, "Stable", "RolledBack")


def test_a_build_is_followed_with_a_line_that_says_the_step(followed: Followed) -> None:
    assert followed.code == 0, followed.screen
    assert "pushing manifest for" in followed.log
    assert re.search(r"\r\x1b\[K\x1b\[36m\d+:\d\d  \w+ \d+/\d+: RUN ", followed.screen), followed.screen
    assert re.search(r"built sha256:[0-9a-f]{64}", followed.screen.replace("\r\n", "\n")), followed.screen


def local(operator: Installed, ref: str) -> str:
    """An image as this process reaches it."""
    return ref.replace(operator.registry, operator.env.get("DDTREE_REGISTRY_LOCAL", operator.registry), 1)


def test_the_built_image_carries_provenance_and_a_bill_of_materials(operator: Installed, first: Object) -> None:
    assert first["phase"] == "Stable", first["message"]
    inspect = [sys.executable, "-m", "ddtreectl", "image", "inspect", local(operator, first["stable"]["image"])]
    told = operator.api(NS).run(*inspect, "--plain-http")
    assert told.returncode == 0, told.stderr
    attested = next(line for line in told.stdout.splitlines() if line.startswith("attested"))
    assert re.search(r"provenance of \d+ inputs .*; \d\d+ packages", attested), attested
    materials = json.loads(operator.api(NS).run(*inspect, "--plain-http", "--sbom").stdout)
    assert {"sglang", "libc6"} < {package["name"] for package in materials["packages"]}
    assert not operator.events(NS, NAME, "NotAttested")


def test_the_log_of_the_build_can_be_read_and_followed(operator: Installed, first: Object) -> None:
    shown = operator.api(NS).ddtreectl("build", "logs", NAME)
    assert shown.returncode == 0, shown.stderr
    assert f"pushing manifest for {first['stable']['image'].partition('@')[0]}" in shown.stdout
    followed = operator.api(NS).ddtreectl("build", "logs", NAME, "-f")
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout == shown.stdout
    assert followed.stderr == f"built {first['stable']['image'].partition('@')[2]}\n"
    none = operator.api(NS).ddtreectl("build", "logs", "nobody")
    assert none.returncode == 4


def test_the_serving_image_is_tagged_before_a_canary_starts(operator: Installed, first: Object) -> None:
    assert first["phase"] == "Stable", first["message"]
    image, uid = first["stable"]["image"], operator.get(NS, NAME)["metadata"]["uid"]
    operator.apply(NS, NAME, operator.built("DDTREE", series="own"))
    operator.reaches(NS, NAME, "Analyzing", "Stable", "RolledBack")
    reference = local(operator, image)
    tag = f"{reference.partition('@')[0]}:keep-{NAME}-{first['revision']}-{uid[:8]}"

    async def resolve() -> str | None:
        host = tag.partition("/")[0]
        async with RegistryClient(insecure=frozenset({host})) as client:
            return await client.resolve(tag)

    assert asyncio.run(resolve()) == image.partition("@")[2]
    assert operator.reaches(NS, NAME, "Stable", "RolledBack")["phase"] == "Stable"
    assert not operator.events(NS, NAME, "RollbackImageNotKept")


def test_a_lost_image_stops_the_next_rollout_until_a_person_says_so(operator: Installed, first: Object) -> None:
    before = operator.status(NS, NAME)
    host, _, rest = local(operator, before["stable"]["image"]).partition("/")
    path, _, digest = rest.partition("@")
    request = urllib.request.Request(f"http://{host}/v2/{path}/manifests/{digest}", method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 202
    put_config_map(operator, NS, "next", {"series": f"# {uuid.uuid4().hex}\n"})
    operator.apply(NS, NAME, operator.built("DDTREE", series="next"))
    status = operator.reaches(NS, NAME, "Paused", "Stable", "RolledBack")
    assert status["phase"] == "Paused", status["message"]
    assert "its registry has lost the manifest of" in status["message"]
    assert before["stable"]["image"] in status["message"]
    running = {d["metadata"]["labels"][LABEL_REVISION] for d in operator.engines(NS, NAME)}
    assert running == {before["revision"]}
    assert operator.events(NS, NAME, "RollbackImageLost")
    done = operator.api(NS).ddtreectl("rollout", "resume", NAME, "--wait")
    assert done.returncode == 0, done.stderr
    assert operator.reaches(NS, NAME, "Stable", "RolledBack")["phase"] == "Stable"
