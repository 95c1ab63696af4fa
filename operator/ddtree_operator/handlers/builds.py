"""Builds of one resource: which recipe it asks for, where that stands, and starting it when nobody has."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddtree_operator.api.names import LABEL_DEPLOYMENT, LABEL_REVISION
from ddtree_operator.api.spec import BuildSpec, DDTreeSpec, SeriesRef
from ddtree_operator.build.attached import attach
from ddtree_operator.build.config import BuildConfig
from ddtree_operator.build.errors import BuildError, RegistryError
from ddtree_operator.build.job import build_name, build_objects, image_reference
from ddtree_operator.build.recipe import Recipe, push_repository, push_secret, recipe_from_spec
from ddtree_operator.build.reference import parse_reference
from ddtree_operator.build.registry import RegistryClient, credentials_from_docker_config
from ddtree_operator.build.result import job_result, needs_events
from ddtree_operator.build.series import load_plugins, load_series, series_from_config_map
from ddtree_operator.core.facts import BuildFact, Problem, Revision
from ddtree_operator.core.units import epoch, seconds
from ddtree_operator.handlers.errands import Errands, StillOutError
from ddtree_operator.handlers.kube import CONFIG_MAP, EVENT, JOB, POD, SECRET, SERVICE, ApiError, Kube, Object
from ddtree_operator.placement.match import takes_gpus
from ddtree_operator.placement.needs import ImageNeeds
from ddtree_operator.rollout.manifests import owner_reference

ANNOTATION_ATTEMPT = "ddtree.dev/attempt"
LOG_LINES = 15
ASK_AGAIN = 30.0  # seconds after which a registry that gave no answer about an image is asked again


@dataclass(frozen=True, slots=True)
class Order:
    """A build as it is asked for."""

    recipe: Recipe
    repository: str
    secret: str
    timeout: int
    plugins: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """Name of its Job."""
        return build_name(self.recipe, self.repository)

    @property
    def tag(self) -> str:
        """Tagged reference under which its image is found."""
        return image_reference(self.recipe, self.repository)


class Builds:
    """Reads and starts builds."""

    def __init__(self, kube: Kube, config: BuildConfig) -> None:
        self._kube = kube
        self._config = config
        self._plugins = load_plugins(config.artefacts)
        self._needs: dict[str, ImageNeeds | None] = {}  # repo@sha256:… -> what it asks of GPUs
        self._attested: set[str] = set()  # repo@sha256:…
        self._silent: dict[str, float] = {}  # repo@sha256:… -> when its registry gave no answer
        self.errands = Errands()  # to registries

    async def order(self, spec: DDTreeSpec, namespace: str) -> Order | Problem | None:
        """What the resource asks to be built; None when it brings an image; a Problem it can heal from."""
        if spec.engine.image:
            return None
        build = spec.engine.build or BuildSpec()
        try:
            files = await self._series(build, namespace)
            if isinstance(files, Problem):
                return files
            recipe = recipe_from_spec(build, self._config, files, self._plugins)
            repository, secret = push_repository(build, self._config), push_secret(build, self._config)
        except BuildError as error:
            return Problem("BuildNotPossible", str(error))
        problem = await self._secret(secret, namespace) if secret else None
        return problem or Order(recipe, repository, secret, int(seconds(build.timeout)), self._plugins)

    async def _secret(self, name: str, namespace: str) -> Problem | None:
        """What is wrong with the push Secret. The operator may read Secrets by name only."""
        try:
            found = await self._kube.get(SECRET, namespace, name)
        except ApiError as error:
            if error.status != 403:
                raise
            text = (
                f"the operator may not read Secret {name}; add it to the chart's rbac.secrets or use one listed there"
            )
            return Problem("SecretForbidden", text)
        if found is None:
            return Problem("SecretMissing", f"Secret {name} does not exist in namespace {namespace}; create it")
        if ".dockerconfigjson" not in (found.get("data") or {}):
            text = f"Secret {name} has no key .dockerconfigjson; make it with kubectl create secret docker-registry"
            return Problem("SecretMissing", text)
        return None

    async def _series(self, build: BuildSpec, namespace: str) -> Mapping[str, bytes] | Problem:
        if not isinstance(build.series, SeriesRef):
            return load_series(build.series, self._config.artefacts)
        name = build.series.config_map_ref
        found = await self._kube.get(CONFIG_MAP, namespace, name)
        if found is None:
            return Problem("SeriesMissing", f"ConfigMap {name} does not exist in namespace {namespace}; create it")
        return series_from_config_map(found)

    async def fact(self, order: Order, resource: Object, revision: Revision) -> BuildFact:
        """Where the build stands: in the registry, in a Job, or nowhere."""
        namespace = resource["metadata"]["namespace"]
        job = await self._kube.get(JOB, namespace, order.name)
        digest: str | None = None
        if job is not None and not job["metadata"].get("deletionTimestamp"):
            pods = await self._kube.list(POD, namespace, f"job-name={order.name}")
            events: list[Object] = []
            if needs_events(job, pods):
                for involved in (order.name, *(pod["metadata"]["name"] for pod in pods)):
                    events += await self._kube.list(EVENT, namespace, fields=f"involvedObject.name={involved}")
            result = job_result(job, pods, events)
            if result.state == "running":
                waits = "BuildWaits" if result.sentence else ""
                message = result.sentence or "the builder is at work"
                return BuildFact("running", message=message, obstacle=waits, job=order.name)
            if result.state == "failed":
                if _counts(job, resource, revision):
                    return BuildFact("failed", message=result.sentence, log=await self._log(pods), job=order.name)
                return BuildFact("none")  # of an earlier attempt: start anew
            if _attempt(job) == _mark(revision):
                digest = result.digest
        if digest is None:  # what an earlier attempt has built may be gone by now: only the registry knows
            try:
                digest = await self._resolve(order, namespace)
            except StillOutError:
                waits = f"waiting for the registry: {silent(order.repository)}"
                return BuildFact("running", message=waits)
            except RegistryError as error:
                if error.heals:
                    return BuildFact(
                        "running", message=f"waiting for the registry: {error}", obstacle="RegistryUnreachable"
                    )
                return BuildFact("failed", message=str(error))
        if digest is None:
            builder = await self._builder(order.recipe.builder)
            if isinstance(builder, str):
                return BuildFact("running", message=builder, obstacle="BuilderMissing")
            return BuildFact("none")
        return BuildFact("done", image=f"{order.repository}@{digest}")

    async def _builder(self, kind: str) -> BuildConfig | str:
        """The settings with the builder's address in them; or what is missing, in one sentence."""
        config = self._config
        if kind == "buildah":
            told = "the operator has no image of buildah; set the chart's build.buildahImage or use builder: buildkit"
            return config if config.buildah_image else told
        if not config.builder_image:
            return "the operator has no image for builder Jobs; set the chart's builder.image or build.builderImage"
        if not config.builder_service:
            told = "the operator has no builder; set the chart's builder.enabled or builder.address"
            return config if config.builder_address else told
        namespace, _, name = config.builder_service.partition("/")
        try:
            found = await self._kube.get(SERVICE, namespace, name)
        except ApiError as error:
            if error.status != 403:
                raise
            return f"the operator may not read Service {config.builder_service} ({error}); install the chart's roles"
        address = service_address(found)
        if not address:
            state = "has no address" if found else "does not exist"
            return f"the builder's Service {config.builder_service} {state}; install the chart with builder.enabled"
        return replace(config, builder_address=address, builder_server_name=f"{name}.{namespace}.svc")

    async def _log(self, pods: list[Object]) -> str:
        """Last lines of the newest builder pod."""
        if not pods:
            return ""
        newest = max(pods, key=lambda p: str(p["metadata"].get("creationTimestamp", "")))["metadata"]
        return await self._kube.log(newest["namespace"], newest["name"], tail=LOG_LINES)

    async def needs(self, spec: DDTreeSpec, namespace: str, image: str) -> ImageNeeds | None:
        """What the image asks of GPUs, by its configuration; None when that is not known, which refuses nothing.

        The registry that builds go to is asked with the push Secret, any other, which the spec names then, without
        credentials. The answer is kept; without one it is asked again after a while. Raises StillOutError while its
        first answer is awaited.
        """
        if not takes_gpus(spec.placement) or image in self._needs:
            return self._needs.get(image)
        if time.monotonic() - self._silent.get(image, -ASK_AGAIN) < ASK_AGAIN:
            return None
        found: ImageNeeds | None = None
        try:
            secret = self._secret_for(spec.engine.build or BuildSpec(), image)

            async def ask() -> tuple[dict[str, str], dict[str, str]] | None:
                async with await self.registry(secret, namespace) as registry:
                    return await registry.settings(image)

            settings = await self.errands.of((namespace, secret, image), ask)
            found = ImageNeeds.of_image(*settings) if settings else None
        except RegistryError as error:
            if error.heals:
                self._silent[image] = time.monotonic()
                return None
        except BuildError:
            pass  # not a reference that a registry could be asked about
        self._needs[image] = found
        return found

    def _secret_for(self, build: BuildSpec, image: str) -> str:
        """The Secret that an image's registry may see: the push Secret's own, and no other."""
        try:
            ours = parse_reference(push_repository(build, self._config)).registry
        except BuildError:
            return ""  # nothing is ever built
        return push_secret(build, self._config) if parse_reference(image).registry == ours else ""

    def attested(self, image: str) -> bool:
        """Whether attaching statements to an image was tried."""
        return image in self._attested

    async def attest(self, spec: DDTreeSpec, namespace: str, image: str) -> str:
        """Attach provenance and bill of materials to an image of ours; "" when done, else one sentence why not.

        Tried once per image and operator.
        """
        self._attested.add(image)
        secret = push_secret(spec.engine.build or BuildSpec(), self._config)
        try:
            async with await self.registry(secret, namespace) as registry:
                await attach(registry, image)
        except RegistryError as error:
            return f"provenance and bill of materials could not be attached to {image}: {error}"
        return ""

    async def _resolve(self, order: Order, namespace: str) -> str | None:
        async def ask() -> str | None:
            async with await self.registry(order.secret, namespace) as registry:
                return await registry.resolve(order.tag)

        return await self.errands.of((namespace, order.secret, order.tag), ask)

    async def registry(self, name: str, namespace: str) -> RegistryClient:
        """A client with the credentials of the Secret ``name`` (empty for none)."""
        credentials = None
        if name:
            secret = await self._kube.get(SECRET, namespace, name)
            content = ((secret or {}).get("data") or {}).get(".dockerconfigjson", "")
            credentials = credentials_from_docker_config(base64.b64decode(content)) if content else None
        return RegistryClient(insecure=self._config.insecure_registries, credentials=credentials)

    async def start(self, order: Order, resource: Object, revision: Revision) -> None:
        """Create the Job, or replace one of an earlier attempt, which failed or whose image the registry has lost."""
        meta = resource["metadata"]
        config = await self._builder(order.recipe.builder)
        if isinstance(config, str):
            return  # gone since it was looked for; the next look says so
        objects = build_objects(
            order.recipe,
            name=order.name,
            namespace=meta["namespace"],
            owner=owner_reference(resource),
            config=config,
            plugins=order.plugins,
            repository=order.repository,
            secret=order.secret,
            timeout=order.timeout,
            labels={LABEL_DEPLOYMENT: meta["name"], LABEL_REVISION: revision.hash},
        )
        old = await self._kube.get(JOB, meta["namespace"], order.name)
        if old is not None:
            state = job_result(old, []).state
            mine = _counts(old, resource, revision) if state == "failed" else _attempt(old) == _mark(revision)
            if state != "running" and not mine:
                await self._kube.delete(JOB, meta["namespace"], order.name)
        for obj in objects:
            obj["metadata"] = {**obj["metadata"], "annotations": {ANNOTATION_ATTEMPT: _mark(revision)}}
            await self._kube.create(obj)


def silent(ref: str) -> str:
    """What is said of an image's registry that takes its time."""
    return f"the registry {parse_reference(ref).registry} has not answered yet"


def service_address(service: Object | None) -> str:
    """``tcp://host:port`` of a Service's first port; "" while it has no address of its own."""
    spec = (service or {}).get("spec") or {}
    host, ports = spec.get("clusterIP") or "None", spec.get("ports") or []
    if host == "None" or not ports:
        return ""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{ports[0]['port']}"


def _counts(job: Object, resource: Object, revision: Revision) -> bool:
    """Whether the failure of a Job is that of this attempt's build.

    Resources with one recipe share its Job, whoever made it: what ended within an attempt counts for it, so that
    each makes at most one, and none takes another's failure away before it was seen. An own Job says by its mark
    which attempt it was made for.
    """
    meta = job["metadata"]
    own = (meta.get("labels") or {}).get(LABEL_DEPLOYMENT) == resource["metadata"]["name"]
    if own and _attempt(job).partition("/")[0] == revision.hash:
        return _attempt(job) == _mark(revision)
    began = revision.progress.started_at if revision.progress else math.inf
    conditions = (job.get("status") or {}).get("conditions") or []
    ends = [epoch(c.get("lastTransitionTime")) for c in conditions if c.get("status") == "True"]
    return max(ends, default=0.0) + 1 > began  # stamps are cut to seconds


def _mark(revision: Revision) -> str:
    return f"{revision.hash}/{revision.attempt}"


def _attempt(job: Object) -> str:
    return str(job["metadata"].get("annotations", {}).get(ANNOTATION_ATTEMPT, ""))
