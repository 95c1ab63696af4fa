"""DDTree on SGLang's DFlash worker: the same drafter and the same prefill, a tree instead of a chain in the decode
step.

One step, for every request: draft a block → candidates of each position → tree → one verify pass of the target → walk
→ move the accepted path's KV to the front of the window → commit the drafter's KV from the target's hidden states.
The stock step is ``srt/speculative/dflash_worker_v2.py:2478-3014`` (0.5.23); what is not written here is inherited
from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.runtime_context import get_exec, get_observability, get_spec
from sglang.srt.speculative import dflash_worker_v2 as stock
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ddtree import selfcheck
from sglang_ddtree.config import Config, Refused
from sglang_ddtree.metrics import Metrics
from sglang_ddtree.ops import TreeOps, select_ops
from sglang_ddtree.plugin import settings
from sglang_ddtree.sampling import target_tokens
from sglang_ddtree.tree import Accepted, Tree
from sglang_ddtree.verify_input import DDTreeVerifyInput

logger = logging.getLogger(__name__)


@dataclass
class Window:
    """KV slots one step writes: ``slots`` [bs, window]; the drafter uses the first ``block`` columns, the tree the
    first ``width``. ``host_lens`` [bs] on the CPU: an upper bound of the prefix lengths."""

    slots: torch.Tensor
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
        self.tree_metrics = Metrics(config, get_observability().enable_metrics and self._target_tp_rank == 0)
        self.vocab_size = int(self.model_runner.model_config.vocab_size)
        self.candidates = min(config.budget, self.vocab_size)
        if self._target_tp_rank == 0:
            logger.info("DDTREE budget=%d block=%d ops=%s", config.budget, config.block, type(self.ops).__name__)

    # -- start -----------------------------------------------------------------------------------------------

    def _maybe_build_draft_sampler(self) -> None:
        """Not the chain's head; see ``_prepare_gpu``."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Sampling is supported everywhere (``sampling``), so there is no fallback to warn of."""

    def init_cuda_graphs(self) -> None:
        """The last step of starting up: everything exists and nothing is served yet, so this is where the check
        runs."""
        self._prepare_gpu()
        super().init_cuda_graphs()
        selfcheck.run(self)

    def _prepare_gpu(self) -> None:
        """Share the mask buffer of the target's graphs, and put candidates and tree into the drafter's graphs."""
        attach = getattr(self.ops, "attach", None)
        if attach is None:
            return
        attach(self.model_runner.attn_backend)
        graphs = get_exec().graph.cuda_graph_config.decode
        if graphs.backend != stock.Backend.DISABLED and graphs.bs:
            from sglang_ddtree.kernels.sampler import TreeSampler

            self._tree_sampler = TreeSampler(self.config, self._head, self.vocab_size, max(graphs.bs), str(self.device))
            self.draft_model_runner.capture_tail_hooks.append(self._tree_sampler.capture_hook)

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
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            if result.speculative_num_draft_tokens is not None:
                result.speculative_num_draft_tokens = self.config.window
            return result
        draft_input: DFlashDraftInputV2 = batch.spec_info
        if str(self.device) != "cpu":  # seq_lens may come from another stream
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix = batch.seq_lens
        window = self._open_window(batch, draft_input)
        tree = self._draft(batch, draft_input.bonus_tokens, window)
        grammar_tree = None
        if batch.has_grammar:  # the copy to the host starts before the target's pass
            grammar_tree = stock.GrammarTree.from_device(*self.ops.links(tree.parents), tree.tokens)
        target_out = self.verify(batch, tree, window)
        logits_output = target_out.logits_output
        predicted = self._predict(batch, logits_output, tree, grammar_tree, grammar_barrier)
        accepted = self.ops.walk(tree, predicted.view(tree.tokens.shape), prefix, steps=self.config.steps)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, predicted.view(-1), accept_index=self._visited(accepted))
        # before the new lengths are published: then the scheduler may hand a finished request's slots to another
        self.ops.move_kv(
            self.model_runner.token_to_kv_pool, window.slots[:, : self.config.width], accepted.accept_index
        )
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        self._commit_draft_kv(logits_output.hidden_states, accepted, window, prefix)
        logits_output.hidden_states = None
        self.tree_metrics.note_tree(tree)
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

    def _open_window(self, batch: Any, draft_input: Any) -> Window:
        """The slots after every request's prefix, which the scheduler has already allocated."""
        size, rows = self.config.window, len(batch.seq_lens)
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + size,
            batch_size=rows,
            draft_token_num=size,
            device=self.device,
        ).view(rows, size)
        host = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host,
            write_virtual=slots.reshape(-1),
            read_extent=size,
        )
        return Window(slots, plan, host)

    def _draft(self, batch: Any, roots: torch.Tensor, window: Window) -> Tree:
        """Run the drafter once and build the trees from its candidates: in the drafter's graph if that ran."""
        block, rows = self.config.block, len(batch.seq_lens)
        prefix = batch.seq_lens
        ids = torch.full((rows, block), int(self._mask_token_id), dtype=torch.int64, device=self.device)
        ids[:, 0] = roots
        if self._full_embed_gpu is not None:
            embeds = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embeds = self._embedding()(ids)
        if self._noise_embed_scale != 1.0:
            embeds = embeds * self._noise_embed_scale
        host = window.host_lens + block
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=rows,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            out_cache_loc=window.slots[:, :block].reshape(-1),
            seq_lens_sum=int(host.sum()),
            seq_lens_cpu=host,
            positions=(prefix[:, None] + self._block_pos_offsets).reshape(-1),
            input_embeds=embeds.view(rows * block, -1),
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
        with torch.inference_mode(), stock.draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward_batch)
            if self._tree_sampler is not None and out.can_run_graph:
                return self._tree_sampler.trees(rows)
            hidden = out.logits_output.hidden_states
            drafted = hidden.view(rows, block, -1)[:, 1:].reshape(rows * (block - 1), -1)
            tokens, vals, lse = candidate_topk(drafted, self._head(), self.candidates, with_partition=True)
        table = (rows, block - 1, self.candidates)
        return self.ops.build(
            vals.view(table),
            tokens.view(table),
            lse.view(table[:2]),
            roots,
            prefix,
            width=self.config.width,
            spine=self.config.spine,
        )

    def _embedding(self) -> Any:
        target = self.model_runner.model
        return unwrap_lora_layer(stock._resolve_dflash_embedding_module(self.draft_model, target))

    def _head(self) -> Any:
        return unwrap_lora_layer(self.model_runner.model.lm_head)

    def verify(self, batch: Any, tree: Tree, window: Window) -> Any:
        """The target's pass over all nodes. Returns SGLang's batch result: logits and hidden states of bs * width
        rows."""
        width = self.config.width
        verify_input = DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=tree.positions.reshape(-1),
            draft_token_num=width,
            custom_mask=self.ops.mask(tree.parents, batch.seq_lens, window.host_lens, depth=self.config.depth),
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
            if sampling is not None:
                stock.apply_dflash_verify_logits_adjustments(
                    next_token_logits=logits, sampling_info=sampling, draft_token_num=self.config.width
                )
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
            predicted = target_tokens(logits, sampling, tree.positions.reshape(-1), self.config.width)
        self._tp_sync.sync(stock.SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, predicted)
        return predicted

    @staticmethod
    def _visited(accepted: Accepted) -> torch.Tensor:
        """Rows of the visited nodes, int64 [bs, steps]; unused entries repeat the root, which is a valid row."""
        return torch.where(accepted.accept_index >= 0, accepted.accept_index, accepted.accept_index[:, :1]).long()

    def _commit_draft_kv(self, hidden: torch.Tensor, accepted: Accepted, window: Window, prefix: torch.Tensor) -> None:
        """Write the drafter's KV of the path (root and accepted drafts) from the target's hidden states of those nodes.
        ``hidden`` is shared by all graph sizes and overwritten by the next pass: it is read in this step."""
        steps = self.config.steps
        path = hidden.view(-1, hidden.shape[-1]).index_select(0, self._visited(accepted).view(-1))
        slots = window.plan.write_ids(self.draft_model_runner.kv_index_translator, cols=slice(0, steps))
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
