"""Our own attention for the passes of a DDTREE step, on SGLang's Triton backend.

A step's two passes (the drafter's block, the target's tree) have a fixed number of new rows a request, so they need
neither SGLang's general extend kernel with its byte mask nor the metadata it prepares outside the CUDA graphs. All else
(prefill, decode) stays SGLang's. The backend's methods are replaced on its instance, and only where every layer is of a
kind that is proven; elsewhere SGLang's kernel reads the full mask as before."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_ddtree.config import ATTENTION_ENV, Refused
from sglang_ddtree.kernels.attention import Scratch, list_prefixes, plan, verify_attention

logger = logging.getLogger(__name__)


def reason_against(runner: Any) -> str:
    """Why a runner's attention has to stay SGLang's; empty if it need not."""
    backend, pool = runner.attn_backend, runner.token_to_kv_pool
    if type(backend).__name__ != "TritonAttnBackend":
        return f"the backend is {type(backend).__name__}"
    if backend.enable_deterministic:
        return "deterministic inference has a kernel of its own"
    if backend.use_mla or backend.dcp_size > 1 or backend.dllm_attention is not None or backend.sliding_window_size:
        return "the backend's attention is of another kind"
    space = backend.kv_index_translator.space(IdSpaceKind.FULL)
    if space.write is not None or space.read_v2p is not None:
        return "the KV pool translates slots"
    layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
    if not layers:
        return "the model has no attention layers that are known"
    for layer in layers:
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if keys.ndim != 3 or values.ndim != 3 or keys.stride(-1) != 1 or values.stride(-1) != 1:
            return "the KV pool's layout is another"
        if keys.dtype != runner.dtype or runner.dtype not in (torch.bfloat16, torch.float16):
            return f"KV in {keys.dtype} for a model in {runner.dtype}"
        if (
            layer.qk_head_dim != layer.v_head_dim
            or layer.qk_head_dim > 256
            or layer.logit_cap
            or layer.is_cross_attention
            or layer.xai_temperature_len > 0
            or layer.sliding_window_size > -1
            or layer.k_scale is not None
        ):
            return "a layer caps, scales or windows its scores, or its heads are unequal or wide"
    return ""


def install(runner: Any, width: int, *, tree: bool) -> torch.Tensor | None:
    """Take over the runner's passes of ``width`` rows, if all its layers allow it.

    Returns the mask words to fill before each pass of a tree, int32 [requests, width, ceil(width / 32)] (unused for a
    drafter's block), or None if SGLang's attention stays."""
    wanted = os.environ.get(ATTENTION_ENV, "own")
    if wanted not in ("own", "stock"):
        raise Refused(f"{ATTENTION_ENV} must be own or stock, not {wanted!r}")
    against = f"{ATTENTION_ENV}=stock" if wanted == "stock" else reason_against(runner)
    kind = "tree" if tree else "draft block"
    if against:
        logger.info("DDTREE %s attention is SGLang's: %s", kind, against)
        return None
    taken = _Taken(runner, width, tree)
    backend = runner.attn_backend
    backend.forward_extend = taken.forward_extend
    backend.init_forward_metadata_out_graph = taken.out_graph
    backend.init_forward_metadata_in_graph = taken.in_graph
    logger.info("DDTREE %s attention is our own", kind)
    return taken.words


class _Taken:
    """The replaced methods of one backend."""

    def __init__(self, runner: Any, width: int, tree: bool) -> None:
        self.backend, self.width, self.tree = runner.attn_backend, width, tree
        device = str(runner.device)
        gpu = torch.cuda.get_device_properties(runner.gpu_id)
        shared = int(gpu.shared_memory_per_block_optin)
        layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
        self.scratch = Scratch(device, gpu.multi_processor_count, max(layer.qk_head_dim for layer in layers), shared)
        requests = max(runner.req_to_token_pool.size, 1) + 1
        self.words = torch.zeros((requests, width, -(-width // 32)), dtype=torch.int32, device=device)
        self._extend = self.backend.forward_extend
        self._out_graph = self.backend.init_forward_metadata_out_graph
        self._in_graph = self.backend.init_forward_metadata_in_graph

    def out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a replay there is nothing to do: the graph lists the prefixes itself."""
        if in_capture or not forward_batch.forward_mode.is_target_verify():
            self._out_graph(forward_batch, in_capture)

    def in_graph(self, forward_batch: Any) -> None:
        """Captured at the head of every graph."""
        self._in_graph(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            metadata = self.backend.forward_metadata
            list_prefixes(
                self.backend.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                metadata.kv_indptr,
                metadata.kv_indices,
            )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """SGLang's ``forward_extend``."""
        if not forward_batch.forward_mode.is_target_verify():
            return self._extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
        sees_all = layer.attn_type == AttentionType.ENCODER_ONLY
        if k is None or v is None or sees_all == self.tree or any(x is not None for x in more.values()):
            raise RuntimeError(
                f"layer {layer.layer_id} asks for attention that DDTREE's kernel has not; set {ATTENTION_ENV}=stock"
            )
        backend = self.backend
        if save_kv_cache:
            backend._set_kv_buffer(forward_batch, layer, KVWriteLoc.for_batch(forward_batch), k, v)
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        batch = rows.shape[0] // self.width
        metadata = backend.forward_metadata
        verify_attention(
            rows,
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            out.view(rows.shape),
            backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
            backend.token_to_kv_pool.get_value_buffer(layer.layer_id),
            metadata.kv_indptr,
            metadata.kv_indices,
            self.words if self.tree else None,
            self.scratch,
            width=self.width,
            scale=layer.scaling,
            shape=plan(
                batch,
                self.width,
                layer.tp_q_head_num,
                layer.tp_k_head_num,
                layer.qk_head_dim,
                self.scratch.processors,
                self.scratch.shared,
            ),
        )
        return out
