"""What an engine image needs of a node's GPUs: kernels for its compute capability, a driver for its CUDA. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .facts import NodeFacts


@dataclass(frozen=True, slots=True)
class ImageNeeds:
    """Read from the label ``ddtree.dev/facts`` that our builds put on an image.

    ``cuda`` is (major, minor), None for a CPU image; ``arch`` holds what torch's kernels are compiled for (``sm_90``,
    ``sm_90a``, ``compute_120``), empty when unknown; ``kernels`` the same for each kernel wheel by name.
    """

    cuda: tuple[int, int] | None
    arch: tuple[str, ...]
    kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()

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
        if node.cuda is not None and self.cuda[0] > node.cuda[0]:
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
