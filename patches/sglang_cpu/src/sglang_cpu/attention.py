"""TARGET_VERIFY for SGLang's ``torch_native`` attention backend.

``srt/layers/attention/torch_native_backend.py:279`` (0.5.23) reads ``extend_prefix_lens``, which a verify batch does
not have, so no speculative algorithm runs on it. A verify forward has the same number of new tokens for every
request; they see the whole prefix and, among themselves, what the mask allows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def split_mask(custom_mask: torch.Tensor, prefix: list[int], width: int) -> list[torch.Tensor]:
    """Masks of one batch, one ``[width, width]`` bool tensor a request: which new token sees which new token.

    ``custom_mask`` is flat, in one of SGLang's two layouts: QLEN_ONLY, ``width * width`` cells a request, or FULL,
    rows of ``prefix + width`` cells whose prefix part is all true (``layers/attention/verify_mask.py``)."""
    flat = custom_mask.view(-1).bool()
    full = sum(width * (length + width) for length in prefix)
    if flat.numel() == len(prefix) * width * width and full != flat.numel():
        return list(flat.view(len(prefix), width, width))
    if flat.numel() < full:
        raise ValueError(
            f"verify mask has {flat.numel()} cells, expected {full} (FULL) or {len(prefix) * width * width} (QLEN_ONLY)"
        )
    masks, offset = [], 0
    for length in prefix:
        cells = width * (length + width)
        masks.append(flat[offset : offset + cells].view(width, length + width)[:, length:])
        offset += cells
    return masks


def verify_attention(
    backend: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool
) -> torch.Tensor:
    """Attention of a verify batch. q: [bs * width, heads * dim]; returns [bs * width, heads * v_dim]."""
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if save_kv_cache and k is not None and v is not None:
        backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
    rows = batch.batch_size
    query = q.reshape(rows, -1, heads, layer.qk_head_dim).transpose(1, 2)
    width = query.shape[2]
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    prefix = batch.seq_lens.tolist()
    slots = batch.req_pool_indices.tolist()
    table = backend.req_to_token_pool.req_to_token
    bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
    masks: list[torch.Tensor] | None = None
    custom = getattr(batch.spec_info, "custom_mask", None)
    if not bidirectional:
        if custom is not None:
            masks = _masks_of(batch, custom, prefix, width)
        else:
            masks = [torch.ones(width, width, dtype=torch.bool, device=q.device).tril()] * rows
    out = q.new_empty(rows, width, heads, layer.v_head_dim)
    for row, (slot, length) in enumerate(zip(slots, prefix, strict=True)):
        locations = table[slot, : length + width].long()
        allowed = None
        if masks is not None:
            allowed = torch.cat([masks[row].new_ones(width, length), masks[row]], dim=1)
        attended = scaled_dot_product_attention(
            query[row : row + 1],
            keys[locations].to(q.dtype).transpose(0, 1)[None],
            values[locations].to(q.dtype).transpose(0, 1)[None],
            attn_mask=allowed,
            scale=layer.scaling,
            enable_gqa=heads != kv_heads,
        )
        out[row] = attended[0].transpose(0, 1)
    return out.reshape(rows * width, heads * layer.v_head_dim)


def _masks_of(batch: Any, custom: torch.Tensor, prefix: list[int], width: int) -> list[torch.Tensor]:
    """``split_mask``, once a forward and not once a layer."""
    cached = getattr(batch, "_sglang_cpu_masks", None)
    if cached is None or cached[0] is not custom:
        cached = (custom, split_mask(custom, prefix, width))
        batch._sglang_cpu_masks = cached
    masks: list[torch.Tensor] = cached[1]
    return masks


def wrap_forward_extend(original: Any) -> Any:
    def forward_extend(
        self: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            return verify_attention(self, q, k, v, layer, forward_batch, save_kv_cache)
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    return forward_extend
