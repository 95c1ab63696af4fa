"""Recipes: equal inputs are equal recipes, every input counts, every mistake is one sentence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_operator.api.spec import BuildSpec
from ddtree_operator.build import (
    BuildConfig,
    BuildError,
    Recipe,
    load_plugins,
    load_series,
    push_repository,
    push_secret,
    recipe_digest,
    recipe_from_spec,
    series_from_config_map,
)

pytestmark = pytest.mark.unit

BASE = "registry.example/team/base@sha256:" + "a" * 64
PATCH = b"--- a/sglang/x.py\n+++ b/sglang/x.py\n@@ -1 +1 @@\n-a\n+b\n"
SERIES = {"series": b"# order matters\n0001-x.patch\n", "0001-x.patch": PATCH}
PLUGINS = {
    "sglang_ddtree-0.1.0-py3-none-any.whl": b"tree",
    "sglang_cpu-0.1.0-py3-none-any.whl": b"cpu",
}
CONFIG = BuildConfig(
    base_image=BASE, push_repository="registry.example/team/engine", wheelhouse="http://wheels.example/w", device="cpu"
)
KERNEL = {
    "url": "https://wheels.example/k/sglang_kernel-0.4.10-cp310-abi3-manylinux2014_x86_64.whl",
    "sha256": "c" * 64,
}


def recipe(spec: dict[str, Any] | None = None, config: BuildConfig = CONFIG, **more: Any) -> Recipe:
    series = more.get("series", SERIES)
    return recipe_from_spec(BuildSpec.model_validate(spec or {}), config, series, more.get("plugins", PLUGINS))


def test_what_is_left_out_comes_from_the_operator() -> None:
    got = recipe()
    assert got.base_image == BASE
    assert got.sglang.url == "http://wheels.example/w/sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl"
    assert [p.filename for p in got.plugins] == sorted(PLUGINS)
    assert got.tag == f"r-{got.digest[:20]}"
    assert got.digest == recipe_digest(got) == hashlib.sha256(got.canonical()).hexdigest()
    assert json.loads(got.canonical()) == got.content()


def test_a_cuda_engine_has_no_cpu_plugin() -> None:
    got = recipe(config=replace(CONFIG, device="cuda"))
    assert [p.filename for p in got.plugins] == ["sglang_ddtree-0.1.0-py3-none-any.whl"]


def test_equal_inputs_give_equal_digests_wherever_they_are_fetched_from() -> None:
    mirror = replace(CONFIG, wheelhouse="https://other.example")
    moved = {"baseImage": "mirror.example/base@sha256:" + "a" * 64, "push": {"repository": "x.example/y"}}
    assert recipe().digest == recipe(config=mirror).digest == recipe(moved).digest
    reordered = dict(reversed(list(SERIES.items())))
    assert recipe().digest == recipe(series=reordered).digest
    assert recipe().digest == recipe(series={**SERIES, "README": b"not named in the series"}).digest


def test_a_series_counts_by_content_not_by_the_name_of_its_config_map() -> None:
    one, two = ({"series": {"configMapRef": name}} for name in ("one", "two"))
    assert recipe(one).digest == recipe(two).digest


@pytest.mark.parametrize(
    "other",
    [
        lambda: recipe({"baseImage": "registry.example/team/base@sha256:" + "b" * 64}),
        lambda: recipe(series={**SERIES, "0001-x.patch": PATCH + b"\n"}),
        lambda: recipe(series={"series": b""}),
        lambda: recipe(plugins={**PLUGINS, "sglang_cpu-0.1.0-py3-none-any.whl": b"changed"}),
        lambda: recipe({"kernelWheels": [KERNEL]}),
        lambda: recipe({"sglangWheel": {"url": "sglang-0.5.23-py3-none-any.whl", "sha256": "d" * 64}}),
        lambda: recipe(config=replace(CONFIG, device="cuda")),
        lambda: recipe(config=replace(CONFIG, platform="linux/arm64")),
        lambda: recipe(config=replace(CONFIG, builder_version="9")),
        lambda: recipe({"builder": "buildah"}),
        lambda: replace(recipe(), template=recipe().template + 1),
    ],
)
def test_every_input_changes_the_digest(other: Any) -> None:
    assert other().digest != recipe().digest


@pytest.mark.parametrize(
    ("spec", "config", "more", "words"),
    [
        ({"kernelWheels": [{**KERNEL, "url": "pvc://claim"}]}, CONFIG, {}, "write it as pvc://claim/folder/file.whl"),
        (
            {"kernelWheels": [{**KERNEL, "url": "pvc://c/../a-1-py3-none-any.whl"}]},
            CONFIG,
            {},
            "path that leads elsewhere",
        ),
        ({"kernelWheels": [{**KERNEL, "url": "configmap://c/d/a.whl"}]}, CONFIG, {}, "a ConfigMap has no folders"),
        ({"kernelWheels": [{**KERNEL, "url": "oci://r.example/a/b.whl"}]}, CONFIG, {}, "without tag or digest"),
        ({"kernelWheels": [{**KERNEL, "url": "oci://a:1/b.whl"}]}, CONFIG, {}, "names no registry"),
        ({}, replace(CONFIG, base_image=""), {}, "baseImage is not given.*repository@sha256"),
        ({}, replace(CONFIG, push_repository=""), {}, "push.repository is not given"),
        ({"push": {"repository": "registry.example/x:tag"}}, CONFIG, {}, "no tag or digest"),
        ({"push": {"repository": "engine"}}, CONFIG, {}, "names no registry"),
        ({"push": {"repository": "registry.example/Team"}}, CONFIG, {}, "lower case"),
        ({"push": {"repository": "-bad-.example/x"}}, CONFIG, {}, "not a host name"),
        ({}, CONFIG, {"series": {}}, "has no file 'series'"),
        ({}, CONFIG, {"series": {"series": b"0001-x.patch"}}, "names 0001-x.patch, which is missing"),
        ({}, CONFIG, {"series": {"series": b"a\na", "a": PATCH}}, "names a twice"),
        ({}, CONFIG, {"series": {"series": b"../a"}}, "not a plain file name"),
        ({}, CONFIG, {"series": {"series": b"a", "a": b"hello"}}, "a is not a unified diff"),
        ({}, CONFIG, {"series": {"series": b"a", "a": b"\xff\xfe"}}, "patch a is not UTF-8"),
        ({}, CONFIG, {"plugins": {}}, "wheel of sglang-cpu and sglang-ddtree is missing"),
        ({}, CONFIG, {"plugins": {**PLUGINS, "sglang_cpu-0.2.0-py3-none-any.whl": b""}}, "two wheels of sglang-cpu"),
        ({}, replace(CONFIG, wheelhouse=""), {}, "no wheelhouse to take sglang-0.5.23"),
        ({}, replace(CONFIG, python="cp39"), {}, r"no SGLang 0.5.23 wheel is known for cp39 \(known: cp311"),
        (
            {"kernelWheels": [{**KERNEL, "url": "https://x.example/kernel.zip"}]},
            CONFIG,
            {},
            r"kernelWheels\[0\].*wheel",
        ),
        ({"kernelWheels": [{**KERNEL, "url": "ftp://x.example/a"}]}, CONFIG, {}, "http"),
        ({"kernelWheels": [{**KERNEL, "url": "https://u:p@x.example/a.whl"}]}, CONFIG, {}, "credentials"),
        ({"kernelWheels": [{**KERNEL, "url": "folder/a.whl"}]}, CONFIG, {}, "bare file name"),
        ({"kernelWheels": [KERNEL, KERNEL]}, CONFIG, {}, "two wheels of sglang-kernel"),
        (
            {"kernelWheels": [{**KERNEL, "url": "https://x.example/k-1-cp312-cp312-linux_x86_64.whl"}]},
            CONFIG,
            {},
            "is for cp312, but the base image has cp311",
        ),
        ({"sglangWheel": {"url": "vllm-0.5.23-py3-none-any.whl", "sha256": "d" * 64}}, CONFIG, {}, "not of sglang"),
        ({"sglangWheel": {"url": "sglang-0.5.9-py3-none-any.whl", "sha256": "d" * 64}}, CONFIG, {}, "SGLang 0.5.9"),
    ],
)
def test_mistakes_are_one_sentence(spec: Any, config: BuildConfig, more: Any, words: str) -> None:
    with pytest.raises(BuildError, match=words) as caught:
        recipe(spec, config, **more)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_base_with_another_python_takes_that_pythons_wheels() -> None:
    newer = recipe(config=replace(CONFIG, python="cp312"))
    assert "-cp312-cp312-" in newer.sglang.filename
    given = {"url": newer.sglang.filename, "sha256": newer.sglang.sha256}
    kernel = {**KERNEL, "url": "https://x.example/k-1-cp312-cp312-linux_x86_64.whl"}
    assert recipe({"sglangWheel": given, "kernelWheels": [kernel]}).sglang == newer.sglang
    with pytest.raises(BuildError, match="is for cp311, but the base image has cp312"):
        recipe({"sglangWheel": given, "kernelWheels": [{**kernel, "url": kernel["url"].replace("cp312", "cp311")}]})


def test_the_operators_credentials_stay_with_the_operators_registry() -> None:
    config = replace(CONFIG, push_secret="ours")
    assert push_secret(BuildSpec(), config) == "ours"
    theirs = BuildSpec.model_validate({"push": {"repository": "evil.example/x"}})
    assert push_repository(theirs, config) == "evil.example/x"
    assert push_secret(theirs, config) == ""


def test_shipped_series_and_plugins_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "series/sglang-0.5.23").mkdir(parents=True)
    for name, content in SERIES.items():
        (tmp_path / "series/sglang-0.5.23" / name).write_bytes(content)
    (tmp_path / "wheels").mkdir()
    for name, content in PLUGINS.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    assert load_series("sglang-0.5.23", str(tmp_path)) == SERIES
    assert load_plugins(str(tmp_path)) == PLUGINS
    for bad in ("sglang-0.5.24", "../wheels", ""):
        with pytest.raises(BuildError, match=r"not known \(known: sglang-0.5.23\)"):
            load_series(bad, str(tmp_path))


def test_a_series_in_a_config_map() -> None:
    got = series_from_config_map({"data": {"series": "a"}, "binaryData": {"a": "LS0tIGE="}})
    assert got == {"series": b"a", "a": b"--- a"}
    with pytest.raises(BuildError, match="not base64"):
        series_from_config_map({"binaryData": {"a": "%%"}})
