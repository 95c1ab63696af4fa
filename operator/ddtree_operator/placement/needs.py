"""What an engine image needs of a node's GPUs: kernels for its compute capability, a driver for its CUDA. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .facts import NodeFacts

FACTS = "ddtree.dev/facts"  # label that our builds put on an image

# What NVIDIA's images say of themselves: the CUDA version in them, and which drivers serve it. Spaces part
# alternatives, commas the terms of one: "cuda>=13.0 brand=tesla,driver>=570,driver<571".
CUDA_VERSION, CUDA_REQUIRED, NOT_REQUIRED = "CUDA_VERSION", "NVIDIA_REQUIRE_CUDA", "NVIDIA_DISABLE_REQUIRE"


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """Read from the label that our builds put on an image, and from what NVIDIA's base images say in their environment.

    ``cuda`` is (major, minor), None for a CPU image; ``arch`` holds what torch's kernels are compiled for (``sm_90``,
    ``sm_90a``, ``compute_120``), empty when unknown; ``kernels`` the same for each kernel wheel by name; ``drivers``
    are alternatives of conditions under which an older driver serves that CUDA all the same (the image then brings
    NVIDIA's libraries for it).
    """

    cuda: tuple[int, int] | None
    arch: tuple[str, ...]
    kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    drivers: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of_image(cls, labels: Mapping[str, str], env: Mapping[str, str]) -> ImageNeeds | None:
        """Needs of an image by its labels and environment; None when they do not say: then nothing is refused."""
        known = cls.from_label(labels.get(FACTS))
        drivers = tuple(tuple(group.split(",")) for group in env.get(CUDA_REQUIRED, "").split())
        if known is not None:
            return replace(known, drivers=drivers) if known.cuda else known
        told = re.match(r"(\d+)\.(\d+)", env.get(CUDA_VERSION, "")) or re.search(
            r"\bcuda>=(\d+)\.(\d+)", env.get(CUDA_REQUIRED, "")
        )
        if not told or env.get(NOT_REQUIRED, "").lower() in ("1", "true"):
            return None
        return cls((int(told[1]), int(told[2])), (), drivers=drivers)

    @classmethod
    def from_label(cls, text: str | None) -> ImageNeeds | None:
        """Needs of an image by its label; None when it has none or it makes no sense: then nothing is refused."""
        try:
            found: Any = json.loads(text or "")
        except ValueError:
            return None
        if not isinstance(found, dict):
            return None
        version = re.fullmatch(r"(\d+)\.(\d+)", str(found.get("cuda") or ""))
        kernels = found.get("kernels")
        return cls(
            cuda=(int(version[1]), int(version[2])) if version else None,
            arch=_texts(found.get("arch")),
            kernels=tuple((str(k), _texts(v)) for k, v in sorted(kernels.items())) if isinstance(kernels, dict) else (),
        )

    def reasons(self, node: NodeFacts) -> list[str]:
        """Why the image cannot run on this node's GPUs; [] when it can, or when the labels do not say."""
        if self.cuda is None:
            return []
        out = []
        served = any(all(_holds(term, node) for term in group) for group in self.drivers)
        if node.cuda is not None and self.cuda[0] > node.cuda[0] and not served:
            driver = f"driver {node.driver}" if node.driver else "the driver"
            out.append(
                f"{driver} serves CUDA up to {node.cuda[0]}.{node.cuda[1]}, "
                f"the image needs {self.cuda[0]}.{self.cuda[1]}"
            )
        for whose, arch in (
            ("the image holds kernels", self.arch),
            *((f"those of {k} are", a) for k, a in self.kernels),
        ):
            if node.compute is not None and arch and not any(_runs(a, node.compute) for a in arch):
                name = f"sm_{node.compute[0]}{node.compute[1]}"
                out.append(f"its GPUs are {name}, {whose} for {', '.join(arch)}")
                break
        return out


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


def _holds(term: str, node: NodeFacts) -> bool:
    """Whether a term of NVIDIA_REQUIRE_CUDA holds on a node; True for what is not known of it."""
    found = re.fullmatch(r"(\w+)(>=|<=|!=|=|<|>)([\w.]+)", term)
    if not found:
        return True
    what, sign, value = found.groups()
    if what == "brand":  # of the cards that a label names, GeForce alone is sure to be none of the data centre's
        return ("GeForce" in node.product) == value.startswith("geforce")
    known: dict[str, tuple[int, ...] | None] = {
        "cuda": node.cuda,
        "arch": node.compute,
        "driver": _numbers(node.driver),
    }
    have = known.get(what)
    wanted = _numbers(value)
    if not have or not wanted:
        return True
    size = len(wanted) if what == "driver" else 2
    left, right = ((*numbers, 0, 0)[:size] for numbers in (have, wanted))
    return {
        ">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right,
        "=": left == right, "!=": left != right,
    }[sign]  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+)*", text) else ()


def _runs(arch: str, compute: tuple[int, int]) -> bool:
    """Whether code for ``arch`` runs on a GPU: binaries within a major and upwards, PTX upwards, ``a`` exactly."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if not found:
        return False
    built = (int(found[2]), int(found[3]))
    if found[4] == "a":
        return built == compute
    if found[1] == "compute" and not found[4]:
        return built <= compute
    return built[0] == compute[0] and built[1] <= compute[1]
