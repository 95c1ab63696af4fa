"""A recipe names everything that decides what is inside an engine image; equal recipes are one image. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddtree_operator.api.spec import BuildSpec, SeriesRef

from .config import BuildConfig, Device
from .errors import BuildError
from .reference import parse_reference
from .series import check_series
from .wheels import WheelRef, check_python, parse_wheel_name, wheel_ref

TEMPLATE_VERSION = 5  # raise when the Dockerfile or its scripts change what ends up in the image

# Wheels of ours that go into every engine image, by normalised distribution name and device.
PLUGINS: dict[Device, tuple[str, ...]] = {"cuda": ("sglang-ddtree",), "cpu": ("sglang-cpu", "sglang-ddtree")}


@dataclass(frozen=True, slots=True)
class Plugin:
    """A wheel that travels in the build context; its bytes are kept apart."""

    filename: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides an image's content. Addresses say where to fetch from and do not count."""

    base_image: str  # repo@sha256:…
    sglang_version: str
    sglang: WheelRef
    series_name: str
    series: tuple[tuple[str, str], ...]  # file name → content (UTF-8), sorted by name
    plugins: tuple[Plugin, ...]
    kernels: tuple[WheelRef, ...]
    device: Device
    builder: str
    builder_version: str
    platform: str
    template: int = TEMPLATE_VERSION

    def content(self) -> dict[str, Any]:
        """What the digest is taken of: hashes and names, no addresses; JSON types only."""
        return {
            "base": self.base_image.partition("@")[2],
            "builder": {"kind": self.builder, "version": self.builder_version},
            "device": self.device,
            "kernels": [{"name": w.filename, "sha256": w.sha256} for w in self.kernels],
            "platform": self.platform,
            "plugins": [{"name": p.filename, "sha256": p.sha256} for p in self.plugins],
            "series": {
                "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.series},
                "name": self.series_name,
            },
            "sglang": {"name": self.sglang.filename, "sha256": self.sglang.sha256, "version": self.sglang_version},
            "template": self.template,
        }

    def canonical(self) -> bytes:
        """Canonical JSON of ``content()``: sorted keys, no spaces, UTF-8."""
        return json.dumps(self.content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def short(self) -> str:
        """First 20 hex digits of the digest: in names and labels."""
        return self.digest[:20]

    @property
    def tag(self) -> str:
        """Tag under which the built image is found again: ``r-<20 hex digits>``."""
        return f"r-{self.short}"


def recipe_digest(recipe: Recipe) -> str:
    """sha256 of the recipe's canonical JSON, 64 hex digits."""
    return recipe.digest


def recipe_from_spec(
    spec: BuildSpec, config: BuildConfig, series: Mapping[str, bytes], plugins: Mapping[str, bytes] | None = None
) -> Recipe:
    """Join what the user wrote with the operator's settings.

    ``series`` maps file names to contents (see ``series.load_series``), ``plugins`` maps wheel file names to contents
    (see ``series.load_plugins``). Raises BuildError with one sentence: what is wrong, where, and what to do.
    """
    base = spec.base_image or config.base_image
    if not base:
        raise BuildError(
            "spec.engine.build.baseImage is not given and the operator has no default; "
            "set it to repository@sha256:… of an image with Python and torch"
        )
    parse_reference(base)
    push_repository(spec, config)  # refuses early, before anything runs
    name = spec.series if isinstance(spec.series, str) else f"configmap/{spec.series.config_map_ref}"
    files = check_series(series, where=f"series {name}")
    if spec.wheelhouse:
        config = replace(config, wheelhouse=spec.wheelhouse.rstrip("/"))
    sglang = _sglang_wheel(spec, config)
    kernels = tuple(
        wheel_ref(w.url, w.sha256, wheelhouse=config.wheelhouse, where=f"spec.engine.build.kernelWheels[{i}]")
        for i, w in enumerate(spec.kernel_wheels)
    )
    _no_twins([sglang, *kernels])
    for i, kernel in enumerate(kernels):
        check_python(kernel.filename, _python(sglang, config), where=f"spec.engine.build.kernelWheels[{i}]")
    return Recipe(
        base_image=base,
        sglang_version=spec.sglang,
        sglang=sglang,
        # A ConfigMap's name does not change the content; two CRs with equal patches share an image.
        series_name="custom" if isinstance(spec.series, SeriesRef) else spec.series,
        series=files,
        plugins=_plugins(plugins or {}, config),
        kernels=kernels,
        device=config.device,
        builder=spec.builder,
        builder_version=config.buildah_version if spec.builder == "buildah" else config.builder_version,
        platform=config.platform,
    )


def push_repository(spec: BuildSpec, config: BuildConfig) -> str:
    """Repository (host/path) the image goes to. Raises BuildError when neither CR nor operator names one."""
    repository = (spec.push.repository if spec.push else "") or config.push_repository
    if not repository:
        raise BuildError(
            "spec.engine.build.push.repository is not given and the operator has no default; "
            "set it to host/path in a registry the cluster can push to"
        )
    reference = parse_reference(repository)
    if reference.tag or reference.digest:
        raise BuildError(f"spec.engine.build.push.repository must carry no tag or digest: {repository!r}")
    return repository


def push_secret(spec: BuildSpec, config: BuildConfig) -> str:
    """Name of the Secret with registry credentials, or an empty string."""
    if spec.push and spec.push.repository and spec.push.repository != config.push_repository:
        return spec.push.secret_ref or ""  # never send the operator's credentials to a registry it was not told of
    return (spec.push.secret_ref if spec.push else None) or config.push_secret


def _sglang_wheel(spec: BuildSpec, config: BuildConfig) -> WheelRef:
    where = "spec.engine.build.sglangWheel"
    if spec.sglang_wheel is not None:
        ref = wheel_ref(spec.sglang_wheel.url, spec.sglang_wheel.sha256, wheelhouse=config.wheelhouse, where=where)
        parts = parse_wheel_name(ref.filename)
        if parts.name != "sglang":
            raise BuildError(f"{where}.url is a wheel of {parts.name!r}, not of sglang: {ref.filename}")
        if parts.version.partition("+")[0] != spec.sglang:
            raise BuildError(f"{where}.url is SGLang {parts.version}, but spec.engine.build.sglang is {spec.sglang}")
    else:
        known = config.sglang_wheels.get(spec.sglang, {})
        if config.python not in known:
            names = ", ".join(sorted(known)) or "none"
            raise BuildError(
                f"no SGLang {spec.sglang} wheel is known for {config.python} (known: {names}); "
                f"set {where} with its address and sha256"
            )
        filename, sha256 = known[config.python]
        if not config.wheelhouse:
            raise BuildError(
                f"the operator has no wheelhouse to take {filename} from; set {where} with its address and sha256"
            )
        ref = wheel_ref(filename, sha256, wheelhouse=config.wheelhouse, where=where)
    check_python(ref.filename, _python(ref, config), where=where)
    return ref


def _python(sglang: WheelRef, config: BuildConfig) -> str:
    """CPython tag of the base image: what SGLang's wheel is for, where it says so; else the operator's setting."""
    tags = parse_wheel_name(sglang.filename)
    own = sorted(tag for tag in tags.python if re.fullmatch(r"cp3\d+", tag))
    return own[0] if own and "abi3" not in tags.abi else config.python


def _plugins(plugins: Mapping[str, bytes], config: BuildConfig) -> tuple[Plugin, ...]:
    wanted = PLUGINS[config.device]
    found: dict[str, Plugin] = {}
    for filename in sorted(plugins):
        name = parse_wheel_name(filename).name
        if name not in wanted:
            continue
        if name in found:
            raise BuildError(f"two wheels of {name} are shipped: {found[name].filename} and {filename}; keep one")
        found[name] = Plugin(filename, hashlib.sha256(plugins[filename]).hexdigest())
    missing = [name for name in wanted if name not in found]
    if missing:
        raise BuildError(
            f"the wheel of {' and '.join(missing)} is missing in the operator's artefacts ({config.artefacts}/wheels); "
            "install an operator image that has it"
        )
    return tuple(found[name] for name in wanted)


def _no_twins(wheels: Sequence[WheelRef]) -> None:
    seen: dict[str, str] = {}
    for wheel in wheels:
        name = parse_wheel_name(wheel.filename).name
        if name in seen:
            raise BuildError(f"two wheels of {name} are asked for: {seen[name]} and {wheel.filename}; keep one")
        seen[name] = wheel.filename
