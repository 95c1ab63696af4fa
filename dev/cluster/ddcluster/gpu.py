"""The GPUs that the node claims to have: labels as GPU feature discovery writes them, and an extended resource.

Only what a scheduler and an operator read is imitated; a container gets no device.
"""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """`memory` in MiB as the driver reports it; `compute` as (major, minor)."""

    family: str
    memory: int
    compute: tuple[int, int]
    mig: bool
    machine: str


PRODUCTS = {
    "NVIDIA-H200": Product("hopper", 143771, (9, 0), True, "HGX-H200"),
    "NVIDIA-H100-80GB-HBM3": Product("hopper", 81559, (9, 0), True, "HGX-H100"),
    "NVIDIA-A100-SXM4-80GB": Product("ampere", 81920, (8, 0), True, "HGX-A100"),
    "NVIDIA-B200": Product("blackwell", 183359, (10, 0), True, "HGX-B200"),
    "NVIDIA-L40S": Product("ada-lovelace", 46068, (8, 9), False, "L40S-server"),
    "NVIDIA-L4": Product("ada-lovelace", 23034, (8, 9), False, "L4-server"),
}


def labels(product: str, count: int) -> dict[str, str]:
    """Node labels for `count` GPUs of one product; {} for none."""
    if not count:
        return {}
    p = PRODUCTS[product]
    found = {
        "cuda.driver-version.full": "580.95.05",
        "cuda.driver-version.major": "580",
        "cuda.driver-version.minor": "95",
        "cuda.driver-version.revision": "05",
        "cuda.driver.major": "580",
        "cuda.driver.minor": "95",
        "cuda.driver.rev": "05",
        "cuda.runtime-version.full": "13.0",
        "cuda.runtime-version.major": "13",
        "cuda.runtime-version.minor": "0",
        "cuda.runtime.major": "13",
        "cuda.runtime.minor": "0",
        "gpu.compute.major": str(p.compute[0]),
        "gpu.compute.minor": str(p.compute[1]),
        "gpu.count": str(count),
        "gpu.family": p.family,
        "gpu.machine": p.machine,
        "gpu.memory": str(p.memory),
        "gpu.mode": "compute",
        "gpu.present": "true",
        "gpu.product": product,
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "mig.capable": str(p.mig).lower(),
        "mps.capable": "false",
        "vgpu.present": "false",
    }
    if p.mig:
        found["mig.strategy"] = "single"
    return {f"nvidia.com/{k}": v for k, v in found.items()}


def status_patch(count: int) -> dict[str, object]:
    """Merge patch for a node's status that makes `count` GPUs allocatable (what a device plugin would cause)."""
    amount = {"nvidia.com/gpu": str(count)}
    return {"status": {"capacity": amount, "allocatable": amount}}
