"""The check before serving: is the tree mask really applied, and are positions depths?

Two requests with different prefixes get a random tree each, through the very functions the decode step uses (tree
build, mask, verify pass, in graph mode if graphs are on). Then the path to every checked node is run as a plain
prompt. The logits must agree. A mask that is dropped, causal or shifted, or positions that count nodes, make the
engine exit; otherwise it would serve wrong text without any sign.

What this does not see: what happens after the pass (KV move, drafter's KV). A fault there shows as a divergence from
greedy decoding, which the tests and the canary's parity check look for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sglang_ddtree import reference
from sglang_ddtree.config import Refused
from sglang_ddtree.tree import Tree

logger = logging.getLogger(__name__)

PREFIXES = (5, 9)  # tokens before the tree, of each request
CHECKED = 24  # nodes a request at most: all of a small tree, else the first ones and the deepest
# Of the logits' spread: the largest difference in float32; the root mean square in half precision, where the largest of
# 50,000 is mostly noise. An H200 in bfloat16 showed 0.13 to 0.15; wrong masks and positions cost SmolLM2 0.36 to 5
# (docs/benchmarks/gpu.md).
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-1, torch.bfloat16: 2.5e-1}


@dataclass
class _Rows:
    """Rows of the request table and KV slots, taken for the check and given back."""

    worker: Any
    rows: list[int]
    slots: list[torch.Tensor]

    @classmethod
    def take(cls, worker: Any, lengths: Sequence[int]) -> _Rows:
        pool, allocator = worker.target_worker.get_memory_pool()
        rows = pool.alloc_rows(len(lengths))
        page = int(allocator.page_size)
        slots = [allocator.alloc(-(-length // page) * page) for length in lengths]
        if rows is None or any(s is None for s in slots):
            raise Refused("no room for the start-up check; raise --max-total-tokens or --max-running-requests")
        for row, length, slot in zip(rows, lengths, slots, strict=True):
            pool.req_to_token[row, :length] = slot[:length].to(pool.req_to_token.dtype)
        return cls(worker, rows, slots)

    def give_back(self) -> None:
        pool, allocator = self.worker.target_worker.get_memory_pool()
        pool.req_to_token[self.rows] = 0
        pool.free_slots.extend(self.rows)
        for slot in self.slots:
            allocator.free(slot)


def run(worker: Any) -> None:
    """Check a worker whose pools, attention backends and graphs exist and that serves nothing yet. Raises Refused."""
    pool, _ = worker.target_worker.get_memory_pool()
    prefixes = PREFIXES[: max(1, min(len(PREFIXES), pool.available_size()))]
    generator = torch.Generator().manual_seed(20260412)
    prompts = [_tokens(worker, n, generator) for n in prefixes]
    with torch.inference_mode():
        tree, logits = _verify(worker, prompts, generator)
        worst = 0.0
        for row, prompt in enumerate(prompts):
            nodes = _chosen(tree, row)
            paths = [prompt + _path(tree, row, node) for node in nodes]
            expected = _plain(worker, paths)
            worst = max(worst, _difference(logits[row, nodes], expected, worker.model_runner.dtype))
    limit = TOLERANCE.get(worker.model_runner.dtype, 2.5e-1)
    if not worst <= limit:  # also refuses NaN
        raise Refused(
            f"the start-up check failed: with the tree mask a node's logits differ from a plain pass over its path by "
            f"{worst:.2g} of their spread (limit {limit:.0e}); mask or positions are not applied, so the text would be "
            f"wrong. Remove what changes attention or patches SGLang, or use --speculative-algorithm DFLASH"
        )
    logger.info("DDTREE start-up check passed: %d prefixes, worst difference %.1e of the spread", len(prompts), worst)


def _tokens(worker: Any, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, worker.vocab_size, (count,), generator=generator).tolist()


def _random_tree(worker: Any, roots: list[int], prefixes: Sequence[int], generator: torch.Generator) -> Tree:
    """Trees over random candidates, built like any other, and compared with the reference."""
    config, rows = worker.config, len(roots)
    ids = torch.stack(
        [
            torch.stack(
                [
                    torch.randperm(worker.vocab_size, generator=generator)[: worker.candidates]
                    for _ in range(config.block - 1)
                ]
            )
            for _ in range(rows)
        ]
    )
    vals = torch.randn(ids.shape, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    device = worker.device
    tree: Tree = worker.ops.build(
        vals.to(device),
        ids.to(device),
        None,
        torch.tensor(roots, device=device),
        torch.tensor(prefixes, device=device),
        width=config.width,
        spine=config.spine,
    )
    for row in range(rows):
        nodes = reference.build(reference.log_probabilities(vals[row].numpy()), config.budget, config.spine)
        if tree.parents[row].tolist()[: len(nodes.parents)] != nodes.parents:
            raise Refused(
                f"the start-up check failed: {type(worker.ops).__name__} builds another tree than the reference; "
                "use --speculative-algorithm DFLASH and report the device and driver"
            )
    return tree


def _verify(worker: Any, prompts: list[list[int]], generator: torch.Generator) -> tuple[Tree, torch.Tensor]:
    """Prefill the prompts less their last token, which is the root, and verify a tree after each. Logits [rows, width,
    vocab]."""
    prefixes = [len(p) - 1 for p in prompts]
    taken = _Rows.take(worker, [n + worker.config.window for n in prefixes])
    try:
        _extend(worker, taken, [p[:-1] for p in prompts])
        tree = _random_tree(worker, [p[-1] for p in prompts], prefixes, generator)
        batch = _batch(worker, taken, prefixes)
        batch.forward_mode = ForwardMode.DECODE
        window = worker._open_window(batch, None, tree.tokens[:, 0])
        out = worker.verify(batch, tree, window).logits_output.next_token_logits
        processor = worker._target_logits_processor
        if processor is not None and processor.is_deferred_shard(out):
            out = processor.finish_deferred_gather(out)
        logits = out.view(len(prompts), worker.config.width, -1)[..., : worker.vocab_size].float().clone()
        return tree, logits
    finally:
        taken.give_back()


def _plain(worker: Any, paths: list[list[int]]) -> torch.Tensor:
    """Logits after the last token of each path, each run as a prompt. [paths, vocab]."""
    pool, allocator = worker.target_worker.get_memory_pool()
    out: list[torch.Tensor] = []
    todo = list(paths)
    while todo:
        group = todo[: max(1, pool.available_size())]
        page = int(allocator.page_size)
        while len(group) > 1 and sum(-(-len(p) // page) * page for p in group) > allocator.available_size():
            group = group[: len(group) // 2]
        taken = _Rows.take(worker, [len(p) for p in group])
        try:
            out.append(_extend(worker, taken, group)[:, : worker.vocab_size].float().clone())
        finally:
            taken.give_back()
        todo = todo[len(group) :]
    return torch.cat(out)


def _batch(worker: Any, taken: _Rows, lengths: list[int]) -> Any:
    """A scheduler batch without requests: what the forward pass reads of one."""
    pool, allocator = worker.target_worker.get_memory_pool()
    runner = worker.model_runner
    batch = ScheduleBatch.init_new([], pool, allocator, None, runner.model_config, False, runner.spec_algorithm)
    batch.is_prefill_only = False
    batch.req_pool_indices = torch.tensor(taken.rows, dtype=torch.int64, device=worker.device)
    batch.req_pool_indices_cpu = torch.tensor(taken.rows, dtype=torch.int64)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(worker.device)
    batch.orig_seq_lens = batch.seq_lens.int()
    batch.seq_lens_sum = sum(lengths)
    return batch


def _extend(worker: Any, taken: _Rows, prompts: list[list[int]]) -> torch.Tensor:
    """A plain prefill of the prompts; logits of their last tokens."""
    lengths = [len(p) for p in prompts]
    batch = _batch(worker, taken, lengths)
    batch.forward_mode = ForwardMode.EXTEND
    batch.input_ids = torch.tensor([t for p in prompts for t in p], dtype=torch.int64, device=worker.device)
    batch.out_cache_loc = torch.cat([s[:n] for s, n in zip(taken.slots, lengths, strict=True)]).long()
    batch.extend_lens, batch.prefix_lens = lengths, [0] * len(prompts)
    batch.extend_num_tokens = sum(lengths)
    batch.extend_logprob_start_lens = lengths
    runner = worker.model_runner
    forward_batch = ForwardBatch.init_new(
        batch, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
    )
    return runner.forward(forward_batch).logits_output.next_token_logits


def _chosen(tree: Tree, row: int) -> list[int]:
    count = int(tree.counts[row])
    deepest = sorted(range(count), key=lambda n: (-int(tree.depths[row, n]), n))
    return sorted({*range(min(count, CHECKED // 2)), *deepest[: CHECKED // 2]})


def _path(tree: Tree, row: int, node: int) -> list[int]:
    """Tokens from the root's first child to ``node``."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens[::-1]


def _difference(seen: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """How far the worst node is off, over the standard deviation of its expected logits. [nodes, vocab] each."""
    error = (seen - expected.to(seen.device)).abs()
    size = error.amax(-1) if dtype == torch.float32 else error.square().mean(-1).sqrt()
    return float((size / expected.to(seen.device).std(-1)).max())
