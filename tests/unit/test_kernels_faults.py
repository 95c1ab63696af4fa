"""The Triton half of every fault in ``engine/mutations`` is one: with it a kernel gives another result than without, so
a GPU on which the faulty package goes unnoticed (``dev/gpu/mutants.py``) has a check that is blind."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from sglang_ddtree import patches, series  # noqa: E402
from sglang_ddtree.tree import ancestor_mask  # noqa: E402

pytestmark = pytest.mark.unit
SOURCES = Path(series.__file__).resolve().parents[1]
MUTATIONS = Path(__file__).parents[1] / "engine/mutations"
KERNELS = "sglang_ddtree/kernels/"
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 2, 4]], dtype=torch.int32)
WIDTH, STEPS, HEADS, DIM = 6, 5, 2, 16


def words(mask: ModuleType) -> torch.Tensor:
    out = torch.zeros((2, WIDTH, 1), dtype=torch.int32)
    mask.fill_words(out, PARENTS, STEPS - 1)
    return out


def attention(kernel: ModuleType) -> torch.Tensor:
    bits = ancestor_mask(PARENTS, STEPS - 1).int()
    packed = (bits << torch.arange(WIDTH, dtype=torch.int32)).sum(-1, dtype=torch.int32)[..., None]
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((2 * WIDTH, HEADS, DIM), generator=draw) for _ in range(3))
    keys, values = (torch.randn((9, HEADS, DIM), generator=draw) for _ in range(2))
    indptr, indices = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([1, 2, 3, 4, 6, 7, 8])
    out = torch.zeros_like(q)
    kernel.verify_attention(
        q, k, v, out, keys, values, indptr, indices, packed, kernel.Scratch("cpu", 1, DIM),
        width=WIDTH, scale=0.25, shape=kernel.Shape(16, 16, 16, 1, 4, 2),
    )  # fmt: skip
    return out


PATH = torch.tensor([[0, 1, 3, 5, -1], [6, 7, 8, 10, 11]], dtype=torch.int32)  # rows of the nodes of two paths
SLOTS = torch.tensor([[20, 21, 22, 23, 24, 25], [3, 4, 5, 6, 7, 8]])


def pool() -> Any:
    keys = [torch.arange(40.0)[:, None, None].repeat(1, 1, 4) + 100 * layer for layer in range(2)]
    return SimpleNamespace(k_buffer=keys[:1], v_buffer=keys[1:])


def moved(kv_move: ModuleType) -> torch.Tensor:
    buffers = [*pool().k_buffer, *pool().v_buffer]
    kv_move.move_accepted_kv(kv_move.KVBuffers.of(buffers), SLOTS, PATH)
    return torch.stack(buffers)


def moved_by_ops(backend: ModuleType) -> torch.Tensor:
    kv = pool()
    backend.TritonOps("cpu").move_kv(kv, SLOTS, PATH)
    return torch.stack([*kv.k_buffer, *kv.v_buffer])


def penalised(penalties: ModuleType) -> torch.Tensor:
    """Token 3 is the root and is drafted again."""
    logits = torch.ones((2 * WIDTH, 8))
    counts, one = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0]], dtype=torch.int32).repeat(2, 1), torch.ones(2)
    tokens = torch.tensor([[3, 4, 5, 3, 6, 4]]).repeat(2, 1)
    penalties.weigh(logits, counts, torch.arange(2), one * 0.5, one * 0.25, one * 2, tokens, PARENTS, STEPS - 1)
    return logits


RESULTS: dict[str, Callable[[ModuleType], torch.Tensor]] = {
    "mask.py": words, "attention.py": attention, "kv_move.py": moved, "backend.py": moved_by_ops,
    "penalties.py": penalised,
}  # fmt: skip


def halves() -> list[tuple[str, str]]:
    """(fault, kernel file) of every patch that changes a kernel."""
    out = []
    for path in sorted(MUTATIONS.glob("*.patch")):
        for diff in series.parse(path.read_text(), path.name).files:
            if diff.path.startswith(KERNELS):
                out.append((path.stem, diff.path.removeprefix(KERNELS)))
    return out


def load(source: Path) -> ModuleType:
    """A module from a file, under a name of its own. Its imports are the sound package's."""
    name = f"faulty_{source.parent.name}_{source.stem}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kernel_a_step_can_go_wrong_in_has_a_fault() -> None:
    assert {file for _, file in halves()} == set(RESULTS)


@pytest.mark.parametrize(("fault", "file"), halves())
def test_with_the_fault_the_kernel_gives_another_result(tmp_path: Path, fault: str, file: str) -> None:
    patch = series.parse((MUTATIONS / f"{fault}.patch").read_text(), fault)
    text = series.run([patch], patches.reader(SOURCES))[KERNELS + file]
    assert text is not None
    source = tmp_path / file
    source.write_text(text)
    sound = RESULTS[file](importlib.import_module(f"sglang_ddtree.kernels.{file.removesuffix('.py')}"))
    faulty = RESULTS[file](load(source))
    assert torch.isfinite(faulty.float()).all()
    assert not torch.allclose(faulty.float(), sound.float(), rtol=1e-2, atol=1e-2)
