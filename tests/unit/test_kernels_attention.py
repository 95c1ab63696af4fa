"""Verify attention, the listing of prefixes, the opening of a step and its account against plain torch, in Triton's
interpreter (on the GPU where there is one)."""

from __future__ import annotations

import os
import random

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU and TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from sglang_ddtree.config import Config  # noqa: E402
from sglang_ddtree.kernels.account import account  # noqa: E402
from sglang_ddtree.kernels.attention import (  # noqa: E402
    MAX_SPLIT_M,
    Scratch,
    Shape,
    list_prefixes,
    plan,
    verify_attention,
)
from sglang_ddtree.kernels.mask import fill_words  # noqa: E402
from sglang_ddtree.kernels.window import open_window  # noqa: E402
from sglang_ddtree.metrics import Metrics  # noqa: E402
from sglang_ddtree.ops import TorchOps  # noqa: E402
from sglang_ddtree.tree import Opening, ancestor_mask, build_tree  # noqa: E402

pytestmark = pytest.mark.unit
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOL = 2000


def parents_of(batch: int, width: int, rng: random.Random) -> torch.Tensor:
    """Random trees at most 31 deep."""
    rows = []
    for _ in range(batch):
        up, level = [-1], [0]
        for i in range(1, width):
            p = rng.randint(max(0, i - 5), i - 1)
            p = p if level[p] < 31 else 0
            up.append(p)
            level.append(level[p] + 1)
        rows.append(up)
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


class Case:
    """Inputs of a pass and its answer in float64."""

    def __init__(self, lens: list[int], width: int, heads: int, kv: int, dim: int, dtype: torch.dtype) -> None:
        rng = random.Random(width * 131 + heads)
        batch = len(lens)
        draw = torch.Generator().manual_seed(width + dim)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(dtype).to(DEVICE)

        self.width, self.dim = width, dim
        self.keys, self.values = noise(POOL, kv, dim), noise(POOL, kv, dim)
        fused = noise(batch * width, (heads + 2 * kv) * dim)  # as a model's one projection leaves them: strided
        self.q = fused[:, : heads * dim].view(-1, heads, dim)
        self.k = fused[:, heads * dim : (heads + kv) * dim].view(-1, kv, dim)
        self.v = fused[:, (heads + kv) * dim :].view(-1, kv, dim)
        self.indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        self.indices = torch.randperm(POOL, generator=draw)[: sum(lens) + 1].to(DEVICE)
        self.parents = parents_of(batch, width, rng)
        self.words = torch.zeros((batch + 2, width, -(-width // 32)), dtype=torch.int32, device=DEVICE)
        fill_words(self.words, self.parents, 31)
        self.seen = ancestor_mask(self.parents, 31)

    def run(self, shape: Shape, *, tree: bool, words: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full((len(self.q), self.q.shape[1], self.dim), float("nan"), dtype=self.q.dtype, device=DEVICE)
        scratch = Scratch(DEVICE, 1000, self.dim)
        chosen = (self.words if words is None else words) if tree else None
        for _ in range(2):  # twice: a launch leaves the counters as it found them
            verify_attention(
                self.q, self.k, self.v, out, self.keys, self.values, self.indptr, self.indices, chosen, scratch,
                width=self.width, scale=self.dim**-0.5, shape=shape,
            )  # fmt: skip
        assert int(scratch.arrived.abs().sum()) == 0
        return out.double()

    def want(self, *, tree: bool) -> torch.Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        out = []
        for b in range(len(self.parents)):
            slots = self.indices[self.indptr[b] : self.indptr[b + 1]]
            rows = slice(b * self.width, (b + 1) * self.width)
            k = torch.cat([self.keys[slots], self.k[rows]]).double().repeat_interleave(group, 1)
            v = torch.cat([self.values[slots], self.v[rows]]).double().repeat_interleave(group, 1)
            s = torch.einsum("qhd,khd->hqk", self.q[rows].double(), k) * self.dim**-0.5
            new = self.seen[b] if tree else torch.ones_like(self.seen[b])
            sees = torch.cat([new.new_ones((self.width, len(slots))), new], 1)
            out.append(torch.einsum("hqk,khd->qhd", s.masked_fill(~sees, float("-inf")).softmax(-1), v))
        return torch.cat(out)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("lens", "width", "heads", "kv", "dim", "shape"),
    [
        ([70, 0], 16, 4, 2, 64, Shape(32, 64, 16, 1, 4, 2)),
        ([600, 3], 16, 4, 2, 64, Shape(64, 64, 16, 4, 4, 2)),
        ([513], 33, 4, 1, 32, Shape(64, 64, 32, 2, 4, 2)),
        ([0, 41, 1], 5, 3, 3, 16, Shape(16, 64, 16, 2, 4, 2)),
        ([300], 64, 6, 2, 32, Shape(128, 64, 32, 1, 8, 2)),
        ([20], 130, 2, 1, 16, Shape(64, 128, 32, 1, 4, 2)),
        ([530], 8, 3, 1, 80, Shape(32, 64, 16, 8, 4, 2)),
    ],
)
def test_rows_see_their_prefix_and_what_the_mask_says(
    lens: list[int], width: int, heads: int, kv: int, dim: int, shape: Shape
) -> None:
    case = Case(lens, width, heads, kv, dim, torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    limit = 1e-5 if DEVICE == "cpu" else 1e-2
    assert apart(case.run(shape, tree=True), case.want(tree=True)) < limit
    assert apart(case.run(shape, tree=False), case.want(tree=False)) < limit


def test_half_precision_and_planned_shapes() -> None:
    for batch, width, heads, kv, dim in ((1, 16, 8, 2, 64), (3, 7, 4, 4, 32), (2, 64, 8, 2, 32)):
        case = Case([90] * batch, width, heads, kv, dim, torch.float16)
        shape = plan(batch, width, heads, kv, dim, 132)
        assert apart(case.run(shape, tree=True), case.want(tree=True)) < 3e-3


def test_a_wrong_mask_is_not_the_same() -> None:
    case = Case([40], 16, 4, 2, 32, torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    right, shape = case.want(tree=True), Shape(32, 64, 16, 1, 4, 2)
    grandparents = torch.zeros_like(case.words)
    fill_words(grandparents, case.parents, 1)
    assert apart(case.run(shape, tree=True, words=grandparents), right) > 0.05
    causal = case.words.clone()
    causal[0, :, 0] = torch.tensor([(1 << (i + 1)) - 1 for i in range(16)], dtype=torch.int32)
    assert apart(case.run(shape, tree=True, words=causal), right) > 0.05
    assert apart(case.run(shape, tree=False), right) > 0.05


def test_the_plan_fits_its_scratch_and_shared_memory() -> None:
    for batch in (1, 2, 3, 8, 32, 160):
        for width in (2, 8, 16, 17, 64, 128, 256):
            for heads, kv, dim in ((64, 16, 64), (32, 8, 128), (9, 3, 64), (8, 1, 256), (4, 4, 96)):
                for processors, shared in ((132, 232_448), (188, 101_376)):
                    s = plan(batch, width, heads, kv, dim, processors, shared)
                    tiles = -(-heads // kv * width // s.block_m) * kv * batch
                    assert s.splits == 1 or (tiles * s.splits <= 2 * processors and s.block_m <= MAX_SPLIT_M)
                    block_d = max(16, 1 << (dim - 1).bit_length())
                    assert 2 * s.stages * s.block_n * block_d * 2 <= shared
    big = Case([1], 64, 4, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="more than the scratch holds"):
        verify_attention(
            big.q, big.k, big.v, big.q.clone(), big.keys, big.values, big.indptr, big.indices, None,
            Scratch(DEVICE, 1, 16), width=64, scale=1.0, shape=Shape(16, 64, 32, 4, 4, 2),
        )  # fmt: skip


def test_prefixes_are_listed_one_after_the_other() -> None:
    table = torch.randint(0, 9999, (7, 2300), dtype=torch.int32, device=DEVICE)
    rows, lens = torch.tensor([3, 0, 5, 5], device=DEVICE), torch.tensor([2299, 0, 17, 1], device=DEVICE)
    indptr = torch.full((5,), -1, dtype=torch.int32, device=DEVICE)
    indices = torch.full((2400,), -1, dtype=torch.int64, device=DEVICE)
    list_prefixes(table, rows, lens, indptr, indices)
    assert indptr.tolist() == [0, 2299, 2299, 2316, 2317]
    want = [*table[3, :2299].tolist(), *table[5, :17].tolist(), int(table[5, 0])]
    assert indices[:2317].tolist() == want
    assert (indices[2317:] == -1).all()


@pytest.mark.parametrize(("width", "block"), [(64, 16), (8, 16), (256, 32)])
def test_a_step_opens_as_plain_torch_opens_it(width: int, block: int) -> None:
    table = torch.randint(1, 9999, (6, 700), dtype=torch.int32, device=DEVICE)
    rows, lens = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([7, 300, 0], device=DEVICE)
    roots = torch.tensor([[5, 9], [6, 9], [7, 9]], device=DEVICE)[:, 0]  # strided
    size = {"window": max(width, block), "block": block, "mask_id": 99}
    at = Opening(table, rows, lens, roots, **size)
    ours, plain = open_window(at), TorchOps().open(at)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_the_account_equals_plain_torch_and_leaves_out_what_fills_a_batch_up() -> None:
    config = Config(15, 8)
    draw = torch.Generator().manual_seed(3)
    vals = torch.randn((3, 7, 15), generator=draw).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.randint(0, 99, (3, 7, 15), generator=draw)
    tree = build_tree(vals, ids, None, torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), 16, False)
    accepted = torch.tensor([0, 3, 7], dtype=torch.int32)
    metrics = Metrics(config, False, "cpu")
    slots = torch.ones((3, 16), dtype=torch.int64)
    metrics.account(tree, accepted, slots)
    metrics.step()
    assert (metrics.observed, metrics.nodes) == (3, 45)
    assert metrics.predicted == pytest.approx(float(tree.stats[:, 2].sum()), rel=1e-5)
    assert metrics.sums[2].tolist() == [3, 2, 2, 2, 1, 1, 1, 1]
    deepest, inner = int(tree.depths.max(-1).values.sum()), sum(len(set(p[1:].tolist()) - {0}) for p in tree.parents)
    assert metrics.sums[3].tolist() == [deepest, 45 - inner, 0, 0, 0, 0, 0, 0]

    def on_device(where: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros((4, 8), dtype=torch.float64, device=DEVICE)
        parts = [t.to(DEVICE) for t in (tree.scores, tree.depths, tree.counts, tree.stats, accepted, where)]
        account(*parts, sums)
        return sums.cpu()

    assert torch.allclose(on_device(slots), metrics.sums, rtol=1e-6)
    slots[1] = 0  # the sink
    assert on_device(slots)[2].tolist() == [2, 1, 1, 1, 1, 1, 1, 1]
