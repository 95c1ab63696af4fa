"""An image's kernels and CUDA against the GPUs of a node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_operator.placement import ImageNeeds, match
from unit.test_placement_match import known, node, placement

pytestmark = pytest.mark.unit

TORCH = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def gpu(compute: str, cuda: str = "13.0") -> dict[str, Any]:
    major, minor = compute.split(".")
    top, low = cuda.split(".")
    labels = {
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": minor,
        "nvidia.com/cuda.runtime-version.major": top,
        "nvidia.com/cuda.runtime-version.minor": low,
        "nvidia.com/cuda.driver-version.full": "570.86.15",
    }
    return node(labels=labels)


def reasons(made: dict[str, Any], facts: dict[str, Any], **gpu_spec: Any) -> tuple[str, ...]:
    (fit,) = match(known([made]), placement(gpu_spec), ImageNeeds.from_label(json.dumps(facts)))
    return fit.reasons


@pytest.mark.parametrize(
    ("arch", "compute", "runs"),
    [
        (TORCH, "9.0", True),
        (TORCH, "8.9", True),  # binaries run on later minors of their major
        (TORCH, "12.0", True),
        (TORCH, "7.0", False),
        (["sm_90a"], "9.0", True),
        (["sm_100a"], "10.3", False),
        (["sm_100f"], "10.3", True),
        (["sm_80"], "9.0", False),
        (["sm_80", "compute_80"], "9.0", True),  # PTX is compiled on the spot
        (["compute_90"], "8.9", False),
        (["gfx942"], "9.0", False),
        ([], "9.0", True),  # not known: not refused
    ],
)
def test_kernels_must_be_for_the_gpu(arch: list[str], compute: str, runs: bool) -> None:
    got = reasons(gpu(compute), {"cuda": "13.0", "arch": arch})
    assert (got == ()) is runs
    if not runs:
        name = "sm_" + compute.replace(".", "")
        assert got == (f"its GPUs are {name}, the image holds kernels for {', '.join(arch)}",)


def test_every_kernel_wheel_must_be_for_the_gpu_too() -> None:
    facts = {"cuda": "13.0", "arch": TORCH, "kernels": {"flash-kern": ["sm_90a"], "host-kern": []}}
    assert reasons(gpu("9.0"), facts) == ()
    assert reasons(gpu("12.0"), facts) == ("its GPUs are sm_120, those of flash-kern are for sm_90a",)
    assert reasons(gpu("7.0"), facts) == (f"its GPUs are sm_70, the image holds kernels for {', '.join(TORCH)}",)
    assert reasons(gpu("12.0"), {**facts, "kernels": "x"}) == ()


def test_the_driver_must_serve_the_cuda_major() -> None:
    old = gpu("9.0", "12.8")
    assert reasons(old, {"cuda": "13.0", "arch": TORCH}) == (
        "driver 570.86.15 serves CUDA up to 12.8, the image needs 13.0",
    )
    assert reasons(old, {"cuda": "12.9", "arch": TORCH}) == ()


# As images of NVIDIA's for CUDA 13.0 say it, shortened.
REQUIRED = "cuda>=13.0 brand=tesla,driver>=535,driver<536 brand=geforcertx,driver>=570,driver<571"


def without_label(made: dict[str, Any], env: dict[str, str]) -> tuple[str, ...]:
    """Reasons for an image that carries no label of ours."""
    (fit,) = match(known([made]), placement(), ImageNeeds.of_image({}, env))
    return fit.reasons


@pytest.mark.parametrize(
    ("env", "driver", "fits"),
    [
        ({"CUDA_VERSION": "13.0.1"}, "570.86.15", False),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, "570.86.15", False),
        ({"CUDA_VERSION": "12.9.1"}, "570.86.15", True),
        ({"CUDA_VERSION": "13.0.1", "NVIDIA_REQUIRE_CUDA": REQUIRED}, "570.86.15", False),
        ({"CUDA_VERSION": "13.0.1", "NVIDIA_REQUIRE_CUDA": REQUIRED}, "535.230.02", True),  # the image brings libraries
        ({"CUDA_VERSION": "13.0.1", "NVIDIA_DISABLE_REQUIRE": "true"}, "570.86.15", True),
        ({"CUDA_VERSION": "thirteen", "NVIDIA_REQUIRE_CUDA": "??"}, "570.86.15", True),
        ({}, "570.86.15", True),
    ],
)
def test_an_image_without_our_label_is_judged_by_what_nvidias_images_say(
    env: dict[str, str], driver: str, fits: bool
) -> None:
    old = gpu("9.0", "12.8")
    old["metadata"]["labels"]["nvidia.com/cuda.driver-version.full"] = driver
    told = f"driver {driver} serves CUDA up to 12.8, the image needs 13.0"
    assert without_label(old, env) == (() if fits else (told,))


def test_what_serves_a_data_centre_card_may_not_serve_geforce() -> None:
    env = {"CUDA_VERSION": "13.0.1", "NVIDIA_REQUIRE_CUDA": REQUIRED}
    card = gpu("8.9", "12.8")
    card["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-GeForce-RTX-4090"
    assert without_label(card, env) == ()  # driver 570: named for it
    card["metadata"]["labels"]["nvidia.com/cuda.driver-version.full"] = "535.230.02"
    assert len(without_label(card, env)) == 1


def test_our_label_counts_more_than_the_base_images_version() -> None:
    facts = {"ddtree.dev/facts": '{"cuda": "12.9", "arch": ["sm_90"]}'}
    needs = ImageNeeds.of_image(facts, {"CUDA_VERSION": "13.0.1"})
    assert needs is not None
    assert (needs.cuda, needs.arch) == ((12, 9), ("sm_90",))
    assert ImageNeeds.of_image({"ddtree.dev/facts": '{"python": "cp311"}'}, {"CUDA_VERSION": "13.0.1"}) == ImageNeeds(
        None, ()
    )


def test_claimed_gpus_of_a_product_are_judged_like_counted_ones_and_a_cpu_engine_is_not() -> None:
    old, facts = gpu("9.0", "12.8"), {"cuda": "13.0", "arch": TORCH}
    assert len(reasons(old, facts, perReplica=0, product=["NVIDIA-H200"])) == 1
    assert reasons(old, facts, perReplica=0) == ()


def test_nothing_is_refused_for_an_image_or_a_node_that_does_not_say() -> None:
    assert reasons(gpu("7.0"), {"cuda": None}) == ()
    assert reasons(node(), {"cuda": "13.0", "arch": TORCH}) == ()
    for label in (None, "", "x", "[]", '{"cuda": 7, "arch": "sm_90"}'):
        needs = ImageNeeds.from_label(label)
        assert match(known([gpu("7.0", "12.0")]), placement(), needs)[0].fits


def test_a_node_that_is_wrong_anyway_says_only_that() -> None:
    assert reasons(gpu("7.0"), {"cuda": "13.0", "arch": TORCH}, product=["NVIDIA-B200"]) == (
        "product NVIDIA-H200, not NVIDIA-B200",
    )


def test_compute_labels_that_are_no_numbers_are_said() -> None:
    bad = node(labels={"nvidia.com/gpu.compute.major": "nine"})
    assert reasons(bad, {}) == ("label nvidia.com/gpu.compute.major is 'nine', not a number",)
