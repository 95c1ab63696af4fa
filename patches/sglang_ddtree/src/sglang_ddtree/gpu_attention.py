"""Our own attention for the passes of a DDTREE step, on SGLang's Triton and FlashAttention-3 backends.

A step's two passes (the drafter's block, the target's tree) have a fixed number of new rows a request, so they need
neither SGLang's general extend kernel with its byte mask nor the metadata it prepares outside the CUDA graphs. All else
(prefill, decode) stays the backend's. Its methods are replaced on its instance, and only where every layer is of a kind
that is proven; elsewhere Triton's kernel reads the full mask as before, and FlashAttention, which reads none (a chain's
causal pass is all it would do), is refused."""

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


TRITON, FLASH = "TritonAttnBackend", "FlashAttentionBackend"


def _against_backend(backend: Any) -> str:
    kind = type(backend).__name__
    if kind == TRITON:
        fixed = backend.enable_deterministic
        other = backend.dcp_size > 1 or backend.dllm_attention is not None or backend.sliding_window_size
    elif kind == FLASH and backend.fa_impl_ver == 3:
        fixed = backend.num_splits == 1
        other = backend.has_swa or backend.has_local_attention or backend.attn_cp_size > 1
        other = other or backend.kv_cache_is_mxfp8 or backend._kv_shard_pool is not None or backend.fa_skip_kv_cache
    else:
        return f"the backend is {kind}"
    if fixed:
        return "deterministic inference has a kernel of its own"
    return "the backend's attention is of another kind" if backend.use_mla or other else ""


def reason_against(runner: Any) -> str:
    """Why a runner's attention has to stay SGLang's; empty if it need not."""
    backend, pool = runner.attn_backend, runner.token_to_kv_pool
    if against := _against_backend(backend):
        return against
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
    backend = runner.attn_backend
    if against and type(backend).__name__ != TRITON:
        raise Refused(
            f"FlashAttention reads no tree mask, and DDTree's own attention cannot take its place ({against}); "
            "use --attention-backend triton"
        )
    if against:
        logger.info("DDTREE %s attention is SGLang's: %s", kind, against)
        return None
    taken = _Taken(runner, width, tree) if type(backend).__name__ == TRITON else _TakenFlash(runner, width, tree)
    backend.forward_extend = taken.forward_extend
    backend.init_forward_metadata = taken.eager
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
        self._eager = self.backend.init_forward_metadata
        self._out_graph = self.backend.init_forward_metadata_out_graph
        self._in_graph = self.backend.init_forward_metadata_in_graph

    def prefixes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` and ``indices`` of the pass at hand, as ``verify_attention`` reads them."""
        metadata = self.backend.forward_metadata
        return metadata.kv_indptr, metadata.kv_indices

    def eager(self, forward_batch: Any) -> None:
        """Before a pass without a graph."""
        self._eager(forward_batch)

    def out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a replay there is nothing to do: the graph lists the prefixes itself."""
        if in_capture or not forward_batch.forward_mode.is_target_verify():
            self._out_graph(forward_batch, in_capture)

    def in_graph(self, forward_batch: Any) -> None:
        """Captured at the head of every graph."""
        self._in_graph(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self.list_prefixes(forward_batch)

    def list_prefixes(self, forward_batch: Any) -> None:
        """The slots of every request's prefix, in one launch."""
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        list_prefixes(self.backend.req_to_token, rows, lens, *self.prefixes())

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
            self.store(forward_batch, layer, k, v)
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        batch = rows.shape[0] // self.width
        indptr, indices = self.prefixes()
        verify_attention(
            rows,
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            out.view(rows.shape),
            backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
            backend.token_to_kv_pool.get_value_buffer(layer.layer_id),
            indptr,
            indices,
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

    def store(self, forward_batch: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new rows' KV."""
        self.backend._set_kv_buffer(forward_batch, layer, KVWriteLoc.for_batch(forward_batch), k, v)


class _TakenFlash(_Taken):
    """FlashAttention's metadata holds page tables, so the prefix lists are our own: one pair that all graphs share, and
    one that a pass without a graph makes for itself."""

    def __init__(self, runner: Any, width: int, tree: bool) -> None:
        super().__init__(runner, width, tree)
        self._captured: list[tuple[torch.Tensor, torch.Tensor]] = []  # graphs read these, so none is let go
        self._current: tuple[torch.Tensor, torch.Tensor] | None = None

    def prefixes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``_Taken``."""
        if self._current is None:
            raise RuntimeError("no pass was prepared")
        return self._current

    def _lists(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.words.device
        indices = torch.zeros(batch * self.backend.max_context_len, dtype=torch.int32, device=device)
        return torch.zeros(batch + 1, dtype=torch.int32, device=device), indices

    def eager(self, forward_batch: Any) -> None:
        """See ``_Taken``."""
        super().eager(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._current = self._lists(forward_batch.batch_size)
            self.list_prefixes(forward_batch)

    def out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """See ``_Taken``. A capture begins with the largest batch, whose lists the others share."""
        super().out_graph(forward_batch, in_capture)
        if in_capture and forward_batch.forward_mode.is_target_verify():
            batch = forward_batch.batch_size
            if not self._captured or self._captured[-1][0].numel() <= batch:
                self._captured.append(self._lists(batch))
            indptr, indices = self._captured[-1]
            self._current = indptr[: batch + 1], indices

    def store(self, forward_batch: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """See ``_Taken``."""
        self.backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
