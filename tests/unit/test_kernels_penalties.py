"""Penalties of a tree's nodes against plain Python over each node's own text."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the penalties need torch: run `make test-kernels`")

from kernels_oracle import heap_tree, random_tables  # noqa: E402
from sglang_ddtree.ops import TorchOps, TreeOps  # noqa: E402
from sglang_ddtree.penalties import Penalties, hold, read_terms, wanted  # noqa: E402
from sglang_ddtree.tree import Tree  # noqa: E402

pytestmark = pytest.mark.unit
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, EOS = 23, 2
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.9},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 6, "stop_token_ids": {4, 9}},
    {"min_new_tokens": 99},
    {"frequency_penalty": -0.2, "presence_penalty": 0.5, "repetition_penalty": 0.6, "min_new_tokens": 4},
)


def request(prompt: int, output: list[int], asked: dict[str, Any], eos: int | None = EOS) -> Any:
    """What is read of SGLang's request."""
    defaults = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**defaults | {"stop_token_ids": None} | asked),
        origin_input_ids=[0] * prompt,
        output_ids=output,
        eos_token_ids={EOS} if eos is not None else None,
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=eos),
    )


def plainly(scores: list[float], output: list[int], asked: Any) -> list[float]:
    """A position's scores, given the output before it."""
    p, out = asked.sampling_params, list(scores)
    for token in set(output):
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
        out[token] = out[token] * p.repetition_penalty if out[token] < 0 else out[token] / p.repetition_penalty
    if len(output) < p.min_new_tokens:
        for token in (p.stop_token_ids or set()) | (asked.eos_token_ids or set()):
            out[token] = float("-inf")
    return out


def sampling() -> Any:
    """SGLang's adjustments of a pass whose requests have penalties."""
    return SimpleNamespace(
        penalizer_orchestrator=None, acc_additive_penalties=torch.zeros(1), acc_scaling_penalties=torch.ones(1)
    )


def ops(kind: str) -> TreeOps:
    """Plain torch, or the kernels: on a GPU, or in Triton's interpreter."""
    if kind == "torch":
        return TorchOps()
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1: run `make test-kernels`")
    from sglang_ddtree.kernels.backend import TritonOps

    return TritonOps(DEVICE)


def as_tree(tokens: torch.Tensor, parents: torch.Tensor, positions: torch.Tensor) -> Tree:
    """As much of a tree as is read here."""
    nothing = torch.zeros(0)
    return Tree(tokens, parents, nothing, positions, nothing, nothing, nothing)


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (7, 3), (31, 7), (40, 31)])
@pytest.mark.parametrize("kind", ["torch", "torch in float64", "triton"])
def test_every_node_by_its_own_path(budget: int, depth: int, kind: str) -> None:
    import numpy as np

    rng, width = np.random.default_rng(budget), budget + 1
    pick = random.Random(budget)
    requests, texts = [], []
    tokens = torch.zeros((len(KINDS), width), dtype=torch.int64)
    parents = torch.full((len(KINDS), width), -1, dtype=torch.int32)
    depths = torch.zeros((len(KINDS), width), dtype=torch.int64)
    for b, asked in enumerate(KINDS):
        text = [pick.randrange(VOCAB) for _ in range(pick.randrange(1, 7))]
        tree = heap_tree(*random_tables(rng, depth, VOCAB, 1 if b == 3 else min(budget, VOCAB)), text[-1], budget)
        n = len(tree.tokens)
        tokens[b, :n], parents[b, :n] = torch.tensor(tree.tokens), torch.tensor(tree.parents, dtype=torch.int32)
        for node in range(1, n):
            depths[b, node] = depths[b, tree.parents[node]] + 1
        requests.append(request(b + 1, text, asked, eos=None if b == 5 else EOS))
        texts.append(text)
    raw = torch.randn((len(KINDS) * width, VOCAB), dtype=torch.float64 if "64" in kind else torch.float32)
    prefix = torch.tensor([b + len(text) for b, text in enumerate(texts)])
    slots = torch.tensor([5, 0, 3, 1, 8, 2, 7], device=DEVICE)
    kept = Penalties(9, VOCAB, DEVICE)
    for b, text in enumerate(texts):
        padded = torch.tensor([[*text, 1, 1]], device=DEVICE)  # what comes after its length is none of its output
        kept.count(slots[b : b + 1], padded, torch.tensor([len(text)], device=DEVICE))
    got, used = raw.clone().to(DEVICE), ops("torch" if "torch" in kind else kind)
    trees = as_tree(*(t.to(DEVICE) for t in (tokens, parents, prefix[:, None] + depths)))
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")  # the host must not wait
    try:
        terms = read_terms(requests, VOCAB, DEVICE)
        used.weigh(got, kept.table, slots, terms, trees, depth=depth)
        hold(got, terms, trees.positions)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    rows = iter(zip(got.tolist(), raw.tolist(), strict=True))
    for b, asked in enumerate(requests):
        for node in range(width):
            path, at = [], node
            while parents[b, at] >= 0:
                path.insert(0, int(tokens[b, at]))
                at = int(parents[b, at])
            mine, scores = next(rows)
            assert mine == pytest.approx(plainly(scores, texts[b] + path, asked), abs=1e-5), (b, node)


@pytest.mark.parametrize("seed", range(int(os.environ.get("DDTREE_KERNEL_CASES", "10"))))
def test_the_kernel_equals_torch_to_the_bit(seed: int) -> None:
    """Vocabularies of several tiles, tokens that stand in the tree more than once, requests without a penalty; infinite
    scores and a row of the table that is none of the batch's."""
    draw = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    batch, width, vocab = int(whole(1, 4)), int(whole(2, 20)), int(whole(30, 1400))
    few = vocab if seed % 2 else 9  # tokens that are drafted
    parents = torch.full((batch, width), -1, dtype=torch.int32)
    deep = torch.zeros((batch, width), dtype=torch.int64)
    for b in range(batch):
        for node in range(1, int(whole(1, width + 1))):  # what is left over has no parent
            parents[b, node] = up = int(whole(0, node))
            deep[b, node] = deep[b, up] + 1
    tokens = whole(0, few, batch, width)
    kept = Penalties(batch + 2, vocab, DEVICE)
    slots = torch.randperm(batch + 2, generator=draw)[:batch].to(DEVICE)
    kept.count(slots, tokens[:, :1].to(DEVICE))  # the root is in the output
    kept.count(torch.arange(batch + 2, device=DEVICE), whole(0, vocab, batch + 2, 60).to(DEVICE))
    kinds = [KINDS[int(whole(0, len(KINDS)))] for _ in range(batch)]
    terms = read_terms([request(1, [5], asked) for asked in kinds], vocab, DEVICE)
    raw = torch.randn((batch * width, vocab), generator=draw) * 8
    raw[whole(0, batch * width), whole(0, vocab)] = float("-inf")
    given = as_tree(tokens.to(DEVICE), parents.to(DEVICE), deep.to(DEVICE))
    plain, fused = raw.clone().to(DEVICE), raw.clone().to(DEVICE)
    ops("triton").weigh(fused, kept.table, slots, terms, given, depth=int(deep.max()) + 1)
    ops("torch").weigh(plain, kept.table, slots, terms, given, depth=int(deep.max()) + 1)
    assert torch.equal(fused, plain)
    for b, asked in enumerate(kinds):
        rows = slice(b * width, (b + 1) * width)
        assert torch.equal(fused.cpu()[rows], raw[rows]) == (not any("penalty" in name for name in asked))


def test_a_prefill_goes_on_from_the_output_there_is() -> None:
    """A new request in a used slot, a retracted one that comes back, and one that decodes along in a mixed batch."""
    asked = KINDS[-1]
    kept = Penalties(4, VOCAB, DEVICE)
    slots = torch.tensor([2, 0, 3], device=DEVICE)
    kept.count(slots, torch.tensor([[7, 7], [8, 8], [9, 5]], device=DEVICE))  # the first two: of requests before
    new, back, along = request(3, [], asked), request(2, [6, 6, 1], asked), request(4, [9], asked)
    batch = SimpleNamespace(
        reqs=[new, back, along],
        decoding_reqs=[along],
        req_pool_indices=slots,
        seq_lens=torch.tensor([3, 5, 6], device=DEVICE),
        sampling_info=sampling(),
    )
    assert wanted(batch.sampling_info)
    kept.begin(batch)
    raw = torch.randn((3, VOCAB))
    got = raw.to(DEVICE) + batch.sampling_info.acc_additive_penalties
    factor = batch.sampling_info.acc_scaling_penalties
    got = torch.where(got < 0, got * factor, got / factor)
    for row, (output, one) in enumerate([([], new), ([6, 6, 1], back), ([9, 5], along)]):
        assert got[row].tolist() == pytest.approx(plainly(raw[row].tolist(), output, one), abs=1e-5)
    assert kept.counts(slots).sum(1).tolist() == [0, 3, 2]


def test_nothing_where_nobody_asks() -> None:
    silent = SimpleNamespace(
        penalizer_orchestrator=SimpleNamespace(is_required=False),
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
    )
    assert not wanted(None)
    assert not wanted(silent)
