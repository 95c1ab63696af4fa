"""One token of the target for every node of the tree.

At temperature 0 it is the most likely one. Else it is one draw from the node's adjusted distribution (temperature,
top-k, top-p, min-p); the walk then follows a node's own draw. Each visited node's token is thus a fresh draw given
its path, so the text has exactly the target's distribution, whatever the tree."""

from __future__ import annotations

from typing import Any

import torch


def draw(weights: torch.Tensor) -> torch.Tensor:
    """One draw from each row of weights [N, vocab], which is overwritten: int64 [N]. It is how torch.multinomial makes
    a single draw, without its check that all weights are numbers: a row of others (a model's overflow) would end the
    engine, on a GPU by an assert. Here it draws some token."""
    return weights.div_(torch.empty_like(weights).exponential_()).argmax(-1)


def numbers(weights: torch.Tensor) -> torch.Tensor:
    """A softmax's rows [N, vocab], in place; equal weights where there are none (one NaN makes all of its row NaN)."""
    return weights.masked_fill_(weights[:, :1].isnan(), 1.0)


def target_tokens(logits: torch.Tensor, sampling: Any, positions: torch.Tensor, width: int) -> torch.Tensor:
    """logits [bs * width, vocab], positions [bs * width] of the nodes -> int64 [bs * width]. ``sampling`` is SGLang's
    SamplingBatchInfo or None (greedy). Seeded requests draw by the node's position, as plain decoding does."""
    greedy = logits.argmax(-1)
    if sampling is None or sampling.is_all_greedy:
        return greedy
    from sglang.srt.layers.sampler import multinomial_with_seed, top_k_top_p_min_p_sampling_from_probs_torch

    def per_node(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.reshape(-1).repeat_interleave(width, dim=0)

    temperatures, seed, top_ks = (
        per_node(sampling.temperatures),
        per_node(sampling.sampling_seed),
        per_node(sampling.top_ks),
    )
    assert temperatures is not None
    assert top_ks is not None
    scaled = logits.float() / temperatures[:, None]
    if not (sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling):
        if seed is None:
            drawn = draw(scaled.softmax(-1))
        else:
            drawn = multinomial_with_seed(scaled.double().log_softmax(-1), seed, positions).view(-1)
    else:
        drawn = top_k_top_p_min_p_sampling_from_probs_torch(
            numbers(scaled.softmax(-1)),
            top_ks,
            per_node(sampling.top_ps),
            per_node(sampling.min_ps),
            sampling.need_min_p_sampling,
            seed,
            positions,
        ).view(-1)
    return torch.where(top_ks == 1, greedy, drawn.long())
