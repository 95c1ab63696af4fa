"""The patch applier: exact, all or nothing, repeatable, and clear when it cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = ROOT / "patches/sglang-0.5.23"
sys.path.insert(0, str(ROOT / "patches/sglang_ddtree/src"))
from sglang_ddtree import patches, series  # noqa: E402

pytestmark = pytest.mark.unit

BEFORE = "one\ntwo\nthree\nfour\nfive\n"
PATCH = """Subject: for the test

--- a/pkg/m.py
+++ b/pkg/m.py
@@ -1,4 +1,5 @@
 one
-two
+2
+2.5
 three
 four
--- /dev/null
+++ b/pkg/new.py
@@ -0,0 +1,2 @@
+x = 1
+y = 2
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site/pkg").mkdir(parents=True)
    (tmp_path / "site/pkg/m.py").write_text(BEFORE)
    return tmp_path / "site"


def make_series(tmp_path: Path, *texts: str) -> Path:
    folder = tmp_path / "series-folder"
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.patch").write_text(text)
    (folder / "series").write_text("# comment\n" + "".join(f"{n}.patch\n" for n in range(len(texts))))
    return folder


def run(command: str, folder: Path, site: Path) -> int:
    return patches.main([command, "--series", str(folder), "--root", str(site)])


def test_apply_status_and_apply_again(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PATCH.replace("\n one\n-two\n+2\n+2.5", "\n one\n-two\n+2\n+2.5")
    (site / "pkg/m.py").write_text("".join(f"v{n} = {n}\n" for n in range(9)))
    text = text.replace(
        " one\n-two\n+2\n+2.5\n three\n four\n", " v0 = 0\n-v1 = 1\n+v1 = 10\n+w = 2\n v2 = 2\n v3 = 3\n"
    )
    folder = make_series(tmp_path, text)
    assert run("status", folder, site) == 0
    assert "not applied 0.patch" in capsys.readouterr().out
    assert run("apply", folder, site) == 0
    assert (site / "pkg/m.py").read_text().splitlines()[:4] == ["v0 = 0", "v1 = 10", "w = 2", "v2 = 2"]
    assert (site / "pkg/new.py").read_text() == "x = 1\ny = 2\n"
    stamp = (site / "pkg/m.py").stat().st_mtime_ns
    capsys.readouterr()
    assert run("apply", folder, site) == 0
    assert "already applied" in capsys.readouterr().out
    assert (site / "pkg/m.py").stat().st_mtime_ns == stamp
    assert run("status", folder, site) == 0
    assert capsys.readouterr().out.startswith("applied")
    # a longer series on top of a shorter one
    more = "--- a/pkg/new.py\n+++ b/pkg/new.py\n@@ -1,2 +1,2 @@\n x = 1\n-y = 2\n+y = 3\n"
    assert run("apply", make_series(tmp_path, text, more), site) == 0
    assert (site / "pkg/new.py").read_text() == "x = 1\ny = 3\n"


def test_what_does_not_fit_names_file_and_hunk_and_changes_nothing(
    tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -4,2 +4,2 @@\n four\n-FIVE\n+5\n"
    folder = make_series(tmp_path, second)
    assert run("apply", folder, site) == 1
    error = capsys.readouterr().err
    assert error == "ddtree-patches: error: 0.patch: pkg/m.py hunk 1: line 5 is 'five', the patch expects 'FIVE'\n"
    folder = make_series(tmp_path, PATCH, "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -1,1 +1,1 @@\n-gone\n+x\n")
    assert run("apply", folder, site) == 1
    assert "1.patch: pkg/m.py hunk 1" in capsys.readouterr().err
    assert (site / "pkg/m.py").read_text() == BEFORE
    assert not (site / "pkg/new.py").exists()


def test_the_combined_patch_changes_what_the_series_changes(
    tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches = [*series.load(STANDARD), series.parse(PATCH, "new.patch")]
    one = series.parse(series.combined(patches), "sglang-ddtree.patch")
    assert [(d.path, d.hunks, d.creates) for d in one.files] == [
        (d.path, d.hunks, d.creates) for p in patches for d in p.files
    ]
    assert run("combine", STANDARD, site) == 0
    shipped = STANDARD.parent / "sglang-ddtree.patch"
    assert shipped.read_text() == capsys.readouterr().out, "write it again: python -m sglang_ddtree.patches combine"


def test_no_fuzz_and_no_offset(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -1,2 +1,2 @@\n two\n-three\n+3\n"
    assert run("apply", make_series(tmp_path, moved), site) == 1
    assert "line 1 is 'one'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nothing here\n", "no diff"),
        ("--- a/x\n", "expected '+++ '"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "leaves site-packages"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-a\n+b\n", "promises 3 and 3"),
        ("--- a/x\n+++ b/x\nno hunk\n", "no hunk"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\nrubbish\n", "expected '--- '"),
    ],
)
def test_malformed_patches(text: str, word: str) -> None:
    with pytest.raises(series.PatchError) as caught:
        series.parse(text, "bad.patch")
    assert word in str(caught.value)


def test_missing_series_and_patch(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("apply", tmp_path / "none", site) == 1
    assert "cannot be read" in capsys.readouterr().err
    folder = make_series(tmp_path, PATCH)
    (folder / "series").write_text("other.patch\n")
    assert run("apply", folder, site) == 1
    assert "other.patch: named in the series" in capsys.readouterr().err


def test_a_failed_write_changes_nothing(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, str | None] = {"pkg/m.py": "new\n", "pkg/b.py": "b\n"}
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if Path(target).name == "b.py":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(series.PatchError, match="nothing was changed"):
        patches.write_all(site, files)
    assert (site / "pkg/m.py").read_text() == BEFORE
    assert sorted(p.name for p in (site / "pkg").iterdir()) == ["m.py"]


def test_wrong_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "sglang-0.5.23-x.whl"
    wheel.write_bytes(b"not it")
    assert patches.main(["verify", "--series", str(make_series(tmp_path, PATCH)), "--wheel", str(wheel)]) == 1
    assert "is not that of a pinned" in capsys.readouterr().err


@pytest.mark.parametrize("lines", ["a\nb", "a\nb\n"])
def test_no_newline_at_the_end(lines: str) -> None:
    text = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n"
    text += ("" if lines.endswith("\n") else "\\ No newline at end of file\n") + "+c\n\\ No newline at end of file\n"
    patch = series.parse(text, "p")
    assert series.run([patch], lambda _: lines) == {"f": "a\nc"}
    assert series.run([patch], lambda _: "a\nc", backwards=True) == {"f": lines}


def test_like_git(tmp_path: Path) -> None:
    """Real diffs made by git apply to the same bytes."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("".join(f"{n}\n" for n in range(200)))
    b.write_text("".join("x\n" if n % 37 == 0 else f"{n}\n" if n % 41 else "" for n in range(200)))
    made = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "a", "b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    text = made.stdout.replace("+++ b\n", "+++ a\n")
    patch = series.parse(text, "p")
    assert series.run([patch], lambda _: a.read_text())["a"] == b.read_text()
    assert series.run([patch], lambda _: b.read_text(), backwards=True)["a"] == a.read_text()


SERIES = ROOT / "patches/sglang-0.5.23"


def test_every_patch_of_the_series_says_why() -> None:
    for patch in series.load(SERIES):
        for word in ("Subject:", "Why:", "What:", "Upstream:"):
            assert word in patch.header, (patch.name, word)


def test_faulty_patches_and_the_demos_series_are_up_to_date() -> None:
    """Made from the sources by mutations/make.py; run it when this fails."""
    path = ROOT / "tests/engine/mutations/make.py"
    spec = importlib.util.spec_from_file_location("make_mutations", path)
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for file, text in make.wanted().items():
        assert file.read_text() == text, f"{file} is out of date: run {path.relative_to(ROOT)}"
    for name in make.DEMO:
        standard, faulty = series.load(SERIES), series.load(ROOT / f"dev/demo/series-{name}")
        assert faulty[:-1] == standard
    assert {p.stem for p in path.parent.glob("*.patch")} == set(make.FAULTS)
    assert set(make.MUST) == {name for name in make.FAULTS if not name.startswith("dump-")}


@pytest.mark.parametrize("path", sorted((ROOT / "tests/engine/mutations").glob("*.patch")), ids=lambda p: p.stem)
def test_mutations_fit_the_package(path: Path) -> None:
    patch = series.parse(path.read_text(), path.name)
    files = series.run([patch], patches.reader(ROOT / "patches/sglang_ddtree/src"))
    patches.compile_all(files)
