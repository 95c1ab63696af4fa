"""What a DDTREE engine's memory goes to beyond weights and the KV of running text: before it is launched, and what its
CUDA graphs have taken once they are recorded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_ddtree.config import Config

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes the ledger needs. ``kv_bytes``: bytes of KV of one token in all layers of the target, ``draft_kv_bytes`` of
    the drafter, on one GPU; ``aux``: width of the target's hidden states the drafter reads; ``bytes``: of a number in
    the model's type; ``backend``: the target's attention backend, ``graph_batch`` 0 without CUDA graphs."""

    vocab: int
    aux: int
    kv_bytes: int
    draft_kv_bytes: int
    bytes: int
    context: int
    running: int
    graph_batch: int
    backend: str = "triton"


@dataclass(frozen=True)
class Entry:
    """One line: what, its bytes, and the flag that shrinks it."""

    what: str
    size: int
    flag: str


def ledger(config: Config, shape: Shape) -> list[Entry]:
    """The entries, at the configured width and batch."""
    rows = shape.running * config.width
    drafted = shape.running * (config.block - 1)
    budget = "--speculative-ddtree-budget"
    running = "--max-running-requests"
    return [
        Entry(
            f"KV slots ahead of {shape.running} requests: two windows of {config.window} each",
            2 * shape.running * config.window * (shape.kv_bytes + shape.draft_kv_bytes),
            running,
        ),
        Entry(f"target's logits, {rows} rows of {shape.vocab} in float32", rows * shape.vocab * 4, budget),
        Entry(f"hidden states for the drafter, {rows} rows of {shape.aux}", rows * shape.aux * shape.bytes, budget),
        Entry(
            f"drafter's logits, {drafted} rows of {shape.vocab}"
            if config.budget > 16
            else f"drafter's candidates, {drafted} rows",
            drafted * (shape.vocab * shape.bytes if config.budget > 16 else 16 * 12),
            running,
        ),
        _reach(config, shape),
    ]


def _reach(config: Config, shape: Shape) -> Entry:
    """What says which slots and nodes a row sees: it grows with the context."""
    flag = "--context-length"
    if shape.backend == "fa3":
        each = 4 * shape.graph_batch * shape.context
        return Entry(f"lists of prefix slots, two for {shape.graph_batch} requests", 2 * each, flag)
    rows = (shape.graph_batch or shape.running) * config.width
    kept = "SGLang's mask buffer" if shape.graph_batch else "the mask of a step"
    longest = shape.context + config.width
    return Entry(f"{kept}, {rows} rows of up to {longest} bytes", rows * longest, flag)


def text(config: Config, shape: Shape) -> str:
    """The ledger in lines, each with its flag."""
    entries = ledger(config, shape)
    lines = [f"ddtree: memory: {e.size / MIB:8.1f} MiB  {e.what} ({e.flag})" for e in entries]
    total = sum(e.size for e in entries)
    graphs = f" and CUDA graphs up to batch {shape.graph_batch}: measured once recorded (--cuda-graph-max-bs-decode)"
    lines.append(
        f"ddtree: memory: {total / MIB:8.1f} MiB  in all, beside weights and the KV of text (--max-total-tokens)"
        + (graphs if shape.graph_batch else "")
    )
    counts = shape.running * shape.vocab * 4
    lines.append(f"ddtree: memory: {counts / MIB:8.1f} MiB  more once a request has penalties (--max-running-requests)")
    return "\n".join(lines)


def graphs(taken: Mapping[str, float], sizes: Sequence[int]) -> str:
    """What recording took, in lines. taken: bytes by whose graphs, in the order of their recording; sizes: the batches
    there are graphs for. No formula gives this: beside the graphs' own memory it is the buffers that all sizes share,
    what compiled kernels and libraries keep, and whatever another process on the GPU took or freed meanwhile."""
    listed = f"for {len(sizes)} batch sizes up to {max(sizes)} (--cuda-graph-max-bs-decode)"
    return "\n".join(
        f"ddtree: memory: {size / MIB:8.1f} MiB  measured: CUDA graphs of {whose}, {listed}"
        for whose, size in taken.items()
    )
