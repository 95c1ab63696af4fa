"""Mask, walk, links and KV move against plain Python, in Triton's interpreter (on the GPU where there is one)."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU and TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from kernels_oracle import Tree, ancestors, heap_tree, random_tables, walk  # noqa: E402
from sglang_ddtree.kernels import (  # noqa: E402
    KVBuffers,
    WalkBuffers,
    full_mask_cells,
    log_sum_exp,
    move_accepted_kv,
    tree_links,
    walk_tree,
    write_full_mask,
    write_packed_mask,
    write_qlen_mask,
)

pytestmark = pytest.mark.unit
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def forest(
    seed: int, batch: int, budget: int, depth: int, vocab: int = 40
) -> tuple[list[Tree], torch.Tensor, torch.Tensor]:
    """Trees, and their padded tokens and parents [batch, budget + 1]; the last one has too few candidates."""
    rng = np.random.default_rng(seed)
    trees = []
    for b in range(batch):
        k = 1 if b == batch - 1 and batch > 1 else min(budget, vocab)
        logp, ids = random_tables(rng, depth, vocab, k)
        trees.append(heap_tree(logp, ids, int(rng.integers(vocab)), budget))
    tokens = torch.zeros((batch, budget + 1), dtype=torch.int64)
    parents = torch.full((batch, budget + 1), -1, dtype=torch.int32)
    for b, t in enumerate(trees):
        tokens[b, : len(t.tokens)] = torch.tensor(t.tokens)
        parents[b, : len(t.parents)] = torch.tensor(t.parents, dtype=torch.int32)
    return trees, tokens.to(DEVICE), parents.to(DEVICE)


@pytest.mark.parametrize(
    ("budget", "depth", "fill"), [(7, 3, False), (15, 15, True), (63, 15, False), (100, 31, False)]
)
def test_full_mask_has_the_layout_sglang_reads(budget: int, depth: int, fill: bool) -> None:
    trees, _, parents = forest(budget, 3, budget, depth)
    width, lens = budget + 1, [5, 0, 130]
    out = torch.full((full_mask_cells(3, width, sum(lens)) + 8,), 7, dtype=torch.uint8, device=DEVICE)
    write_full_mask(parents, torch.tensor(lens, device=DEVICE), out, depth=depth, fill_prefix=fill)
    at = 0
    for tree, seq in zip(trees, lens, strict=True):
        cells = out[at : at + width * (seq + width)].view(width, seq + width).cpu().numpy()
        assert (cells[:, seq:] == ancestors(tree.parents, width)).all()
        assert (cells[:, :seq] == (1 if fill else 7)).all()
        at += width * (seq + width)
    assert (out[at:] == 7).all()


@pytest.mark.parametrize(("budget", "depth"), [(7, 3), (31, 15), (32, 15), (70, 31)])
def test_qlen_and_packed_masks(budget: int, depth: int) -> None:
    trees, _, parents = forest(budget, 2, budget, depth)
    width = budget + 1
    want = np.stack([ancestors(t.parents, width) for t in trees])
    square = torch.zeros((2, width, width), dtype=torch.bool, device=DEVICE)
    write_qlen_mask(parents, square, depth=depth)
    assert (square.cpu().numpy() == want).all()
    words = -(-width // 32)
    packed = torch.full((2, width, words), -1, dtype=torch.int32, device=DEVICE)
    write_packed_mask(parents, packed, depth=depth)
    bits = (packed.cpu().numpy()[..., None] >> np.arange(32)) & 1
    assert (bits.reshape(2, width, -1)[..., :width] == want).all()
    assert (bits.reshape(2, width, -1)[..., width:] == 0).all()


def targets(rng: np.random.Generator, tree: Tree, width: int) -> list[int]:
    """A target that agrees with a random path for a while: deep acceptance happens, and so does none."""
    want = [int(x) for x in rng.integers(0, 40, width)]
    node = 0
    while rng.random() < 0.8:
        children = [n for n in range(len(tree.parents)) if tree.parents[n] == node]
        if not children:
            break
        pick = int(rng.choice(children))
        want[node] = tree.tokens[pick]
        node = pick
    return want


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (7, 3), (15, 15), (63, 15), (130, 31)])
def test_walk_follows_the_target(budget: int, depth: int) -> None:
    rng = np.random.default_rng(budget)
    batch, width = 4, budget + 1
    trees, tokens, parents = forest(budget, batch, budget, depth)
    wants = [targets(rng, t, width) for t in trees]
    prefix = [3, 50, 7, 1000]
    out = WalkBuffers.allocate(batch, depth + 1, DEVICE)
    for t in vars(out).values():
        t.fill_(-9)
    walk_tree(tokens, parents, torch.tensor(wants, device=DEVICE), torch.tensor(prefix, device=DEVICE), out)
    for b in range(batch):
        path, text = walk(trees[b].tokens, trees[b].parents, wants[b])
        pad = depth + 1 - len(path)
        assert out.accept_index[b].tolist() == [b * width + n for n in path] + [-1] * pad
        assert out.out_tokens[b].tolist() == text + [0] * pad
        assert int(out.accept_len[b]) == len(path) - 1
        assert int(out.commit_lens[b]) == len(path)
        assert int(out.bonus[b]) == text[-1]
        assert int(out.new_seq_lens[b]) == prefix[b] + len(path)


def test_padding_is_nobodys_child_even_if_the_target_says_token_zero() -> None:
    tokens = torch.tensor([[5, 6, 0, 0]], device=DEVICE)
    parents = torch.tensor([[-1, 0, -1, -1]], dtype=torch.int32, device=DEVICE)
    out = WalkBuffers.allocate(1, 3, DEVICE)
    walk_tree(tokens, parents, torch.tensor([[0, 0, 0, 0]], device=DEVICE), torch.tensor([1], device=DEVICE), out)
    assert int(out.accept_len[0]) == 0
    assert int(out.bonus[0]) == 0


def test_links_visit_children_in_order() -> None:
    trees, _, parents = forest(4, 2, 31, 7)
    child = torch.full((2, 32), 5, dtype=torch.int64, device=DEVICE)
    sibling = torch.full((2, 32), 5, dtype=torch.int64, device=DEVICE)
    tree_links(parents, child, sibling)
    for b, tree in enumerate(trees):
        for node in range(32):
            seen, at = [], int(child[b, node])
            while at >= 0:
                seen.append(at)
                at = int(sibling[b, at])
            assert seen == [n for n in range(len(tree.parents)) if tree.parents[n] == node]


@pytest.mark.parametrize("shape", [(2, 16), (3, 5), (1, 3)])
def test_kv_move_is_a_gather_then_a_scatter(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    budget, depth, batch, slots = 31, 7, 3, 200
    width = budget + 1
    buffers = [torch.randn((slots, *shape)).to(t).to(DEVICE) for t in (torch.float32, torch.bfloat16) for _ in range(2)]
    for _ in range(3):
        window = torch.from_numpy(rng.permutation(slots)[: batch * width].reshape(batch, width)).to(DEVICE)
        index = torch.full((batch, depth + 1), -1, dtype=torch.int32)
        for b in range(batch):
            n = int(rng.integers(1, depth + 2))
            path = [0, *sorted(rng.choice(np.arange(1, width), n - 1, replace=False).tolist())]
            index[b, :n] = torch.tensor([b * width + p for p in path], dtype=torch.int32)
        want = [t.clone() for t in buffers]
        for b in range(batch):
            path = [int(i) for i in index[b] if i >= 0]
            for t, w in zip(buffers, want, strict=True):
                w[window[b, : len(path)]] = t[window.reshape(-1)[path]]
        move_accepted_kv(KVBuffers.of(buffers), window, index.to(DEVICE))
        for t, w in zip(buffers, want, strict=True):
            assert torch.equal(t, w)


def test_kv_move_refuses_layouts_it_cannot_address() -> None:
    with pytest.raises(ValueError, match="no layers"):
        KVBuffers.of([])
    with pytest.raises(ValueError, match="not contiguous"):
        KVBuffers.of([torch.zeros((4, 6)).t()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_is_exact_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn((3, 40_000), generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    logits[1, :20_000] = float("-inf")
    got = log_sum_exp(logits.to(DEVICE)).cpu()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), logits.double().logsumexp(-1), rtol=0, atol=1e-5)
