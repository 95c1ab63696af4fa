"""Builds as the operator sees them: what a resource asks for, where it stands, what its image needs."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.api.names import LABEL_DEPLOYMENT
from ddtree_operator.api.spec import DDTreeSpec
from ddtree_operator.build.errors import RegistryError
from ddtree_operator.core.facts import Problem, Progress, Revision
from ddtree_operator.core.units import iso
from ddtree_operator.handlers import builds as module
from ddtree_operator.handlers.builds import Builds, Order, service_address
from ddtree_operator.handlers.kube import EVENT, JOB, POD, ApiError, Kind
from ddtree_operator.placement import ImageNeeds
from unit.test_build_recipe import CONFIG, PLUGINS, SERIES

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]

Object = dict[str, Any]
META = {"name": "m", "namespace": "ns", "uid": "u"}
RESOURCE = {"apiVersion": "v", "kind": "k", "metadata": META}
SERVICE = {"spec": {"clusterIP": "172.30.4.5", "ports": [{"port": 1234}]}}
IMAGE = "registry.example/team/engine@sha256:" + "1" * 64


class Kube:
    """Answers from a table of objects by plural and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.lists: dict[str, list[Object]] = {}
        self.created: list[Object] = []
        self.deleted: list[str] = []
        self.forbidden = False

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        self.deleted.append(name)

    async def create(self, obj: Object) -> Object:
        self.created.append(obj)
        return obj

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        if self.forbidden and kind.plural == "services":
            raise ApiError(403, "no rights")
        return self.objects.get((kind.plural, name))

    async def list(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        return self.lists.get(kind.plural, [])


class Registry:
    """Stands in for RegistryClient: fixed labels, or an error; counts its calls."""

    answer: dict[str, str] | RegistryError | None = None
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, **_: Any) -> None: ...

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def settings(self, ref: str) -> tuple[dict[str, str], dict[str, str]] | None:
        Registry.asked.append(ref)
        if isinstance(Registry.answer, RegistryError):
            raise Registry.answer
        return (Registry.answer, {}) if Registry.answer else None

    async def resolve(self, ref: str) -> str | None:
        if isinstance(Registry.answer, RegistryError):
            raise Registry.answer
        return None


@pytest.fixture
def kube() -> Kube:
    return Kube()


@pytest.fixture
def builds(kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    (tmp_path / "series/sglang-0.5.23").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    for name, content in SERIES.items():
        (tmp_path / "series/sglang-0.5.23" / name).write_bytes(content)
    for name, content in PLUGINS.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    Registry.answer, Registry.asked = None, []
    monkeypatch.setattr(module, "RegistryClient", Registry)
    config = replace(CONFIG, artefacts=str(tmp_path), builder_image="b", builder_service="build/buildkitd")
    return Builds(kube, config)  # type: ignore[arg-type]


def spec(**build: Any) -> DDTreeSpec:
    return DDTreeSpec.model_validate({"model": {"path": "/m"}, "drafter": {"path": "/d"}, "engine": {"build": build}})


async def refused(builds: Builds, **build: Any) -> str:
    found = await builds.order(spec(**build), "ns")
    assert isinstance(found, Problem)
    return found.message


async def ordered(builds: Builds, **build: Any) -> Order:
    found = await builds.order(spec(**build), "ns")
    assert isinstance(found, Order), found
    return found


async def test_what_cannot_be_built_is_a_problem_that_says_what_to_do(builds: Builds, kube: Kube) -> None:
    push = {"repository": "registry.example/team/engine", "secretRef": "cred"}
    assert await refused(builds, push=push) == "Secret cred does not exist in namespace ns; create it"
    kube.objects["secrets", "cred"] = {"data": {"password": "x"}}
    assert "has no key .dockerconfigjson" in await refused(builds, push=push)
    assert (
        await refused(builds, series={"configMapRef": "s"}) == "ConfigMap s does not exist in namespace ns; create it"
    )
    kube.objects["configmaps", "s"] = {"data": {"series": "gone.patch"}}
    assert "names gone.patch, which is missing" in await refused(builds, series={"configMapRef": "s"})
    assert "is not known (known: sglang-0.5.23)" in await refused(builds, series="sglang-9")


async def test_a_series_from_a_config_map_shares_the_build_of_an_equal_one(builds: Builds, kube: Kube) -> None:
    data = {name: content.decode() for name, content in SERIES.items()}
    for name in ("one", "two"):
        kube.objects["configmaps", name] = {"data": data}
    orders = [await ordered(builds, series={"configMapRef": name}) for name in ("one", "two")]
    assert orders[0].name == orders[1].name


async def test_a_job_without_pods_tells_its_events(builds: Builds, kube: Kube) -> None:
    order = await ordered(builds)
    kube.objects[JOB.plural, order.name] = {"metadata": {"name": order.name}, "status": {}}
    kube.lists[POD.plural] = []
    kube.lists[EVENT.plural] = [{"reason": "FailedCreate", "message": "Error creating: exceeded quota: q"}]
    fact = await builds.fact(order, RESOURCE, Revision("h", 1, {}))
    assert (fact.state, fact.message) == ("running", "the builder's pod cannot be created: exceeded quota: q")


async def test_a_registry_that_is_down_is_waited_for_and_one_that_denies_is_not(builds: Builds) -> None:
    order = await ordered(builds)
    Registry.answer = RegistryError("no way there", heals=True)
    fact = await builds.fact(order, RESOURCE, Revision("h", 1, {}))
    assert (fact.state, fact.message) == ("running", "waiting for the registry: no way there")
    Registry.answer = RegistryError("denied", heals=False)
    fact = await builds.fact(order, RESOURCE, Revision("h", 1, {}))
    assert (fact.state, fact.message) == ("failed", "denied")


def done_job(order: Order, revision: Revision) -> Object:
    mark = f"{revision.hash}/{revision.attempt}"
    status = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": order.name,
            "labels": {LABEL_DEPLOYMENT: "m"},
            "annotations": {module.ANNOTATION_ATTEMPT: mark},
        },
        "status": status,
    }


async def test_what_an_earlier_attempt_built_counts_only_while_the_registry_has_it(builds: Builds, kube: Kube) -> None:
    order = await ordered(builds)
    state = {"terminated": {"exitCode": 0, "message": f"digest: sha256:{'1' * 64}"}}
    kube.lists[POD.plural] = [
        {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"name": "build", "state": state}]}}
    ]
    kube.objects["services", "buildkitd"] = SERVICE
    kube.objects[JOB.plural, order.name] = done_job(order, Revision("h", 1, {}))
    assert (await builds.fact(order, RESOURCE, Revision("h", 1, {}))).image == f"{order.repository}@sha256:{'1' * 64}"
    again = Revision("h", 1, {}, attempt=1)
    assert (await builds.fact(order, RESOURCE, again)).state == "none"  # the registry has lost it
    await builds.start(order, RESOURCE, again)
    assert kube.deleted == [order.name]
    assert {o["metadata"]["annotations"][module.ANNOTATION_ATTEMPT] for o in kube.created} == {"h/1"}


@pytest.mark.parametrize("hashes", [("h", "i"), ("h", "h")])
async def test_a_failing_recipe_is_told_to_all_who_ask_for_it_and_none_builds_it_twice(
    hashes: tuple[str, str], builds: Builds, kube: Kube
) -> None:
    """Two resources look in turn, each slower than a build takes to fail; then the second tries again."""
    order = await ordered(builds)
    kube.objects["services", "buildkitd"] = SERVICE
    now, began = 1_000_000.0, dict.fromkeys(("a", "b"), 0)

    def resource(name: str) -> Object:
        return {**RESOURCE, "metadata": {**META, "name": name, "uid": name}}

    def failed() -> None:
        """The Job that was made last has failed, a second after it began."""
        job = next(o for o in reversed(kube.created) if o["kind"] == "Job")
        condition = {"type": "Failed", "status": "True", "lastTransitionTime": iso(now + 1), "message": "no"}
        kube.objects[JOB.plural, order.name] = {**job, "status": {"conditions": [condition]}}

    async def look(name: str, revision: Revision) -> str:
        nonlocal now
        fact = await builds.fact(order, resource(name), revision)
        if fact.state == "none":
            await builds.start(order, resource(name), revision)
            began[name] += 1
            failed()
        now += 10
        return fact.state

    first = Revision(hashes[0], 1, {}, progress=Progress(now, now))
    assert await look("a", first) == "none"
    second = Revision(hashes[1], 1, {}, progress=Progress(now, now))
    assert await look("b", second) == "none"  # what failed before it began says nothing about now
    for _ in range(3):
        assert [await look("a", first), await look("b", second)] == ["failed", "failed"]
    again = Revision(hashes[1], 1, {}, attempt=1, progress=Progress(now, now))
    assert [await look("b", again), await look("a", first), await look("b", again)] == ["none", "failed", "failed"]
    assert began == {"a": 1, "b": 2}


async def test_needs_are_read_once_and_credentials_go_to_our_registry_alone(
    builds: Builds, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets: list[str] = []

    async def registry(name: str, namespace: str) -> Registry:
        secrets.append(name)
        return Registry()

    monkeypatch.setattr(builds, "registry", registry)
    asked = spec(push={"repository": "registry.example/team/engine", "secretRef": "regcred"})
    Registry.answer = {"ddtree.dev/facts": '{"cuda": "13.0", "arch": ["sm_90"]}'}
    for _ in range(3):
        assert await builds.needs(asked, "ns", IMAGE) == ImageNeeds((13, 0), ("sm_90",))
    elsewhere = IMAGE.replace("registry.example", "other.example")
    assert await builds.needs(asked, "ns", elsewhere) == ImageNeeds((13, 0), ("sm_90",))
    assert (Registry.asked, secrets) == ([IMAGE, elsewhere], ["regcred", ""])


async def test_nobody_is_asked_for_engines_without_a_gpu(builds: Builds) -> None:
    Registry.answer = {"ddtree.dev/facts": '{"cuda": "13.0"}'}
    cpu = DDTreeSpec.model_validate(
        {"model": {"path": "/m"}, "drafter": {"path": "/d"}, "placement": {"gpu": {"perReplica": 0}}}
    )
    assert await builds.needs(cpu, "ns", IMAGE) is None
    assert Registry.asked == []


async def test_an_image_that_a_registry_will_not_show_is_refused_nowhere(builds: Builds) -> None:
    Registry.answer = RegistryError("denied", heals=False)
    for _ in range(2):
        assert await builds.needs(spec(), "ns", IMAGE.replace("registry.example", "other.example")) is None
    assert len(Registry.asked) == 1


async def test_a_registry_that_does_not_answer_refuses_nobody_and_is_asked_again(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    Registry.answer = RegistryError("down", heals=True)
    for _ in range(2):
        assert await builds.needs(spec(), "ns", IMAGE) is None
    assert Registry.asked == [IMAGE]
    Registry.answer = {"ddtree.dev/facts": '{"cuda": "13.0"}'}
    clock[0] += module.ASK_AGAIN
    assert await builds.needs(spec(), "ns", IMAGE) == ImageNeeds((13, 0), ())


async def test_the_builder_is_where_the_api_server_says(builds: Builds, kube: Kube) -> None:
    order = await ordered(builds)
    revision = Revision("h", 1, {})
    fact = await builds.fact(order, RESOURCE, revision)
    assert (fact.state, fact.obstacle) == ("running", "BuilderMissing")
    assert fact.message.startswith("the builder's Service build/buildkitd does not exist; ")
    kube.objects["services", "buildkitd"] = {"spec": {"clusterIP": "None", "ports": [{"port": 1234}]}}
    assert "build/buildkitd has no address" in (await builds.fact(order, RESOURCE, revision)).message
    kube.objects["services", "buildkitd"] = SERVICE
    assert (await builds.fact(order, RESOURCE, revision)).state == "none"
    await builds.start(order, RESOURCE, revision)
    job = next(o for o in kube.created if o["kind"] == "Job")
    env = {e["name"]: e["value"] for e in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["BUILDER"] == "--addr tcp://172.30.4.5:1234"
    kube.forbidden = True
    assert "may not read Service build/buildkitd" in (await builds.fact(order, RESOURCE, revision)).message


async def test_an_installation_without_a_builder_says_so(builds: Builds) -> None:
    order = await ordered(builds)
    for lacking, words in (("builder_service", "has no builder"), ("builder_image", "no image for builder")):
        builds._config = replace(builds._config, **{lacking: ""})  # type: ignore[arg-type]
        assert words in (await builds.fact(order, RESOURCE, Revision("h", 1, {}))).message


async def test_addresses_of_services() -> None:
    assert service_address({"spec": {"clusterIP": "fd00::1", "ports": [{"port": 9}]}}) == "tcp://[fd00::1]:9"
    assert service_address({"spec": {"clusterIP": "10.0.0.1"}}) == ""
    assert service_address(None) == ""


async def test_credentials_of_the_secret_reach_the_registry(
    builds: Builds, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Any] = []
    monkeypatch.setattr(Registry, "__init__", lambda self, **more: got.append(more["credentials"]))
    config = b'{"auths": {"registry.example": {"username": "u", "password": "p"}}}'
    kube.objects["secrets", "cred"] = {"data": {".dockerconfigjson": base64.b64encode(config).decode()}}
    push = {"repository": "registry.example/team/engine", "secretRef": "cred"}
    await builds.needs(spec(push=push), "ns", IMAGE)
    assert got[0]["registry.example"].user == "u"
