"""What each image is made of: its base, its layers, and what their content depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from . import venv
from .host import need
from .layers import EPOCH, Entry, folder, from_tar, tree

FORMAT = "1"  # part of every key: raise it when the same inputs give other bytes


class RecipeError(RuntimeError):
    """Something an image needs is missing; the text is one sentence that says what to do."""


@dataclass(frozen=True)
class LayerRecipe:
    """One layer: `key` changes whenever its content does, `entries` makes the content, `takes` tells for how long."""

    about: str
    key: str
    entries: Callable[[], Iterable[Entry]]
    takes: str = ""


@dataclass(frozen=True)
class Recipe:
    """One image: the Dockerfile (relative to the repository) that holds its settings, its base, its own layers."""

    name: str
    dockerfile: str
    base: str | None
    layers: Callable[[], list[LayerRecipe]]


# Left out of root file systems: documentation, package lists, and what only building Debian packages needs.
_ROOTFS_LEFT_OUT = (
    "usr/share/doc/*", "usr/share/man/*", "usr/share/info/*", "usr/share/locale/*", "usr/share/lintian/*",
    "usr/share/perl/*", "usr/lib/x86_64-linux-gnu/perl/*", "usr/lib/x86_64-linux-gnu/libperl*",
    "var/lib/apt/lists/*", "var/cache/*", "var/log/*", "etc/apt/sources.list*", "etc/apt/trusted.gpg.d/*",
    "etc/hostname", "etc/resolv.conf", "etc/machine-id", "dev/*",
)  # fmt: skip

_PYTHON = "ca-certificates,python3,python3-venv"


class Recipes:
    """The recipes of the checkout at `root`, with caches in `cache`."""

    def __init__(self, root: Path, cache: Path, say: Callable[[str], None]) -> None:
        self.root, self.cache, self.say = root, cache, say
        base = "base-python"
        self._roots: dict[str, list[Entry]] = {}
        self.all = {
            recipe.name: recipe
            for recipe in (
                Recipe(base, "images/base-python/Dockerfile", None, self._base_python),
                Recipe("buildkit", "images/buildkit/Dockerfile", None, self._buildkit),
                Recipe("buildah", "images/buildah/Dockerfile", None, self._buildah),
                Recipe("operator", "images/operator/Dockerfile", None, self._operator),
                Recipe("simengine", "images/simengine/Dockerfile", base, self._simengine),
                Recipe("engine-cpu-base", "images/engine-cpu/Dockerfile", base, self._engine_cpu_base),
            )
        }

    def closure(self, names: Iterable[str]) -> list[Recipe]:
        """The recipes for these names (`all` for every one), each after its base. Raises RecipeError."""
        ordered: list[Recipe] = []

        def add(name: str) -> None:
            if name not in self.all:
                raise RecipeError(f"there is no image {name!r}; there are {', '.join(self.all)}")
            recipe = self.all[name]
            if recipe.base:
                add(recipe.base)
            if recipe not in ordered:
                ordered.append(recipe)

        for name in self.all if "all" in (names := list(names)) else names:
            add(name)
        return ordered

    def _key(self, *paths: str) -> str:
        return f"{FORMAT}-{venv.content_key(*(self.root / path for path in paths), root=self.root)}"

    def _environment(self, name: str) -> Path:
        made = subprocess.run([self.root / "dev/env.sh", name], stdout=subprocess.PIPE, text=True)
        if made.returncode:
            raise RecipeError(f"the Python environment {name!r} could not be made; the lines above say why")
        return Path(made.stdout.strip())

    # root file systems

    def _bootstrapped(self, packages: str) -> list[Entry]:
        """A root file system; two images that stand on the same one have it made once."""
        if packages not in self._roots:
            with tempfile.NamedTemporaryFile(dir=self.cache, suffix=".tar") as file:
                need("mmdebstrap", "mmdebstrap", self.say)
                bootstrap(packages, Path(file.name))
                with Path(file.name).open("rb") as stream:
                    self._roots[packages] = from_tar(stream, lambda path: True)
        return self._roots[packages]

    def _rootfs(self, packages: str) -> LayerRecipe:
        def entries() -> list[Entry]:
            found = self._bootstrapped(packages)
            return [entry for entry in found if not any(fnmatch(entry.path, p) for p in _ROOTFS_LEFT_OUT)]

        key = f"{FORMAT}-bookworm-{packages}-{_ROOTFS_LEFT_OUT!r}"
        return LayerRecipe(f"Debian 12 with {packages}", key, entries, "half a minute or more, once")

    def _base_python(self) -> list[LayerRecipe]:
        return [self._rootfs(_PYTHON)]

    def _runtime(self) -> LayerRecipe:
        """Python of the same root file system, and nothing but what it needs."""

        def entries() -> list[Entry]:
            sys.path.insert(0, str(self.root / "images/operator"))
            import python_only

            found = self._bootstrapped(_PYTHON)
            texts = {entry.path: entry.content for entry in found if isinstance(entry.content, bytes)}
            lists = {name: text.decode() for path, text in texts.items() if (name := python_only.package_of(path))}
            kept = python_only.keeper(lists)
            files = [entry for entry in found if kept(entry.path)]
            status = python_only.status_of(texts[python_only.STATUS].decode())
            folders = [folder("tmp", 0o1777), *(folder(name) for name in ("proc", "sys", "dev", "run"))]
            return [*files, Entry(python_only.STATUS, content=status.encode()), *folders]

        key = f"{self._key('images/operator/python_only.py')}-bookworm-{_PYTHON}"
        return LayerRecipe("Python of Debian 12, without a shell", key, entries, "half a minute or more, once")

    def _buildkit(self) -> list[LayerRecipe]:
        def programs() -> list[Entry]:
            made = subprocess.run(
                [sys.executable, self.root / "dev/cluster/build-binaries", "buildkit"],
                stdout=subprocess.PIPE,
                text=True,
            )
            if made.returncode:
                raise RecipeError("BuildKit could not be built; the lines above say why")
            names = ("buildkitd", "buildctl")
            return [Entry(f"usr/local/bin/{name}", 0o755, Path(made.stdout.strip(), name)) for name in names]

        sources = self._key("dev/cluster/go/buildkit")
        return [self._rootfs("ca-certificates,runc"), LayerRecipe("BuildKit's programs", sources, programs)]

    def _buildah(self) -> list[LayerRecipe]:
        return [self._rootfs("buildah,ca-certificates")]

    # Python images

    def _operator(self) -> list[LayerRecipe]:
        def dependencies() -> Iterable[Entry]:
            environment = self._environment("operator")
            yield from venv.skeleton()
            yield from venv.packages(environment, venv.plain)

        def application() -> Iterable[Entry]:
            from .wheels import build_wheel

            with tempfile.TemporaryDirectory() as scratch:
                yield from venv.wheel(build_wheel(self.root, Path(scratch)))

        def artefacts() -> Iterable[Entry]:
            from .wheels import plugin_wheels

            for wheel in plugin_wheels(self.root, self.cache):
                yield Entry(f"opt/ddtree/wheels/{wheel.name}", content=wheel)
            yield folder("opt/ddtree/series")
            yield from tree(self.root / "patches/sglang-0.5.23", "opt/ddtree/series/sglang-0.5.23")

        return [
            self._runtime(),
            LayerRecipe(
                "the operator's dependencies",
                self._key("images/operator/requirements.lock"),
                dependencies,
            ),
            LayerRecipe(
                "operator and ddtreectl", f"{self._key('pyproject.toml', 'LICENSE', 'operator', 'cli')}-2", application
            ),
            LayerRecipe("plugin wheels and patch series", self._key("patches"), artefacts),
        ]

    def _simengine(self) -> list[LayerRecipe]:
        source, plugin = "tests/simengine/sglang", "patches/sglang_ddtree/src/sglang_ddtree"
        return [
            LayerRecipe(
                "the simulated engine", self._key(source), lambda: tree(self.root / source, "opt/simengine/sglang")
            ),
            LayerRecipe(
                "the plugin, for live prompts",
                self._key(plugin),
                lambda: tree(self.root / plugin, "opt/simengine/sglang_ddtree"),
            ),
        ]

    def _engine_cpu_base(self) -> list[LayerRecipe]:
        here = "images/engine-cpu"

        def packages() -> Iterable[Entry]:
            sys.path.insert(0, str(self.root / here))
            from trim import slimmed, verdict

            def treat(relative: str, path: Path) -> Entry | None:
                if relative.startswith(("sglang/", "sglang-")):
                    return None  # built into the engine image from the pinned wheel
                entry = venv.plain(relative, path)
                match verdict(relative, path.stat().st_size):
                    case "drop":
                        return None
                    case "slim":
                        return Entry(entry.path, entry.mode, lambda: slimmed(path))
                return entry

            environment = self._environment("engine-shared")
            yield from venv.skeleton()
            yield from venv.scripts(environment, lambda name: name in ("pip", "pip3", "hf", "uvicorn"))
            yield from venv.packages(environment, treat)

        key = self._key(f"{here}/requirements.lock", f"{here}/trim.py", f"{here}/slim_elf.py")
        return [LayerRecipe("torch and what SGLang needs, without device code", key, packages, "about a minute, once")]


def bootstrap(packages: str, into: Path) -> None:
    """Makes a Debian 12 root file system with these packages as a tar file. Raises RecipeError."""
    command = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
        "bookworm", str(into),
    ]  # fmt: skip
    # A plain environment: what a package's scripts write must not depend on who builds.
    own = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SOURCE_DATE_EPOCH": str(EPOCH)}
    passed = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy") or key == "TMPDIR"}
    done = subprocess.run(command, env={**own, **passed}, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        tail = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise RecipeError(f"mmdebstrap could not make a Debian 12 with {packages}: {tail}")
