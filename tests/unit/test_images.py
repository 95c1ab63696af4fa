"""Images: equal entries give equal bytes, settings come from the Dockerfiles, slim libraries look the same to a CPU."""
# ruff: noqa: E402

from __future__ import annotations

import io
import json
import re
import struct
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "images/engine-cpu")]

import slim_elf
import trim
from engine_env import dist_info
from imagetool import venv
from imagetool.dockerfile import DockerfileError, image_config, parse
from imagetool.layers import EPOCH, Entry, complete, folder, from_tar, tree, write_tar
from imagetool.recipes import RecipeError, Recipes
from imagetool.wheels import WheelError, locked_hash

pytestmark = pytest.mark.unit


def tar_of(entries: list[Entry]) -> bytes:
    out = io.BytesIO()
    write_tar(entries, out)
    return out.getvalue()


# layers


def test_a_layer_does_not_depend_on_order_or_time(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    entries = [Entry("opt/a/a.py", content=file), Entry("opt/a.link", 0o777, target="a"), folder("opt/b")]
    first = tar_of(entries)
    file.touch()
    assert tar_of(entries[::-1]) == first
    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == ["opt", "opt/a", "opt/a/a.py", "opt/a.link", "opt/b"]
    assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(EPOCH, 0, 0, "")}


def test_a_later_entry_replaces_an_earlier_one() -> None:
    assert complete([Entry("a", content=b"1"), Entry("a", content=b"2")]) == [Entry("a", content=b"2")]


def test_a_tree_leaves_bytecode_of_this_machine_out(tmp_path: Path) -> None:
    (tmp_path / "p/__pycache__").mkdir(parents=True)
    (tmp_path / "p/__pycache__/m.pyc").touch()
    (tmp_path / "p/run.sh").touch(0o755)
    (tmp_path / "p/run.sh").chmod(0o755)
    assert [(e.path, e.mode) for e in tree(tmp_path, "opt")] == [("opt/p/run.sh", 0o755)]


def test_a_root_file_system_keeps_links_owners_and_modes_and_loses_devices() -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as tar:
        for name, kind, target in (
            ("./", tarfile.DIRTYPE, ""),
            ("./bin", tarfile.SYMTYPE, "usr/bin"),
            ("./usr/bin/a", tarfile.REGTYPE, ""),
            ("./usr/bin/b", tarfile.LNKTYPE, "./usr/bin/a"),
            ("./dev/null", tarfile.CHRTYPE, ""),
            ("./usr/share/doc/x", tarfile.REGTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode, info.uid = kind, target, 0o4755, 7
            info.size = 1 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"!") if info.size else None)
    found = from_tar(io.BytesIO(source.getvalue()), lambda path: "doc" not in path)
    assert [(e.path, e.content, e.target, e.owner) for e in found] == [
        ("bin", None, "usr/bin", 7),
        ("usr/bin/a", b"!", None, 7),
        ("usr/bin/b", b"!", None, 7),
    ]
    assert found[1].mode == 0o4755


# settings


def test_settings_are_read_from_a_dockerfile() -> None:
    text = """\
ARG BASE_IMAGE=x
FROM ${BASE_IMAGE} AS first
ENV LOST=1
FROM ${BASE_IMAGE}
# a comment
RUN a && \\
    b
ENV PATH=/opt/venv/bin:$PATH A="x y"
LABEL a.b/c=1
EXPOSE 80 81/udp
USER 1:1
ENTRYPOINT ["e"]
CMD ["c"]
"""
    base = {"config": {"Env": ["PATH=/bin", "B=2"], "Cmd": ["old"], "User": "0"}, "rootfs": {"diff_ids": ["d0"]}}
    made = image_config(parse(text), base, [("d1", "things")], "now")
    assert made["config"] == {
        "Env": ["PATH=/opt/venv/bin:/bin", "B=2", "A=x y"],
        "Cmd": ["c"],
        "Entrypoint": ["e"],
        "User": "1:1",
        "Labels": {"a.b/c": "1"},
        "ExposedPorts": {"80/tcp": {}, "81/udp": {}},
    }
    assert made["rootfs"]["diff_ids"] == ["d0", "d1"]
    assert made["history"] == [{"created": "now", "created_by": "dev/images: things"}]


def test_a_setting_in_another_form_is_named() -> None:
    with pytest.raises(DockerfileError, match="line 2: ENTRYPOINT"):
        parse("FROM x\nENTRYPOINT sh -c x\n")


def test_every_image_but_the_builder_runs_as_an_ordinary_user() -> None:
    recipes = Recipes(ROOT, ROOT, print).all
    users = {name: parse((ROOT / recipe.dockerfile).read_text()).user for name, recipe in recipes.items()}
    assert users.pop("buildkit") == users.pop("buildah") == "0:0"
    assert set(users.values()) == {"65532:65532"}


def test_the_engine_base_says_that_it_is_for_a_cpu() -> None:
    made = parse((ROOT / "images/engine-cpu/Dockerfile").read_text())
    assert made.labels["ddtree.dev/device"] == "cpu"
    assert made.env["SGLANG_USE_CPU_ENGINE"] == "1"
    lock = (ROOT / "images/engine-cpu/requirements.lock").read_text()
    assert f"\ntorch=={made.labels['ddtree.dev/torch']} " in lock
    assert "\nsglang==" not in lock


def test_recipes_come_after_their_base_and_unknown_names_are_refused() -> None:
    recipes = Recipes(ROOT, ROOT, print)
    assert [r.name for r in recipes.closure(["simengine", "base-python"])] == ["base-python", "simengine"]
    assert [r.name for r in recipes.closure(["all"])] == list(recipes.all)
    with pytest.raises(RecipeError, match=r"no image 'x'; there are base-python, .*"):
        recipes.closure(["x"])


# Python environments and wheels


def test_lock_files_name_no_index() -> None:
    for lock in [*ROOT.glob("images/*/*.lock"), ROOT / "dev/requirements.lock"]:
        assert "://" not in lock.read_text(), lock
        assert "--hash=sha256:" in lock.read_text(), lock


def test_the_operator_image_runs_what_was_tested() -> None:
    def pins(lock: str) -> set[str]:
        return {line.split(" ")[0] for line in (ROOT / lock).read_text().splitlines() if "==" in line}

    assert pins("images/operator/requirements.lock") <= pins("dev/requirements.lock")


def test_the_operator_image_has_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=!~\[; ]", item)[0] for item in project["dependencies"]}
    lock = (ROOT / "images/operator/requirements.lock").read_text()
    assert wanted <= set(re.findall(r"^([\w.-]+)==", lock, re.M))


def test_bytecode_is_the_same_twice_and_needs_no_date() -> None:
    made = venv.bytecode(b"x = {'a': (1, 2)}\n", "/opt/x.py")
    assert made == venv.bytecode(b"x = {'a': (1, 2)}\n", "/opt/x.py")
    assert struct.unpack_from("<I", made, 4)[0] == 0b01  # hash-based, unchecked


def test_scripts_get_the_interpreter_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text(f"#!{tmp_path}/bin/python\nprint()\n")
    (tmp_path / "bin/activate").write_text("VIRTUAL_ENV=here\n")
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    assert [(e.path, e.content) for e in venv.scripts(tmp_path)] == [
        ("opt/venv/bin/tool", b"#!/opt/venv/bin/python3\nprint()\n")
    ]


def test_sglang_is_locked_to_one_file(tmp_path: Path) -> None:
    assert locked_hash(ROOT)[0] == "0.5.23"
    lock = tmp_path / "images/engine-cpu/sglang.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("sglang==1 --hash=sha256:" + "0" * 64 + " --hash=sha256:" + "1" * 64)
    with pytest.raises(WheelError, match="one version of sglang with one sha256"):
        locked_hash(tmp_path)


def test_a_checkout_is_found_like_an_installed_package() -> None:
    project = {
        "name": "my-plugin",
        "version": "1",
        "entry-points": {"sglang.srt.plugins": {"p": "m:f"}},
        "scripts": {"s": "m:g"},
    }
    name, files = dist_info(project)
    assert name == "my_plugin-1.dist-info"
    assert files["entry_points.txt"] == "[console_scripts]\ns = m:g\n\n[sglang.srt.plugins]\np = m:f\n"


# trimming


@pytest.mark.parametrize(
    ("path", "size", "expected"),
    [
        ("triton/backends/nvidia/bin/ptxas", 9 << 20, "drop"),
        ("triton/backends/nvidia/driver.py", 9, "keep"),
        ("nvidia/cudnn/lib/libcudnn_adv.so.9", 9 << 20, "drop"),
        ("nvidia/cudnn/lib/libcudnn.so.9", 9 << 20, "slim"),
        ("torch/lib/libtorch_cuda.so", 9 << 20, "slim"),
        ("torch/lib/libc10.so", 9 << 10, "keep"),
        ("torch/include/c10/core/Device.h", 9, "drop"),
        ("sglang/srt/utils.py", 9, "keep"),
    ],
)
def test_what_becomes_of_a_file(path: str, size: int, expected: str) -> None:
    assert trim.verdict(path, size) == expected


PAGE = slim_elf.PAGE


def library(device: int, marks: list[int], flags: int = 5, name: bytes = b".nv_fatbin") -> bytes:
    """A shared library as a linker lays it out: code, device code of `device` bytes, data with .bss, then debug text.

    `marks` are addresses that the loader writes to.
    """
    head = 64 + 56 * 4
    rela = b"".join(struct.pack("<QQq", mark, 8, 0) for mark in marks)
    before = head + len(rela) + 100
    body = bytearray(bytes(head) + rela + b"c" * 100 + b"\xd5" * device + b"e" * 50)
    text_end, data_at = len(body), -(-len(body) // PAGE) * PAGE
    body += bytes(data_at - text_end) + b"d" * 300
    debug = len(body)
    body += b"D" * 5000
    names = b"\0.rela.dyn\0" + name + b"\0.shstrtab\0"
    strings = len(body)
    body += names
    sections = [
        (0, 0, 0, 0, 0, 0),
        (1, slim_elf.SHT_RELA, 2, head, head, len(rela)),
        (11, 1, 2, before, before, device),
        (names.index(b".shstr"), 3, 0, 0, strings, len(names)),
    ]
    table = len(body)
    for n, kind, sflags, addr, offset, size in sections:
        body += struct.pack("<IIQQQQIIQQ", n, kind, sflags, addr, offset, size, 0, 0, 1, 0)
    segments = [
        (6, 4, 64, 64, 56 * 4, 56 * 4, 8),
        (1, flags, 0, 0, text_end, text_end, 0x200000),
        (1, 6, data_at, data_at + 0x200000, 300, 9000, 0x200000),
        (2, 6, data_at + 16, data_at + 0x200010, 32, 32, 8),
    ]
    for i, (kind, sflags, offset, addr, size, memory, align) in enumerate(segments):
        struct.pack_into("<IIQQQQQQ", body, 64 + 56 * i, kind, sflags, offset, addr, addr, size, memory, align)
    struct.pack_into(
        "<16sHHIQQQIHHHHHH", body, 0, b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, table, 0, 64, 56, 4, 64, 4, 3
    )
    assert debug < strings
    return bytes(body)


def loaded(elf: bytes) -> dict[int, bytes]:
    """What a loader maps, as glibc does it: whole pages from the file, zeroes after a segment's part of the file."""
    memory: dict[int, bytes] = {}
    for segment in slim_elf.segments_of(elf):
        if segment.kind != slim_elf.PT_LOAD:
            continue
        assert (segment.vaddr - segment.offset) % segment.align == 0
        start = segment.vaddr
        content = elf[segment.offset : segment.offset + segment.filesz].ljust(segment.memsz, b"\0")
        while content:
            room = PAGE - start % PAGE
            page, inside = start // PAGE, start % PAGE
            old = memory.get(page, bytes(PAGE))
            memory[page] = old[:inside] + content[:room] + old[inside + len(content[:room]) :]
            start, content = start + room, content[room:]
    return memory


@settings(deadline=None, max_examples=40)
@given(device=st.integers(0, 2 << 20), marks=st.lists(st.integers(0, (2 << 20) - 9), max_size=3))
def test_a_slim_library_differs_in_device_code_only(device: int, marks: list[int]) -> None:
    start = 64 + 56 * 4 + 24 * len(marks) + 100
    marks = [start + mark % max(device, 1) for mark in marks]
    elf = library(device, marks)
    small = slim_elf.slim(elf)
    assert len(small) <= len(elf)
    before, after = loaded(elf), loaded(small)
    for page in (page for page in before if before[page] != after[page]):
        for at, (a, b) in enumerate(zip(before[page], after[page], strict=True), page * PAGE):
            # The ELF header at address 0 says where the program headers are: that may differ as well.
            if a != b:
                assert at < 64 or (b == 0 and start <= at < start + device), hex(at)
                assert not any(mark <= at < mark + 8 for mark in marks), "the loader writes here"


def test_a_slim_library_is_small_and_its_headers_share_no_page_with_what_is_mapped() -> None:
    elf = library(8 << 20, [])
    small = slim_elf.slim(elf)
    assert len(small) < 5 * PAGE
    table = struct.unpack_from("<Q", small, 32)[0]
    for segment in slim_elf.segments_of(small):
        if segment.kind == slim_elf.PT_LOAD and segment.filesz:
            assert -(-(segment.offset + segment.filesz) // PAGE) * PAGE <= table
        if segment.kind == 2:  # PT_DYNAMIC moved along with its segment
            assert small[segment.offset : segment.offset + segment.filesz] == b"d" * 32


def test_other_sections_and_other_files_stay() -> None:
    assert b"\xd5" * (2 << 20) in slim_elf.slim(library(2 << 20, [], name=b".rodata..."))
    with pytest.raises(slim_elf.NotSlimmableError, match="not a 64-bit"):
        slim_elf.slim(b"!<arch>\n" + bytes(100))


def test_relr_relocations_are_decoded() -> None:
    assert list(slim_elf._relr([0x1000, 0b1011])) == [0x1000, 0x1008, 0x1018]


def test_configs_are_plain_json() -> None:
    made = parse((ROOT / "images/operator/Dockerfile").read_text())
    config = image_config(made, {"config": {"Env": ["PATH=/bin"]}}, [], "2026-01-01T00:00:00Z")
    assert json.loads(json.dumps(config))["config"]["Entrypoint"] == ["ddtree-operator"]
