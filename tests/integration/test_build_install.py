"""The scripts that run inside an image being built, in a bare Python environment instead of an image."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from integration.build_cluster import REPO, wheel

pytestmark = pytest.mark.integration

FILES = REPO / "operator/ddtree_operator/build/files"


class Image:
    """A Python environment without pip, as a base image may be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.site = folder / f"venv/lib/python3.{sys.version_info.minor}/site-packages"
        (folder / "wheels").mkdir()

    def python(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [self.folder / "venv/bin/python3", "-B", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env={})

    def install(self, *wheels: tuple[str, bytes]) -> subprocess.CompletedProcess[str]:
        for old in (self.folder / "wheels").iterdir():
            old.unlink()
        for name, content in wheels:
            (self.folder / "wheels" / name).write_bytes(content)
        return self.python(FILES / "install_wheels.py", self.folder / "wheels")

    def installed(self, *wheels: tuple[str, bytes]) -> None:
        done = self.install(*wheels)
        assert done.returncode == 0, done.stderr

    def refusal(self, done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 1, done.stdout
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ddtree-build: error: ")
        return last.removeprefix("ddtree-build: error: ")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def raw(members: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, text in members.items():
            archive.writestr(path, text)
    return out.getvalue()


def test_a_wheel_is_installed_with_scripts_record_and_bytecode(image: Image) -> None:
    files = {
        "demo/__init__.py": "def main():\n    print('hello')\n",
        "demo/template.py": "{% python %}",
        "demo-0.1.0.data/scripts/tool": "#!python\nprint('tool')\n",
        "demo-0.1.0.data/data/share/demo.txt": "data",
        "demo-0.1.0.dist-info/entry_points.txt": "[console_scripts]\nhello = demo:main\n",
    }
    image.installed(wheel("demo", files))
    for script in ("hello", "tool"):
        done = subprocess.run([image.folder / "venv/bin" / script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == script
    assert (image.folder / "venv/share/demo.txt").read_text() == "data"
    code = "import importlib.metadata as m; print(m.version('demo'), all(f.locate().exists() for f in m.files('demo')))"
    assert image.python("-c", code).stdout.split() == ["0.1.0", "True"]
    (compiled,) = (image.site / "demo/__pycache__").iterdir()
    assert compiled.read_bytes()[4:8] == b"\x03\0\0\0"  # checked by the source's hash, not by time


def test_what_the_base_had_under_that_name_goes_editable_installs_too(image: Image) -> None:
    image.installed(wheel("demo", {"demo/__init__.py": "", "demo/old.py": ""}))
    image.installed(wheel("other", {"other.py": ""}))
    (image.site / "__editable__.demo.pth").write_text("/somewhere\n")
    record = next(image.site.glob("demo-*.dist-info")) / "RECORD"
    record.write_text(record.read_text() + "__editable__.demo.pth,,\n")
    image.installed(wheel("Demo", {"demo/__init__.py": ""}, "0.2.0"))
    left = {p.name for p in image.site.iterdir()} - {"__pycache__"}
    assert left == {"demo", "Demo-0.2.0.dist-info", "other.py", "other-0.1.0.dist-info"}
    assert not (image.site / "demo/old.py").exists()


def test_a_distribution_that_cannot_be_removed_is_not_mixed_with_another(image: Image) -> None:
    image.installed(wheel("demo", {"demo/__init__.py": ""}))
    (next(image.site.glob("demo-*.dist-info")) / "RECORD").unlink()
    words = image.refusal(image.install(wheel("demo", {"demo/__init__.py": ""}, "0.2.0")))
    assert words.startswith("the base image has demo 0.1.0 installed without a record of its files")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demo-1-cp39-cp39-any.whl", f"is for cp39, but the base image has cp3{sys.version_info.minor}"),
        ("demo-1-py3-none-manylinux_2_99_x86_64.whl", "is for manylinux_2_99_x86_64, but the base image is"),
        ("demo-1-py3-none-win_amd64.whl", "is for win_amd64, but the base image is"),
        ("demo-1-py3-none-any.whl", "is damaged or cut short"),
    ],
)
def test_a_wheel_that_does_not_fit_is_named_with_both_sides(image: Image, name: str, words: str) -> None:
    assert words in image.refusal(image.install((name, b"PK\x03\x04 cut")))


def test_a_cut_wheel_whose_list_of_files_is_whole_is_found_too(image: Image) -> None:
    name, content = wheel("demo", {"demo/__init__.py": "x = 1\n" * 1000})
    broken = content.replace(b"x = 1\nx = 1\n", b"y = 2\ny = 2\n", 1)
    assert "damaged or cut short" in image.refusal(image.install((name, broken)))


@pytest.mark.parametrize("path", ["../evil.py", "/etc/evil.py", "demo-1.data/nowhere/x", "a/../../evil.py"])
def test_a_wheel_cannot_write_outside(image: Image, path: str) -> None:
    info = {"demo-1.dist-info/WHEEL": "Root-Is-Purelib: true\n"}
    done = image.install(("demo-1-py3-none-any.whl", raw({**info, path: "x"})))
    assert "leads out of its folder" in image.refusal(done) or "no install scheme" in image.refusal(done)
    assert not (image.folder / "evil.py").exists()


def facts(image: Image, *args: str) -> subprocess.CompletedProcess[str]:
    return image.python(FILES / "facts.py", image.folder / "out/facts.json", *args)


def torch(version: str, cuda: str | None) -> tuple[str, bytes]:
    text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
    flags = "class _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_90 sm_80 compute_90')\n"
    return wheel("torch", {"torch/version.py": text, "torch/__init__.py": flags}, version.partition("+")[0])


def test_facts_of_a_cuda_image(image: Image) -> None:
    driver = {"kern/__init__.py": "raise ImportError('libcuda.so.1: cannot open shared object file')"}
    image.installed(torch("2.14.1+cu130", "13.0"), wheel("kern", driver, "1+cu130"))
    done = facts(image, "cuda", "kern")
    assert done.returncode == 0, done.stderr
    assert json.loads((image.folder / "out/facts.json").read_text()) == {
        "python": f"cp3{sys.version_info.minor}",
        "packages": {"torch": "2.14.1", "kern": "1+cu130"},
        "torch": "2.14.1+cu130",
        "cuda": "13.0",
        "arch": ["compute_90", "sm_80", "sm_90"],
        "kernels": {},
        "needDriver": ["kern"],  # what wants a driver is not judged without one
    }


def fatbin(*entries: tuple[int, int, int]) -> bytes:
    """A library with device code: (kind, architecture, flags) each, with 8 bytes of code."""
    made = b"".join(
        struct.pack("<HHIQ", kind, 1, 64, 8) + bytes(12) + struct.pack("<I", arch) + bytes(8) + struct.pack("<Q", flags)
        + bytes(16 + 8) for kind, arch, flags in entries
    )  # fmt: skip
    code = bytes(8) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(code) + len(names)
    sections = [(0, 0, 0), (1, 64, len(code)), (12, 64 + len(code), len(names))]
    heads = b"".join(struct.pack("<IIQQQQ", n, 1, 0, 0, at, size) + bytes(24) for n, at, size in sections)
    start = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
    return start + code + names + heads


def test_what_a_kernel_wheel_is_compiled_for_is_read_from_its_libraries(image: Image) -> None:
    """The flags are those of libtorch_cuda.so of CUDA 13."""
    libraries = {
        "kern/__init__.py": "",
        "kern/hopper.abi3.so": fatbin((2, 90, 0x108011), (1, 90, 0)),
        "kern/blackwell.so": fatbin((2, 100, 0x1208011), (2, 120, 0x1008011)),
        "kern/host.so": b"\x7fELF\x02\x01" + bytes(100),
        "kern/short.so": b"x",
        "kern/cut.so": fatbin((2, 80, 0x8011))[:200],
    }
    image.installed(torch("2.14.1+cu130", "13.0"), wheel("kern", libraries), wheel("plain", {"plain.py": ""}))
    done = facts(image, "cuda", "kern", "plain")
    assert done.returncode == 0, done.stderr
    found = json.loads((image.folder / "out/facts.json").read_text())
    assert found["kernels"] == {"kern": ["compute_90", "sm_100f", "sm_120", "sm_90a"]}


def test_a_cpu_image_asks_for_no_cuda(image: Image) -> None:
    image.installed(torch("2.14.1+cu130", "13.0"))
    assert facts(image, "cpu").returncode == 0
    assert "cuda" not in json.loads((image.folder / "out/facts.json").read_text())


REQUIRES = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: torch==2.14.1\n"


@pytest.mark.parametrize(
    ("base", "kernel", "words"),
    [
        (torch("2.12.0+cu130", "13.0"), None, "sglang 0.5.23 is made for torch 2.14.1, but the base image has 2.12.0"),
        (torch("2.14.1", None), "1+cu130", "is built for CUDA 13.0, but torch in the base image is a CPU build"),
        (
            torch("2.14.1+cu130", "13.0"),
            "1+cu126",
            "is built for CUDA 12.6, but torch in the base image is for CUDA 13.0",
        ),
        (
            torch("2.14.1+cu130", "13.0"),
            "1+cu130torch2.8",
            "is built for torch 2.8, but the base image has 2.14.1+cu130",
        ),
    ],
)
def test_wheels_that_do_not_fit_torch_are_refused(
    image: Image, base: tuple[str, bytes], kernel: str | None, words: str
) -> None:
    parts = {"sglang/__init__.py": "", "sglang-0.5.23.dist-info/METADATA": REQUIRES}
    made = {"sglang-0.5.23.dist-info/WHEEL": "Root-Is-Purelib: true\n", **parts}
    image.installed(base, ("sglang-0.5.23-py3-none-any.whl", raw(made)))
    kernels = []
    if kernel:
        image.installed(wheel("kern", {"kern/__init__.py": ""}, kernel))
        kernels = ["kern"]
    assert words in image.refusal(facts(image, "cpu", *kernels))


def test_a_cuda_engine_needs_torch_for_cuda(image: Image) -> None:
    assert image.refusal(facts(image, "cuda")).startswith("the base image has no torch; ")
    image.installed(torch("2.14.1+cpu", None))
    assert "torch 2.14.1+cpu, a CPU build; a CUDA engine needs" in image.refusal(facts(image, "cuda"))
