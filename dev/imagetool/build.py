"""Builds an image: layers that the registry lacks, configuration, manifest, and a record of what came out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .dockerfile import image_config, parse
from .layers import EPOCH
from .pack import LAYER, Layer, push_layer
from .recipes import LayerRecipe, Recipe
from .registry import MANIFEST, Registry, RegistryError

CONFIG = "application/vnd.oci.image.config.v1+json"
CONFIG_FORMAT = "2"  # part of every image's key: raise it when equal inputs give another configuration
PREFIX = "ddtree"


@dataclass(frozen=True)
class Built:
    """An image in the registry. `bytes` counts packed layers, `unpacked` what they hold, base included."""

    ref: str
    digest: str
    key: str
    seconds: float
    bytes: int
    unpacked: int


class Builder:
    """Builds into `registry`, known to pods as `seen_as`; records lie in `cache`/images."""

    def __init__(self, root: Path, cache: Path, registry: Registry, seen_as: str, say: Callable[[str], None]) -> None:
        self.root, self.registry, self.seen_as, self.say = root, registry, seen_as, say
        self.records = cache / "images"
        (self.records / "layers").mkdir(parents=True, exist_ok=True)

    def build(self, recipe: Recipe, base: Built | None) -> Built:
        """The image, built when the record or the registry lacks it. Raises RegistryError, RecipeError, WheelError."""
        layers = recipe.layers()
        settings = (self.root / recipe.dockerfile).read_text()
        key = _sha256(
            "\0".join(
                [CONFIG_FORMAT, recipe.name, settings, base.digest if base else "", *(layer.key for layer in layers)]
            )
        )
        repo = f"{PREFIX}/{recipe.name}"
        known = self._known(recipe.name, key, repo)
        if known:
            return known
        with self._alone(recipe.name):
            return self._known(recipe.name, key, repo) or self._make(recipe, layers, settings, key, repo, base)

    def _known(self, name: str, key: str, repo: str) -> Built | None:
        """The record, if it is of this key and the registry still has the image."""
        try:
            record = json.loads((self.records / f"{name}.json").read_text())
            built = Built(**record)
        except (OSError, ValueError, TypeError):
            return None
        if built.key != key or not self.registry.has_manifest(repo, built.digest):
            return None
        ref = f"{self.seen_as}/{repo}@{built.digest}"
        return built if built.ref == ref else Built(**{**record, "ref": ref})

    def _make(
        self, recipe: Recipe, recipes: list[LayerRecipe], settings: str, key: str, repo: str, base: Built | None
    ) -> Built:
        started = time.monotonic()
        manifest_layers: list[dict[str, Any]] = []
        base_config: dict[str, Any] | None = None
        if base and recipe.base:
            source = f"{PREFIX}/{recipe.base}"
            manifest = self.registry.manifest(source, base.digest)
            base_config = json.loads(self.registry.blob(source, manifest["config"]["digest"]))
            manifest_layers += manifest["layers"]
            for item in manifest["layers"]:
                if not self.registry.mount(repo, item["digest"], source):
                    raise RegistryError(f"the registry lost a layer of {recipe.base}; build that image again")
        own = [self._layer(repo, item) for item in recipes]
        manifest_layers += [{"mediaType": LAYER, "digest": layer.digest, "size": layer.size} for layer in own]
        created = datetime.fromtimestamp(EPOCH, UTC).isoformat().replace("+00:00", "Z")
        config = _json(
            image_config(
                parse(settings),
                base_config,
                [(layer.diff_id, item.about) for layer, item in zip(own, recipes, strict=True)],
                created,
            )
        )
        self.registry.push_blob(repo, config, _digest(config))
        content = _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, "digest": _digest(config), "size": len(config)},
                "layers": manifest_layers,
            }
        )
        digest = _digest(content)
        self.registry.push_manifest(repo, content, digest)
        self.registry.push_manifest(repo, content, "dev")
        built = Built(
            ref=f"{self.seen_as}/{repo}@{digest}",
            digest=digest,
            key=key,
            seconds=round(time.monotonic() - started, 1),
            bytes=sum(item["size"] for item in manifest_layers),
            unpacked=sum(layer.unpacked for layer in own) + (base.unpacked if base else 0),
        )
        self._write(self.records / f"{recipe.name}.json", asdict(built))
        self.say(
            f"{recipe.name}: {built.bytes / 1e6:.0f} MB ({built.unpacked / 1e6:.0f} MB unpacked) in {built.seconds} s"
        )
        return built

    def _layer(self, repo: str, recipe: LayerRecipe) -> Layer:
        """A layer, from its record if the registry still has it."""
        path = self.records / "layers" / f"{_sha256(recipe.key)}.json"
        try:
            layer = Layer(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            layer = None
        if layer is None or not self.registry.has_blob(repo, layer.digest):
            self.say(f"packing {recipe.about}" + (f" ({recipe.takes})" if recipe.takes else ""))
            layer = push_layer(self.registry, repo, recipe.entries(), self.say)
            self._write(path, asdict(layer))
        return layer

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with (self.records / f".{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
