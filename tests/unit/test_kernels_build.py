"""The tree kernel against a heap, in Triton's interpreter. `make oracle` compares many more cases."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU and TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from kernels_oracle import Tree, heap_tree, random_tables  # noqa: E402
from sglang_ddtree.kernels import TreeBuffers, build_tree  # noqa: E402

pytestmark = pytest.mark.unit
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def built(logp: np.ndarray, ids: np.ndarray, roots: list[int], prefix: list[int], budget: int) -> TreeBuffers:
    out = TreeBuffers.allocate(len(roots), budget + 1, DEVICE)
    for t in (out.tokens, out.parents, out.depths, out.positions, out.scores, out.counts, out.stats):
        t.fill_(77)  # every element must be written
    build_tree(
        torch.from_numpy(logp).to(DEVICE),
        torch.from_numpy(ids).to(DEVICE),
        None,
        torch.tensor(roots, device=DEVICE),
        torch.tensor(prefix, device=DEVICE),
        out,
    )
    return out


def same(out: TreeBuffers, b: int, want: Tree, prefix: int) -> None:
    n = len(want.tokens)
    assert int(out.counts[b]) == n
    assert out.tokens[b, :n].tolist() == want.tokens
    assert out.parents[b, :n].tolist() == want.parents
    assert out.depths[b, :n].tolist() == want.depths
    assert out.positions[b].tolist() == [prefix + d for d in want.depths] + [prefix] * (out.width - n)
    assert out.scores[b, :n].tolist() == [float(s) for s in want.scores]
    assert out.parents[b, n:].eq(-1).all()
    assert out.tokens[b, n:].eq(0).all()
    depth, leaves, mass, _ = out.stats[b].tolist()
    assert depth == max(want.depths)
    assert leaves == n - 1 - len(set(want.parents) - {-1, 0})
    assert mass == pytest.approx(sum(np.exp(np.float64(s)) for s in want.scores[1:]), rel=1e-4)


def test_equals_the_heap_on_random_tables_with_ties() -> None:
    rng = np.random.default_rng(int(os.environ.get("DDTREE_SEED", "0")))
    for _ in range(int(os.environ.get("DDTREE_KERNEL_CASES", "8"))):
        depth, vocab = int(rng.integers(1, 32)), int(rng.integers(1, 130))
        budget = int(rng.integers(1, 128))
        k = int(min(budget, vocab))
        batch = int(rng.integers(1, 4))
        tables = [random_tables(rng, depth, vocab, k) for _ in range(batch)]
        roots = rng.integers(0, vocab, batch).tolist()
        prefix = rng.integers(0, 10_000, batch).tolist()
        out = built(np.stack([t[0] for t in tables]), np.stack([t[1] for t in tables]), roots, prefix, budget)
        for b, (logp, ids) in enumerate(tables):
            same(out, b, heap_tree(logp, ids, roots[b], budget), prefix[b])


@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 63, 64, 128, 255])
def test_every_size_of_lanes(budget: int) -> None:
    rng = np.random.default_rng(budget)
    logp, ids = random_tables(rng, 15, 300, min(budget, 64))
    out = built(logp[None], ids[None], [5], [9], budget)
    same(out, 0, heap_tree(logp, ids, 5, budget), 9)


def test_chain_is_in_the_tree_whenever_it_fits() -> None:
    rng = np.random.default_rng(3)
    logp, ids = random_tables(rng, 15, 50, 15)
    logp[3:] -= 9  # the chain is hopeless below depth 3, a plain heap would leave it out
    out = built(logp[None], ids[None], [1], [4], 15)
    assert out.tokens[0].tolist() == [1, *ids[:, 0].tolist()]
    assert out.parents[0].tolist() == list(range(-1, 15))
    narrow = built(logp[None], ids[None], [1], [4], 14)
    same(narrow, 0, heap_tree(logp, ids, 1, 14, spine=False), 4)
    assert int(narrow.depths[0].max()) < 15


def test_chain_first_is_the_callers_choice_and_inputs_may_be_strided() -> None:
    rng = np.random.default_rng(11)
    logp, ids = random_tables(rng, 7, 50, 20)
    root = torch.tensor([[3, 9], [4, 9]], device=DEVICE)[:, 0]
    prefix = torch.tensor([[8, 9], [6, 9]], device=DEVICE)[:, 0]
    for budget, spine in ((20, False), (20, True), (5, True)):
        out = TreeBuffers.allocate(2, budget + 1, DEVICE)
        table = torch.from_numpy(np.stack([logp, logp])).to(DEVICE)
        build_tree(table, torch.from_numpy(np.stack([ids, ids])).to(DEVICE), None, root, prefix, out, spine=spine)
        for b in range(2):
            same(out, b, heap_tree(logp, ids, 3 + b, budget, spine=spine), [8, 6][b])


def test_equal_scores_go_to_the_lower_parent() -> None:
    logp = np.zeros((3, 3), dtype=np.float32)
    ids = np.arange(9).reshape(3, 3)
    out = built(logp[None], ids[None], [0], [0], 2)  # too small for the chain: a plain heap
    assert out.parents[0].tolist() == [-1, 0, 0]
    assert out.tokens[0].tolist() == [0, 0, 1]


def test_logits_with_lse_equal_log_probabilities() -> None:
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(size=(2, 7, 40)).astype(np.float32)).to(DEVICE)
    vals, ids = logits.topk(16)
    lse = logits.logsumexp(-1)
    a, b = TreeBuffers.allocate(2, 32, DEVICE), TreeBuffers.allocate(2, 32, DEVICE)
    root, prefix = torch.tensor([1, 2], device=DEVICE), torch.tensor([3, 4], device=DEVICE)
    build_tree(vals, ids, lse, root, prefix, a)
    build_tree(vals - lse[..., None], ids, None, root, prefix, b)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.scores, b.scores)


def test_impossible_candidates_and_nan_are_never_taken() -> None:
    logp = np.array([[-0.5, -np.inf, np.nan], [-0.1, -1.0, -np.inf]], dtype=np.float32)
    ids = np.array([[4, 5, 6], [7, 8, 9]])
    out = built(logp[None], ids[None], [3], [10], 12)
    assert int(out.counts[0]) == 4
    assert out.tokens[0, :4].tolist() == [3, 4, 7, 8]
    assert out.tokens[0, 4:].eq(0).all()


def test_saturation_counts_nodes_at_the_last_candidate() -> None:
    rng = np.random.default_rng(1)
    logp, ids = random_tables(rng, 4, 60, 60)
    wide = built(logp[None], ids[None], [0], [0], 40)
    assert float(wide.stats[0, 3]) == 0
    cut = built(logp[None, :, :2].copy(), ids[None, :, :2].copy(), [0], [0], 28)
    assert float(cut.stats[0, 3]) > 0


def test_refuses_what_it_cannot_build() -> None:
    with pytest.raises(ValueError, match="change the budget"):
        TreeBuffers.allocate(1, 257, DEVICE)
    with pytest.raises(ValueError, match="change the budget"):
        TreeBuffers.allocate(1, 1, DEVICE)
    out = TreeBuffers.allocate(1, 8, DEVICE)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    table = torch.zeros((1, 32, 4), device=DEVICE)
    with pytest.raises(ValueError, match="1 to 31 deep"):
        build_tree(table, table.long(), None, one, one, out)
    with pytest.raises(ValueError, match="do not fit"):
        build_tree(table[:, :4], table.long(), None, one, one, out)
