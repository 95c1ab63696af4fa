"""The build context of a recipe: Dockerfile, scripts, plugin wheels, series. Pure but for reading our own scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources

from .errors import BuildError
from .fetching import wheels_to_fetch
from .recipe import Recipe
from .wheels import WheelRef, parse_wheel_name

# A ConfigMap holds at most 1 MiB; a little is left for names and labels.
MAX_CONTEXT_BYTES = 1024 * 1024 - 16 * 1024

# Any fixed moment does; zip files know none before 1980.
SOURCE_DATE_EPOCH = 315532800

USER = "65532:65532"

LABEL_PREFIX = "ddtree.dev"
LABEL_RECIPE_DIGEST = "ddtree.dev/recipe-digest"
LABEL_RECIPE_JSON = "ddtree.dev/recipe-json"
LABEL_FACTS = "ddtree.dev/facts"  # JSON of files/facts.py: what is installed, what the image needs of a node
LABEL_PACKAGES = "ddtree.dev/packages"  # JSON of files/facts.py: every package with its version

WHEELHOUSE = "wheelhouse"  # name of the folder of fetched wheels in the Dockerfile
ENGINE_STAGE = "engine"
FACTS_STAGE = "facts"
FACTS_PATH = "/opt/ddtree/facts.json"
PACKAGES_PATH = "/opt/ddtree/packages.json"


def labels(recipe: Recipe) -> dict[str, str]:
    """Labels of the image: what is inside, and the recipe that made it."""
    out = {
        f"{LABEL_PREFIX}/device": recipe.device,
        "ddtree.dev/sglang": recipe.sglang_version,
        "ddtree.dev/series": recipe.series_name,
        LABEL_RECIPE_DIGEST: recipe.digest,
        LABEL_RECIPE_JSON: recipe.canonical().decode(),
        "org.opencontainers.image.base.digest": recipe.base_image.partition("@")[2],
        "org.opencontainers.image.title": "DDTree engine",
    }
    for plugin in recipe.plugins:
        name = parse_wheel_name(plugin.filename)
        out[f"{LABEL_PREFIX}/{name.name}"] = name.version
    return dict(sorted(out.items()))


def dockerfile(recipe: Recipe) -> str:
    """Text of the Dockerfile.

    Ordered by how seldom a part changes, so that a changed series rebuilds only what follows it. Wheels live in a
    stage of their own and are mounted: they do not weigh on the image. Nothing but the builder itself, fetching
    the pinned wheels, uses the network.
    """
    kernels = [parse_wheel_name(k.filename).name for k in recipe.kernels]
    modules = ["sglang", *(parse_wheel_name(p.filename).name.replace("-", "_") for p in recipe.plugins)]
    fetched = wheels_to_fetch(recipe)
    # buildah 1.28 knows no RUN --network: its whole build runs without one.
    run = "RUN" if recipe.builder == "buildah" else "RUN --network=none"
    mount = f"{run} --mount=type=bind,source=install_wheels.py,target=/ddtree/install_wheels.py"
    lines = [
        "FROM scratch AS wheels",
        *(_copy(wheel) if wheel in fetched else _add(wheel) for wheel in (recipe.sglang, *recipe.kernels)),
        "",
        f"FROM {recipe.base_image} AS {ENGINE_STAGE}",
        "USER 0:0",
        f"{mount} --mount=type=bind,from=wheels,source=/wheels,target=/ddtree/wheels \\",
        "    python3 -B /ddtree/install_wheels.py /ddtree/wheels",
        f"{mount} --mount=type=bind,source=plugins,target=/ddtree/wheels \\",
        "    python3 -B /ddtree/install_wheels.py /ddtree/wheels",
        "COPY series /opt/ddtree/series",
        f"{run} --mount=type=bind,source=finish.py,target=/ddtree/finish.py \\",
        "    --mount=type=bind,source=facts.py,target=/ddtree/facts.py \\",
        f"    python3 -B /ddtree/finish.py /opt/ddtree/series {' '.join(modules)} \\",
        f"    && python3 -B /ddtree/facts.py {FACTS_PATH} {' '.join([recipe.device, *kernels])}",
        # Caches of JIT compilers go below HOME; the user has none of its own.
        "ENV HOME=/tmp",
        *(f"LABEL {_quote(key)}={_quote(value)}" for key, value in labels(recipe).items()),
        f"USER {USER}",
        "",
        # Read before the image is pushed, and put on it as labels.
        f"FROM scratch AS {FACTS_STAGE}",
        f"COPY --from={ENGINE_STAGE} {FACTS_PATH} {PACKAGES_PATH} /",
    ]
    return "\n".join(lines) + "\n"


def context_files(recipe: Recipe, plugins: Mapping[str, bytes]) -> dict[str, bytes]:
    """Path → content of the whole build context.

    ``plugins`` maps wheel file names to contents (at least those of the recipe). Raises BuildError when the context
    does not fit into a ConfigMap.
    """
    files = {
        "Dockerfile": dockerfile(recipe).encode(),
        "install_wheels.py": _script("install_wheels.py"),
        "finish.py": _script("finish.py"),
        "facts.py": _script("facts.py"),
    }
    if wheels_to_fetch(recipe):
        files["fetch.py"] = _script("fetch.py")
    for plugin in recipe.plugins:
        files[f"plugins/{plugin.filename}"] = plugins[plugin.filename]
    for name, text in recipe.series:
        files[f"series/{name}"] = text.encode()
    size = sum(len(content) for content in files.values())
    if size > MAX_CONTEXT_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise BuildError(
            f"patch series and plugin wheels are {size // 1024} KiB together, and a ConfigMap takes "
            f"{MAX_CONTEXT_BYTES // 1024} KiB (largest: {largest}, {len(files[largest]) // 1024} KiB); "
            "give large wheels as kernelWheels by address instead"
        )
    return files


def _script(name: str) -> bytes:
    return resources.files("ddtree_operator.build").joinpath("files", name).read_bytes()


def _add(wheel: WheelRef) -> str:
    url = wheel.url.replace("$", "%24")  # the Dockerfile would expand it
    return f"ADD --checksum=sha256:{wheel.sha256} {json.dumps([url, '/wheels/' + wheel.filename])}"


def _copy(wheel: WheelRef) -> str:
    """A wheel that the Job has fetched and checked already."""
    return f"COPY --from={WHEELHOUSE} {json.dumps([wheel.filename, '/wheels/' + wheel.filename])}"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
