"""The small images, built for real: equal bytes twice, nothing built twice; they run as an ordinary user, read-only."""
# ruff: noqa: E402

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from imagetool.build import Builder, Built
from imagetool.host import need, own_registry
from imagetool.recipes import Recipes
from imagetool.registry import Registry, RegistryError
from imagetool.wheels import plugin_wheels, sha256

import box

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="root file systems are made and entered as root"),
]
CACHE = Path(os.environ.get("DDTREE_CACHE") or Path.home() / ".cache/ddtree")
SEEN_AS = "registry.example:5000"


def quiet(text: str) -> None:
    """No progress in tests."""


@dataclass
class Shop:
    """A registry with nothing in it, and a cache without records of images (environments are shared by key)."""

    registry: Registry
    cache: Path
    made: dict[str, Built]

    def build(self, *names: str) -> dict[str, Built]:
        builder = Builder(ROOT, self.cache, self.registry, SEEN_AS, quiet)
        for recipe in Recipes(ROOT, self.cache, quiet).closure(names):
            self.made[recipe.name] = builder.build(recipe, self.made.get(recipe.base or ""))
        return self.made

    def unpacked(self, name: str, root: Path) -> dict[str, Any]:
        return box.unpack(self.registry, f"ddtree/{name}", self.made[name].digest, root)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Shop]]:
    from contextlib import ExitStack

    need("zstd", "zstd", quiet)
    need("ip", "iproute2", quiet)
    (CACHE / "venv").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:

        def make() -> Shop:
            folder = tmp_path_factory.mktemp("shop")
            stack.callback(shutil.rmtree, folder)  # pytest would keep hundreds of megabytes
            (folder / "cache").mkdir()
            address = stack.enter_context(own_registry(folder / "registry", quiet))
            return Shop(Registry(address), folder / "cache", {})

        yield make


@pytest.fixture(scope="module")
def first(shop: Callable[[], Shop]) -> Shop:
    built = shop()
    built.build("operator", "simengine")
    return built


@pytest.fixture(scope="module")
def operator(first: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("operator") / "root"
    yield root, first.unpacked("operator", root)
    shutil.rmtree(root)


def test_built_from_nothing_twice_the_digests_are_the_same(first: Shop, shop: Callable[[], Shop]) -> None:
    # With the records of the first registry and an empty second one: what a registry has lost is packed again.
    second = Shop(shop().registry, first.cache, {})
    second.build("operator", "simengine")
    assert {n: b.digest for n, b in second.made.items()} == {n: b.digest for n, b in first.made.items()}
    assert all(b.seconds > 0 for b in second.made.values())
    assert second.registry.has_manifest("ddtree/simengine", "dev")


def test_what_is_there_is_not_built_again(first: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr("imagetool.build.push_layer", never)
    before = {name: built.digest for name, built in first.made.items()}
    assert {name: built.digest for name, built in first.build("operator", "simengine").items()} == before
    record = json.loads((first.cache / "images/operator.json").read_text())
    assert record["ref"] == f"{SEEN_AS}/ddtree/operator@{record['digest']}"


def test_plugin_wheels_are_the_same_twice(tmp_path: Path) -> None:
    hashes = []
    for name in ("a", "b"):
        wheels = plugin_wheels(ROOT, tmp_path / name)
        assert plugin_wheels(ROOT, tmp_path / name) == wheels
        hashes.append({wheel.name: sha256(wheel) for wheel in wheels})
    assert hashes[0] == hashes[1]
    assert [name.split("-")[0] for name in hashes[0]] == ["sglang_cpu", "sglang_ddtree"]


def test_no_registry_is_one_sentence() -> None:
    with pytest.raises(RegistryError, match=r"no registry answers at 127\.0\.0\.1:9 .*make cluster-up"):
        Registry("127.0.0.1:9").ping()


def test_the_operator_runs_as_an_ordinary_user_on_a_read_only_root(operator: tuple[Path, dict[str, Any]]) -> None:
    root, config = operator
    probe = (
        "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/opt/venv', os.W_OK)); open('/opt/x', 'w')"
    )
    done = box.run(root, config, "python3", "-c", probe)
    assert done.stdout == "65532 False False\n", done.stderr
    assert "Read-only file system" in done.stderr
    # Without its settings file it says so in one sentence; that it gets so far needs all of its imports.
    done = box.run(root, config)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ddtree-operator: ")
    assert "Traceback" not in done.stderr
    assert box.run(root, config, "ddtreectl", "--help").returncode == 0


def test_the_operator_image_has_no_shell_and_no_package_manager(operator: tuple[Path, dict[str, Any]]) -> None:
    root = operator[0]
    commands = {p.name for folder in ("usr/bin", "usr/sbin", "opt/venv/bin") for p in (root / folder).glob("*")}
    assert {"python3", "ddtree-operator", "ddtreectl"} <= commands
    assert not {"sh", "bash", "dash", "apt", "dpkg", "perl", "env", "ls", "mount", "su"} & commands
    setuid = [p for p in root.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_mode & 0o6000]
    assert setuid == []
    known = (root / "var/lib/dpkg/status").read_text()
    assert "Package: libssl3\n" in known
    assert "Package: apt\n" not in known


def test_every_library_that_the_operator_image_links_with_is_in_it(operator: tuple[Path, dict[str, Any]]) -> None:
    root, config = operator
    probe = (
        "import ctypes, pathlib, sys\n"
        "bad = []\n"
        "for path in sorted(pathlib.Path('/opt/venv').rglob('*.so*')):\n"
        "    try: ctypes.CDLL(str(path))\n"
        "    except OSError as error: bad.append(str(error))\n"
        "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, uuid, xml.parsers.expat, zlib, zoneinfo\n"
        "zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "trusted = [p for p in pathlib.Path(ssl.get_default_verify_paths().capath).glob('*.0') if p.is_file()]\n"
        "print(len(trusted) > 50, bad)\n"
    )
    done = box.run(root, config, "python3", "-c", probe)
    assert done.stdout == "True []\n", done.stderr


def test_the_operator_image_holds_what_builds_need(operator: tuple[Path, dict[str, Any]]) -> None:
    artefacts = operator[0] / "opt/ddtree"
    assert [p.name.split("-")[0] for p in sorted((artefacts / "wheels").iterdir())] == ["sglang_cpu", "sglang_ddtree"]
    shipped = {p.name: p.read_bytes() for p in (artefacts / "series/sglang-0.5.23").iterdir()}
    assert shipped == {p.name: p.read_bytes() for p in (ROOT / "patches/sglang-0.5.23").iterdir()}


def test_nothing_of_this_machine_is_in_the_image(operator: tuple[Path, dict[str, Any]]) -> None:
    root = operator[0]
    assert not (root / "etc/apt").exists()
    here = [str(CACHE).encode(), str(ROOT).encode()]
    venv = [p for p in (root / "opt").rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(venv) > 1000
    assert [p for p in venv if any(path in p.read_bytes() for path in here)] == []


def test_bytecode_is_used_although_dates_differ(operator: tuple[Path, dict[str, Any]]) -> None:
    root, config = operator
    probe = "import sys, ddtree_operator.api.spec as m; print(m.__cached__); import pydantic"
    done = box.run(root, config, "python3", "-v", "-c", probe)
    assert f"matches {Path(done.stdout.strip()).parents[1]}" in done.stderr
    compiled = [line for line in done.stderr.splitlines() if "code object from" in line and "/opt/venv" in line]
    assert [line for line in compiled if ".pyc" not in line] == []


def test_the_simulated_engine_serves(first: Shop, tmp_path: Path) -> None:
    config = first.unpacked("simengine", tmp_path / "root")
    script = """
    python3 -m sglang.launch_server --model-path sim/model --host 127.0.0.1 --port 30000 --sim-health-delay 0 &
    python3 - <<'END'
import time, urllib.request
deadline = time.monotonic() + 60
while True:
    try:
        print(urllib.request.urlopen("http://127.0.0.1:30000/health", timeout=5).status); break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
END
    kill %1
    """
    done = box.run(tmp_path / "root", config, "bash", "-mc", script)
    shutil.rmtree(tmp_path / "root")
    assert "200\n" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["simengine", "operator"])
def test_the_dockerfile_gives_the_same_settings(name: str, first: Shop, tmp_path: Path) -> None:
    buildah = [need("buildah", "buildah", quiet), "--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run")]
    # How this machine reaches a package index is its own affair: lend its settings to the build.
    lent = [f"--volume={path}:{path}:ro" for path in ("/etc/pip.conf", "/etc/ssl/certs") if Path(path).exists()]
    base = f"{first.registry.address}/ddtree/base-python:dev"
    try:
        bud = [*buildah, "bud", "-q", "--isolation=chroot", "--network=host", "--tls-verify=false", "--layers=false"]
        wanted = [f"--build-arg=BASE_IMAGE={base}", f"--file=images/{name}/Dockerfile", f"--tag=t/{name}", "."]
        done = subprocess.run([*bud, *lent, *wanted], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        shown = subprocess.run(
            [*buildah, "inspect", "--type=image", f"t/{name}"], check=True, capture_output=True, text=True
        )
        built = json.loads(shown.stdout)["OCIv1"]["config"]
        manifest = first.registry.manifest(f"ddtree/{name}", first.made[name].digest)
        ours = json.loads(first.registry.blob(f"ddtree/{name}", manifest["config"]["digest"]))["config"]
        for config in (built, ours):
            config["Env"] = sorted(config["Env"])
            config["Labels"].pop("io.buildah.version", None)
            config["Labels"].pop("org.opencontainers.image.title")
        if "Entrypoint" in ours:
            built.pop("Cmd", None)
        assert built == ours
    finally:
        subprocess.run([*buildah, "rmi", "--all", "--force"], capture_output=True)
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
