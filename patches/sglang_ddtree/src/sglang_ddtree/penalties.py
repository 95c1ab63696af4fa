"""Penalties as plain decoding has them: every node by the tokens on its own path.

A token's count is how often it stands in the request's output before the position: the output so far (the root is its
last token) and the drafts on the node's path. Frequency and presence penalties are subtracted, a repetition penalty
then divides positive scores and multiplies negative ones, ``min_new_tokens`` forbids what ends a text while the output
is too short; SGLang's order and definitions (``srt/sampling/penaltylib``). The prompt counts nowhere.

SGLang counts on the host, one token a step and, with overlap scheduling, one step late. The counts here live on the
device and are taken from the accepted paths themselves, so they are never late and nothing waits for them. Without a
request that asks for penalties nothing here runs and no memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Terms:
    """What the requests of a batch ask for. frequency, presence, repetition float32 [bs]; minimum (tokens of the output
    before a text may end) and prompt (its length) int64 [bs]; stops int64 [bs, n]: what ends a text, filled up with
    any of them. ``scaled``: rows with a repetition penalty, and it; ``added``, ``held``: whether any row has
    an additive penalty, a minimum."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    minimum: torch.Tensor
    prompt: torch.Tensor
    stops: torch.Tensor
    scaled: tuple[tuple[int, float], ...]
    added: bool
    held: bool


def wanted(sampling: Any) -> bool:
    """Whether any request of the batch has penalties, by what SGLang prepared for this pass (SamplingBatchInfo or
    None): constant time, no synchronisation."""
    if sampling is None:
        return False
    live = sampling.penalizer_orchestrator
    return (
        sampling.acc_additive_penalties is not None
        or sampling.acc_scaling_penalties is not None
        or (live is not None and live.is_required)
    )


def ends(request: Any) -> set[int]:
    """Tokens that ``min_new_tokens`` forbids: SGLang's choice (``penaltylib/min_new_tokens.py``)."""
    given = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        given |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return {int(token) for token in given if token is not None}


def read_terms(requests: Sequence[Any], vocab: int, device: str) -> Terms:
    """The terms of SGLang's requests. Copies to the device do not wait."""
    each = [request.sampling_params for request in requests]
    floats = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in each]
    whole = [[p.min_new_tokens, len(r.origin_input_ids)] for p, r in zip(each, requests, strict=True)]
    stops = [
        sorted(token for token in ends(r) if 0 <= token < vocab) if p.min_new_tokens > 0 else []
        for p, r in zip(each, requests, strict=True)
    ]
    longest = max(1, *(len(row) for row in stops))
    padded = [row + (row[:1] or [0]) * (longest - len(row)) for row in stops]
    held = [bool(row) and p.min_new_tokens > 0 for p, row in zip(each, stops, strict=True)]
    for row, holds in zip(whole, held, strict=True):
        row[0] = row[0] if holds else 0  # a minimum without an end to forbid: its fill must stay as it is
    frequency, presence, repetition = to_device(floats, torch.float32, device).unbind(1)
    minimum, prompt = to_device(whole, torch.int64, device).unbind(1)
    return Terms(
        frequency,
        presence,
        repetition,
        minimum,
        prompt,
        to_device(padded, torch.int64, device),
        tuple((row, p.repetition_penalty) for row, p in enumerate(each) if p.repetition_penalty != 1.0),
        any(p.frequency_penalty or p.presence_penalty for p in each),
        any(held),
    )


def to_device(values: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A small tensor that does not make the host wait for the device."""
    host = torch.tensor(values, dtype=dtype)
    if str(device).split(":")[0] != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def path_tokens(tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts on every node's path, itself first, int64 [bs, width, depth], and which entries are drafts: the rest
    is the root's token. tokens, parents [bs, width]; ``depth``: deepest node."""
    batch, width = tokens.shape
    up = parents.long()
    at = torch.arange(width, device=tokens.device).repeat(batch, 1)
    path, drafts = [], []
    for _ in range(depth):
        above = up.gather(1, at)
        draft = above >= 0
        path.append(torch.where(draft, tokens.gather(1, at), tokens[:, :1]))
        drafts.append(draft)
        at = torch.where(draft, above, at)
    return torch.stack(path, -1), torch.stack(drafts, -1)


def added(counts: torch.Tensor, terms: Terms) -> torch.Tensor:
    """What is subtracted, float32 of the shape of counts, [bs, …]."""
    shape = (-1, *(1 for _ in counts.shape[1:]))
    return terms.frequency.view(shape) * counts + terms.presence.view(shape) * (counts > 0)


def scale(logits: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A repetition penalty: factor 1 leaves a score as it is."""
    return torch.where(logits < 0, logits * factor, logits / factor)


def weigh(
    logits: torch.Tensor, counts: torch.Tensor, terms: Terms, tokens: torch.Tensor, parents: torch.Tensor, depth: int
) -> None:
    """Frequency, presence and repetition penalties of every node, in place. logits [bs * width, vocab]; counts integer
    [bs, vocab] of the output so far, root included; tokens, parents [bs, width] of the trees. Scores of a path's tokens
    are worked out from the raw ones and replace what all nodes of the request have in common, so nothing but the logits
    is as large as they are. On a GPU it is ``kernels.penalties``, which must give the same."""
    batch, width = tokens.shape
    table = logits.view(batch, width, -1)
    path, drafts = path_tokens(tokens, parents, depth)
    raw = table.gather(2, path)
    seen = ((path[..., :, None] == path[..., None, :]) & drafts[..., None, :]).sum(-1)
    total = counts.gather(1, path.view(batch, -1)).view_as(path) + seen
    value = raw - added(total, terms)
    value = scale(value, torch.where(total > 0, terms.repetition.view(-1, 1, 1), 1.0))
    if terms.added:
        table.sub_(added(counts, terms)[:, None, :])
    for row, penalty in terms.scaled:
        table[row] = scale(table[row], torch.where(counts[row] > 0, penalty, 1.0))
    table.scatter_(2, path, value.to(table.dtype))


def hold(logits: torch.Tensor, terms: Terms, positions: torch.Tensor) -> None:
    """``min_new_tokens``, in place: what ends a text is forbidden at nodes before it. positions [bs, width]."""
    batch, width = positions.shape
    table = logits.view(batch, width, -1)
    output = positions - terms.prompt[:, None] + 1  # the root is in the output and not yet in the prefix
    short = output < terms.minimum[:, None]
    at = terms.stops[:, None, :].expand(batch, width, -1)
    table.scatter_(2, at, table.gather(2, at).masked_fill_(short[:, :, None], float("-inf")))


class Penalties:
    """Counts of the output tokens of running requests by their row of SGLang's request table, int32 [slots, vocab];
    taken when the first request asks for penalties."""

    def __init__(self, slots: int, vocab: int, device: str) -> None:
        self._shape, self._device = (slots, vocab), device
        self._counts: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """All counts."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts

    def counts(self, slots: torch.Tensor) -> torch.Tensor:
        """Of the requests in ``slots`` [bs]: int32 [bs, vocab]."""
        return self.table.index_select(0, slots.long())

    def count(self, slots: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Add the first ``lengths`` [bs] tokens (all, if None) of tokens [bs, n] to the output of their requests."""
        table = self.table
        once = torch.ones_like(tokens, dtype=torch.int32)
        if lengths is not None:
            once = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).int()
        at = slots.long()[:, None] * self._shape[1] + tokens.long()
        table.view(-1).scatter_add_(0, at.view(-1), once.view(-1))

    def begin(self, batch: Any) -> None:
        """Before a prefill: a request that enters starts with the output it has (a retracted one comes back with
        some), one that decodes along in a mixed batch goes on. Where there is output before the prefill's token, the
        adjustments SGLang has prepared for this pass (a copy of the scheduler's) are replaced: they know of none."""
        sampling, requests = batch.sampling_info, batch.reqs
        going = {id(request) for request in batch.decoding_reqs or ()}
        table = self.table
        entering = [row for row, request in enumerate(requests) if id(request) not in going]
        slots = batch.req_pool_indices.long()
        if entering:
            table.index_fill_(0, slots[to_device(entering, torch.int64, self._device)], 0)
        rows, tokens = [], []
        for row in entering:
            output = list(requests[row].output_ids)
            rows += [row] * len(output)
            tokens += output
        if rows:
            own = slots[to_device(rows, torch.int64, self._device)]
            self.count(own, to_device(tokens, torch.int64, self._device)[:, None])
        if not rows and len(entering) == len(requests):
            # nothing to scale either: as good as SGLang's ones, which cost a pass over the logits
            sampling.acc_scaling_penalties = None
            return
        terms = read_terms(requests, self._shape[1], self._device)
        counts = self.counts(slots)
        change = -added(counts, terms)
        if terms.held:
            short = batch.seq_lens - terms.prompt < terms.minimum
            change.scatter_(1, terms.stops, change.gather(1, terms.stops).masked_fill_(short[:, None], float("-inf")))
        sampling.acc_additive_penalties = change
        sampling.acc_scaling_penalties = (
            torch.where(counts > 0, terms.repetition[:, None], 1.0) if terms.scaled else None
        )
        sampling.penalizer_orchestrator = None
