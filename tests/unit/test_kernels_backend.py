"""The worker's Triton operations equal its plain torch ones, call for call."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU and TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from kernels_oracle import random_tables  # noqa: E402
from sglang_ddtree.config import Refused  # noqa: E402
from sglang_ddtree.kernels.backend import TritonOps  # noqa: E402
from sglang_ddtree.ops import TorchOps  # noqa: E402

pytestmark = pytest.mark.unit
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(
    ops: TritonOps | TorchOps, seed: int, width: int, spine: bool, pool: SimpleNamespace
) -> dict[str, torch.Tensor]:
    """One whole step through the seam; every tensor that comes out of it."""
    rng = np.random.default_rng(seed)
    batch, depth, k = 3, 7, 20
    tables = [random_tables(rng, depth, 40, k) for _ in range(batch)]
    vals = torch.from_numpy(np.stack([t[0] for t in tables])).to(DEVICE)
    ids = torch.from_numpy(np.stack([t[1] for t in tables])).to(DEVICE)
    root = torch.from_numpy(rng.integers(0, 40, batch)).to(DEVICE)
    prefix = torch.tensor([4, 0, 9], device=DEVICE)
    tree = ops.build(vals, ids, None, root, prefix, width=width, spine=spine)
    mask = ops.mask(tree.parents, prefix, prefix.cpu(), depth=min(depth, width - 1))
    target = torch.from_numpy(rng.integers(0, 40, (batch, width))).to(DEVICE)
    target[:, 0] = tree.tokens[:, 1]  # every request accepts something
    steps = min(depth, width - 1) + 1
    accepted = ops.walk(tree, target, prefix, steps=steps)
    window = torch.from_numpy(rng.permutation(200)[: batch * (width + 2)].reshape(batch, width + 2)).to(DEVICE)
    ops.move_kv(pool, window[:, :width], accepted.accept_index)
    child, sibling = ops.links(tree.parents)
    return {
        **{f"tree.{k}": v.clone() for k, v in vars(tree).items()},
        **{f"accepted.{k}": v.clone() for k, v in vars(accepted).items()},
        "mask": mask.bool(),
        "child": child,
        "sibling": sibling,
        "kv": torch.stack([*pool.k_buffer, *pool.v_buffer]).clone(),
    }


def pool(seed: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn((200, 2, 8), generator=generator).to(DEVICE) for _ in range(4)]
    return SimpleNamespace(k_buffer=buffers[:2], v_buffer=buffers[2:])


@pytest.mark.parametrize(("width", "spine"), [(24, False), (24, True), (5, False)])
def test_triton_equals_torch(width: int, spine: bool) -> None:
    triton_ops, torch_ops = TritonOps(DEVICE, fill_prefix=True), TorchOps()
    for seed in range(2):
        a, b = step(triton_ops, seed, width, spine, pool(seed)), step(torch_ops, seed, width, spine, pool(seed))
        for name in a:
            if name == "tree.stats":
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(a[name], b[name].to(a[name].dtype)), name


def test_mask_goes_into_the_graphs_buffer_when_the_batch_fits() -> None:
    ops = TritonOps(DEVICE, fill_prefix=True)
    buffer = torch.zeros(3 * 8 * (20 + 8), dtype=torch.uint8, device=DEVICE)
    ops.attach(SimpleNamespace(verify_mask=SimpleNamespace(buffer=buffer, fits=lambda rows: rows <= 2)))
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6]] * 3, dtype=torch.int32, device=DEVICE)
    prefix = torch.tensor([5, 20, 7], device=DEVICE)
    shared = ops.mask(parents[:2], prefix[:2], None, depth=4)
    assert shared.data_ptr() == buffer.data_ptr()
    assert shared.numel() == 1
    want = TorchOps().mask(parents[:2], prefix[:2], prefix[:2].cpu(), depth=4)
    assert torch.equal(buffer[: want.numel()].bool(), want)
    own = ops.mask(parents, prefix, prefix.cpu(), depth=4)
    assert own.numel() == 8 * (32 + 3 * 8)


def test_two_walks_in_a_row_do_not_share_memory() -> None:
    ops = TritonOps(DEVICE)
    tree = SimpleNamespace(
        tokens=torch.tensor([[1, 2]], device=DEVICE),
        parents=torch.tensor([[-1, 0]], dtype=torch.int32, device=DEVICE),
    )
    first = ops.walk(tree, torch.tensor([[2, 5]], device=DEVICE), torch.tensor([3], device=DEVICE), steps=2)
    second = ops.walk(tree, torch.tensor([[7, 5]], device=DEVICE), torch.tensor([3], device=DEVICE), steps=2)
    assert first.out_tokens.tolist() == [[2, 5]]
    assert second.out_tokens.tolist() == [[7, 0]]


def test_refuses_kv_layouts_without_token_slots() -> None:
    index = torch.zeros((1, 2), dtype=torch.int32, device=DEVICE)
    with pytest.raises(Refused, match="HND"):
        TritonOps(DEVICE).move_kv(SimpleNamespace(use_hnd=True), index.long(), index)
    with pytest.raises(Refused, match="FP4"):
        TritonOps(DEVICE).move_kv(SimpleNamespace(native_k_scale_buffer=[1]), index.long(), index)
