"""DDTree on SGLang's DFlash worker: the same drafter and the same prefill, a tree instead of a chain in the decode
step.

One step, for every request: draft a block → candidates of each position → tree → one verify pass of the target → walk
→ move the accepted path's KV to the front of the window → commit the drafter's KV from the target's hidden states.
The stock step is ``srt/speculative/dflash_worker_v2.py:2478-3014`` (0.5.23); what is not written here is inherited
from it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel, get_spec
from sglang.srt.speculative import dflash_worker_v2 as stock
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ddtree import ledger, selfcheck
from sglang_ddtree.config import TAIL_ENV, Config, Refused
from sglang_ddtree.metrics import Metrics
from sglang_ddtree.ops import TreeOps, select_ops
from sglang_ddtree.penalties import Penalties, hold, read_terms, wanted
from sglang_ddtree.plugin import settings
from sglang_ddtree.sampling import target_tokens
from sglang_ddtree.tree import Accepted, Opening, Tree, drafted
from sglang_ddtree.verify_input import DDTreeVerifyInput

logger = logging.getLogger(__name__)


@dataclass
class Window:
    """KV slots one step writes: ``slots`` [bs, window]; the drafter uses the first ``block`` columns, the tree the
    first ``width``. ``ids`` and ``positions`` [bs, block] of the drafter. ``host_lens`` [bs] on the CPU: an upper bound
    of the prefix lengths."""

    slots: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    plan: Any
    host_lens: torch.Tensor


class DDTreeWorker(stock.DFlashWorkerV2):  # type: ignore[misc]
    """Spec-v2 worker; drives overlap and synchronous scheduling alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = settings()
        if config is None:
            raise Refused(
                "the tree's settings did not reach the scheduler; start through sglang.launch_server or Engine(...)"
            )
        self.config: Config = config
        with get_spec().override(
            speculative_num_draft_tokens=config.block
        ):  # the stock constructor means the drafter's block
            super().__init__(*args, **kwargs)
        self.speculative_num_draft_tokens = config.window
        self.ops: TreeOps = select_ops(str(self.device))
        self._tree_sampler: Any = None
        self._words: torch.Tensor | None = None  # the mask of our own attention, when that is in force
        self._tail: Any = None
        export = get_observability().enable_metrics and self._target_tp_rank == 0
        self.tree_metrics = Metrics(config, export, str(self.device))
        self.vocab_size = int(self.model_runner.model_config.vocab_size)
        self.candidates = min(config.budget, self.vocab_size)
        self._penalties: Penalties | None = None  # until a request asks for some
        if self._target_tp_rank == 0:
            logger.info("DDTREE budget=%d block=%d ops=%s", config.budget, config.block, type(self.ops).__name__)

    # -- start -----------------------------------------------------------------------------------------------

    def _maybe_build_draft_sampler(self) -> None:
        """Not the chain's head; see ``_prepare_gpu``."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Sampling is supported everywhere (``sampling``), so there is no fallback to warn of."""

    def init_attention_backends(self) -> None:
        """SGLang calls this after the target's backend exists and before any graph is captured."""
        super().init_attention_backends()
        if str(self.device).split(":")[0] == "cuda":
            from sglang_ddtree import gpu_attention

            self._words = gpu_attention.install(self.model_runner, self.config.width, tree=True)
            gpu_attention.install(self.draft_model_runner, self.config.block, tree=False)

    def init_cuda_graphs(self) -> None:
        """The last step of starting up: everything exists and nothing is served yet, so this is where the check
        runs."""
        self._prepare_gpu()
        super().init_cuda_graphs()
        free = self._free_memory()
        self._capture_tail()
        self._print_graphs(free - self._free_memory())
        selfcheck.run(self)

    def _has_graphs(self) -> bool:
        on_gpu = str(self.device).split(":")[0] == "cuda"
        return on_gpu and self.model_runner.decode_cuda_graph_runner is not None

    def _free_memory(self) -> int:
        """Of the GPU, in bytes, as SGLang measures around its graphs; 0 without graphs."""
        if not self._has_graphs():
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def _print_graphs(self, tail: int) -> None:
        """What the graphs took, on standard error beside the ledger. tail: bytes of the ends of steps; the others' is
        SGLang's measurement. Never a reason to fail."""
        if not self._has_graphs() or self._target_tp_rank != 0:
            return
        try:
            target, draft = (r.graph_memory_usage for r in (self.model_runner, self.draft_model_runner))
            gib = 1 << 30
            taken = {"the target": target["target_verify"] * gib, "the drafter": draft.get("draft_decode", 0.0) * gib}
            if self._tail is not None:
                taken["the ends of steps"] = tail
            sizes = self.model_runner.decode_cuda_graph_runner.capture_bs
            print(ledger.graphs(taken, sizes), file=sys.stderr, flush=True)
        except Exception as error:
            logger.warning("ddtree: no measurement of the CUDA graphs: %s", error)

    def _prepare_gpu(self) -> None:
        """Share the mask buffer of the target's graphs, and put candidates and tree into the drafter's graphs."""
        attach = getattr(self.ops, "attach", None)
        if attach is None:
            return
        attach(self.model_runner.attn_backend)
        graphs = get_exec().graph.cuda_graph_config.decode
        if graphs.backend != stock.Backend.DISABLED and graphs.bs:
            from sglang_ddtree.kernels.sampler import TreeSampler

            self._tree_sampler = TreeSampler(
                self.config, self._head, self.vocab_size, max(graphs.bs), str(self.device), self._words
            )
            self.draft_model_runner.capture_head_hooks.append(self._embed_in_graph)
            self.draft_model_runner.capture_tail_hooks.append(self._tree_sampler.capture_hook)

    def _embed_in_graph(self, runner: Any, forward_batch: Any) -> None:
        """At the head of the drafter's graph, so that no launch before it is needed."""
        embeds = self._embed(forward_batch.input_ids)
        runner.buffers.input_embeds[: embeds.shape[0]].copy_(embeds)

    def _capture_tail(self) -> None:
        """Record the ends of steps, where both passes have graphs and one GPU decides alone."""
        graphs = self.model_runner.decode_cuda_graph_runner
        if self._tree_sampler is None or graphs is None or self.draft_model_runner.decode_cuda_graph_runner is None:
            return
        wanted = os.environ.get(TAIL_ENV, "graph")
        if wanted not in ("graph", "eager"):
            raise Refused(f"{TAIL_ENV} must be graph or eager, not {wanted!r}")
        one_gpu = get_parallel().tp_size == 1 and type(graphs.backend).__name__ == "FullCudaGraphBackend"
        if wanted == "eager" or not one_gpu:
            logger.info("DDTREE: steps end without a graph of their own")
            return
        from sglang_ddtree.tail import Tail

        tail = Tail(self, self._tree_sampler)
        try:
            tail.capture()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise Refused(
                f"the end of a step cannot be recorded as a CUDA graph ({reason}); set {TAIL_ENV}=eager"
            ) from error
        self._tail = tail

    def prewarm_sampling(self) -> Any:
        """Stock DFlash rehearses its chain's sampling kernels here, which a tree does not use."""
        return self.model_runner.prewarm_sampling()

    # -- step ------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        if (
            batch.forward_mode.is_extend()
            or batch.is_extend_in_batch
            or batch.forward_mode.is_idle()
            or batch.spec_info is None
        ):
            penalties = self._penalties_for(batch) if batch.reqs else None
            if penalties is not None:
                penalties.begin(batch)
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            if penalties is not None:
                penalties.count(batch.req_pool_indices, result.next_token_ids.view(-1, 1))
            if result.speculative_num_draft_tokens is not None:
                result.speculative_num_draft_tokens = self.config.window
            return result
        draft_input: DFlashDraftInputV2 = batch.spec_info
        if str(self.device) != "cpu":  # seq_lens may come from another stream
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix = batch.seq_lens
        metrics = self.tree_metrics
        metrics.mark(0)
        window = self._open_window(batch, draft_input, draft_input.bonus_tokens)
        tree, in_graph = self._draft(batch, draft_input.bonus_tokens, window)
        metrics.mark(1)
        grammar_tree = None
        if batch.has_grammar:  # the copy to the host starts before the target's pass
            grammar_tree = stock.GrammarTree.from_device(*self.ops.links(tree.parents), tree.tokens)
        target_out = self.verify(batch, tree, window, masked=in_graph)
        metrics.mark(2)
        logits_output = target_out.logits_output
        accepted = None
        if (
            self._tail is not None
            and in_graph
            and target_out.can_run_cuda_graph
            and self._can_skip_verify_logits(batch, batch.sampling_info)
        ):
            accepted = self._tail.run(len(batch.seq_lens), logits_output, prefix)
        if accepted is None:
            accepted = self._finish(batch, tree, window, logits_output, grammar_tree, grammar_barrier, on_publish)
        elif on_publish is not None:
            on_publish(accepted.new_seq_lens)
        logits_output.hidden_states = None
        metrics.mark(3)
        metrics.step()
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.out_tokens.reshape(-1),
            accept_lens=accepted.commit_lens,
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus, new_seq_lens=accepted.new_seq_lens
            ),
            speculative_num_draft_tokens=self.config.window,
            speculative_output_stride=self.config.steps,
            new_seq_lens=accepted.new_seq_lens,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )

    def _can_skip_verify_logits(self, batch: Any, sampling_info: Any) -> bool:
        """Stock DFlash looks for penalties where 0.5.23 no longer keeps them, and so finds none."""
        return not wanted(sampling_info) and bool(super()._can_skip_verify_logits(batch, sampling_info))

    def _penalties_for(self, batch: Any) -> Penalties | None:
        """The counts, if a request of the batch has penalties."""
        if not wanted(batch.sampling_info):
            return None
        if self._penalties is None:
            slots = self.model_runner.req_to_token_pool.req_to_token.shape[0]
            self._penalties = Penalties(slots, self.vocab_size, str(self.device))
        return self._penalties

    def _finish(
        self,
        batch: Any,
        tree: Tree,
        window: Window,
        logits_output: Any,
        grammar_tree: Any,
        grammar_barrier: Any,
        on_publish: Any,
    ) -> Accepted:
        """The end of a step without a graph: tokens, walk, KV move, the drafter's KV."""
        prefix = batch.seq_lens
        predicted = self._predict(batch, logits_output, tree, grammar_tree, grammar_barrier)
        accepted = self.ops.walk(tree, predicted.view(tree.tokens.shape), prefix, steps=self.config.steps)
        penalties = self._penalties_for(batch)
        if penalties is not None:
            penalties.count(batch.req_pool_indices, accepted.out_tokens, accepted.commit_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, predicted.view(-1), accept_index=self._visited(accepted))
        # before the new lengths are published: then the scheduler may hand a finished request's slots to another
        slots = window.slots[:, : self.config.width]
        self.ops.move_kv(self.model_runner.token_to_kv_pool, slots, accepted.accept_index)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        self.commit_draft_kv(
            logits_output.hidden_states,
            accepted,
            window.plan.write_ids(self.draft_model_runner.kv_index_translator, cols=slice(0, self.config.steps)),
            prefix,
        )
        self.tree_metrics.account(tree, accepted.accept_len, slots)
        return accepted

    def _open_window(self, batch: Any, draft_input: Any, roots: torch.Tensor) -> Window:
        """The slots after every request's prefix, which the scheduler has already allocated; the drafter's block."""
        size = self.config.window
        opened = self.ops.open(
            Opening(
                self.model_runner.req_to_token_pool.req_to_token,
                batch.req_pool_indices,
                batch.seq_lens,
                roots,
                window=size,
                block=self.config.block,
                mask_id=int(self._mask_token_id),
            )
        )
        host = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host,
            write_virtual=opened.slots.view(-1),
            read_extent=size,
        )
        return Window(*opened, plan, host)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The drafter's input embeddings."""
        if self._full_embed_gpu is not None:
            embeds = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embeds = self._embedding()(ids)
        return embeds if self._noise_embed_scale == 1.0 else embeds * self._noise_embed_scale

    def _draft(self, batch: Any, roots: torch.Tensor, window: Window) -> tuple[Tree, bool]:
        """Run the drafter once and build the trees from its candidates: in the drafter's graph if that ran, which then
        also wrote the mask of our own attention. The second result: whether the graph ran."""
        block, rows = self.config.block, len(batch.seq_lens)
        prefix = batch.seq_lens
        host = window.host_lens + block
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=rows,
            input_ids=window.ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            out_cache_loc=window.slots[:, :block].reshape(-1),
            seq_lens_sum=int(host.sum()),
            seq_lens_cpu=host,
            positions=window.positions.view(-1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), rows * block, dtype=torch.int32, device=self.device)
                if stock.enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=rows * block,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        window.plan.bind(forward_batch, self.draft_model_runner.kv_index_translator, cols=slice(0, block))
        graphs = self.draft_model_runner.decode_cuda_graph_runner
        if self._tree_sampler is None or graphs is None or not graphs.can_run_graph(forward_batch):
            forward_batch.input_embeds = self._embed(window.ids).view(rows * block, -1)
        with torch.inference_mode(), stock.draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward_batch)
            if self._tree_sampler is not None and out.can_run_graph:
                return self._tree_sampler.trees(rows), True
            hidden = out.logits_output.hidden_states
            tokens, vals, lse = candidate_topk(
                drafted(hidden, self.config), self._head(), self.candidates, with_partition=True
            )
        table = (rows, self.config.depth, self.candidates)
        tree = self.ops.build(
            vals.view(table),
            tokens.view(table),
            lse.view(table[:2]),
            roots,
            prefix,
            width=self.config.width,
            spine=self.config.spine,
        )
        return tree, False

    def _embedding(self) -> Any:
        target = self.model_runner.model
        return unwrap_lora_layer(stock._resolve_dflash_embedding_module(self.draft_model, target))

    def _head(self) -> Any:
        return unwrap_lora_layer(self.model_runner.model.lm_head)

    def verify(self, batch: Any, tree: Tree, window: Window, *, masked: bool = False) -> Any:
        """The target's pass over all nodes (``masked``: our own attention's mask is already written). Returns SGLang's
        batch result: logits and hidden states of bs * width rows."""
        width = self.config.width
        mask = None
        if self._words is None:
            mask = self.ops.mask(tree.parents, batch.seq_lens, window.host_lens, depth=self.config.depth)
        elif not masked:
            from sglang_ddtree.kernels.mask import fill_words

            fill_words(self._words, tree.parents, self.config.depth)
        verify_input = DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=tree.positions.reshape(-1),
            draft_token_num=width,
            custom_mask=mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=window.plan,
            kv_loc_cols=slice(0, width),
        )
        batch.out_cache_loc = window.slots[:, :width].reshape(-1)
        saved = batch.seq_lens_cpu, batch.seq_lens_sum
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + width
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:  # no host copy: what is allocated is a safe bound
            batch.seq_lens_cpu = window.host_lens
            batch.seq_lens_sum = int(window.host_lens.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        return self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _predict(
        self, batch: Any, logits_output: Any, tree: Tree, grammar_tree: Any, grammar_barrier: Any
    ) -> torch.Tensor:
        """The target's token after every node, int64 [bs * width]: grammar and logit adjustments applied."""
        sampling = batch.sampling_info
        processor = self._target_logits_processor
        predicted = None
        if processor is not None and processor.is_deferred_shard(logits_output.next_token_logits):
            if self._can_skip_verify_logits(batch, sampling):
                predicted = processor.deferred_argmax(logits_output.next_token_logits)
                logits_output.next_token_logits = None
            else:
                logits_output.next_token_logits = processor.finish_deferred_gather(logits_output.next_token_logits)
        if predicted is None:
            logits = logits_output.next_token_logits
            penalties = self._penalties_for(batch)
            if penalties is not None:
                terms = read_terms(batch.reqs, self.vocab_size, str(self.device))
                if terms.added or terms.scaled:
                    at = batch.req_pool_indices
                    self.ops.weigh(logits, penalties.table, at, terms, tree, depth=self.config.depth)
                if terms.held:
                    hold(logits, terms, tree.positions)
            if grammar_tree is not None:
                mask = stock.build_grammar_vocab_mask(
                    reqs=batch.reqs,
                    tree=grammar_tree,
                    sampling_info=sampling,
                    device=logits.device,
                    barrier=grammar_barrier,
                )
                if mask is not None:
                    mask.apply(logits)
            if sampling is not None and sampling.logit_bias is not None:  # after the grammar, as in plain decoding
                logits.view(*tree.tokens.shape, -1).add_(sampling.logit_bias[:, None])
            predicted = target_tokens(logits, sampling, tree.positions.reshape(-1), self.config.width)
        self._tp_sync.sync(stock.SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, predicted)
        return predicted

    @staticmethod
    def _visited(accepted: Accepted) -> torch.Tensor:
        """Rows of the visited nodes, int64 [bs, steps]; unused entries repeat the root, which is a valid row."""
        return torch.where(accepted.accept_index >= 0, accepted.accept_index, accepted.accept_index[:, :1]).long()

    def commit_draft_kv(
        self, hidden: torch.Tensor, accepted: Accepted, slots: torch.Tensor, prefix: torch.Tensor
    ) -> None:
        """Write the drafter's KV of the path (root and accepted drafts) from the target's hidden states of those nodes.
        ``slots`` [bs * steps] of the drafter's pool. ``hidden`` is shared by all graph sizes and overwritten by the
        next pass: it is read in this step."""
        steps = self.config.steps
        path = hidden.view(-1, hidden.shape[-1]).index_select(0, self._visited(accepted).view(-1))
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path,
            cache_loc=slots,
            cache_loc_2d=slots.view(-1, steps),
            positions=(prefix[:, None] + torch.arange(steps, device=prefix.device)).reshape(-1),
            commit_lens=accepted.commit_lens,
        )

    # -- observation -----------------------------------------------------------------------------------------

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang calls this with the accepted drafts of a finished step, already on the host."""
        self.tree_metrics.note_accepted(num_correct_drafts_per_req)
