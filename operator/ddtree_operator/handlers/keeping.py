"""The image that a rollback would need: whether its registry still has it, and a tag that keeps it there."""

from __future__ import annotations

import time
from dataclasses import replace

from ddtree_operator.api.spec import BuildSpec, DDTreeSpec
from ddtree_operator.build.config import BuildConfig
from ddtree_operator.build.errors import BuildError, RegistryError
from ddtree_operator.build.recipe import push_repository, push_secret
from ddtree_operator.build.reference import parse_reference
from ddtree_operator.build.registry import RegistryClient
from ddtree_operator.core.facts import Revision, WayBack
from ddtree_operator.handlers.builds import Builds, silent
from ddtree_operator.handlers.errands import StillOutError
from ddtree_operator.handlers.kube import Object

FRESH = 10.0  # seconds for which an answer holds
ENTRIES = 500


def keep_tag(resource: Object, revision: str) -> str:
    """Tag under which a revision's image is kept: never moved, and no other resource's."""
    meta = resource["metadata"]
    return f"keep-{meta['name']}-{revision}-{str(meta['uid'])[:8]}"


class Keeping:
    """Asks about images of revisions that served. Only the registry that builds go to: no other one expects us."""

    def __init__(self, builds: Builds, config: BuildConfig) -> None:
        self._builds = builds
        self._config = config
        self._seen: dict[tuple[str, str, int], tuple[float, WayBack | None]] = {}  # image, rollout -> when, and what
        self._tags: dict[tuple[str, str], bool] = {}  # (image, tag) -> tried; also where the registry refused

    async def way_back(
        self, spec: DDTreeSpec, resource: Object, revision: Revision, rollout: Revision
    ) -> WayBack | None:
        """Whether the image of ``revision`` could be pulled again; None when nobody can tell.

        Looked for anew in every rollout, and in one now and then.
        """
        image = revision.image
        if not image or not self._ours(spec, image):
            return None
        key = (image, rollout.hash, rollout.attempt)
        at, found = self._seen.get(key, (-FRESH, None))
        if time.monotonic() - at >= FRESH:
            try:
                found = await self._ask(spec, resource, image)
            except StillOutError:
                return WayBack("away", silent(image))
            if len(self._seen) > ENTRIES:
                self._seen.clear()
            self._seen[key] = (time.monotonic(), found)
        kept = self._tags.get((image, keep_tag(resource, revision.hash)), False)
        return replace(found, kept=kept) if found else None

    async def _ask(self, spec: DDTreeSpec, resource: Object, image: str) -> WayBack | None:
        async def ask() -> str:
            async with await self._client(spec, resource) as registry:
                return await registry.lacks(image)

        try:
            lacking = await self._builds.errands.of((resource["metadata"]["uid"], image), ask)
        except RegistryError as error:
            return WayBack("away", str(error)) if error.heals else None
        return WayBack("lost", lacking) if lacking else WayBack("there")

    async def keep(self, spec: DDTreeSpec, resource: Object, revision: Revision) -> str:
        """Tag a revision's image; "" when done, else one sentence why not. Tried once per image and operator."""
        tag = keep_tag(resource, revision.hash)
        if self._tags.get((revision.image, tag)) or not self._ours(spec, revision.image):
            return ""
        if len(self._tags) > ENTRIES:
            self._tags.clear()
        self._tags[revision.image, tag] = True
        try:
            async with await self._client(spec, resource) as registry:
                await registry.tag(revision.image, tag)
        except RegistryError as error:
            return f"the image of revision {revision.number} could not be tagged {tag}: {error}"
        return ""

    async def release(self, spec: DDTreeSpec, resource: Object, revision: Revision) -> bool:
        """Take the tag of a forgotten revision away; False where that is not possible."""
        if not revision.image or not self._ours(spec, revision.image):
            return True
        try:
            async with await self._client(spec, resource) as registry:
                repository = parse_reference(revision.image).repository
                return await registry.untag(repository, keep_tag(resource, revision.hash))
        except RegistryError:
            return False

    def _ours(self, spec: DDTreeSpec, image: str) -> bool:
        try:
            ours = parse_reference(push_repository(spec.engine.build or BuildSpec(), self._config))
            return parse_reference(image).registry == ours.registry
        except BuildError:
            return False

    async def _client(self, spec: DDTreeSpec, resource: Object) -> RegistryClient:
        secret = push_secret(spec.engine.build or BuildSpec(), self._config)
        return await self._builds.registry(secret, resource["metadata"]["namespace"])
