"""Entry point: SGLang calls ``register`` in every one of its processes, before arguments are parsed.

The algorithm DDTREE is an alias: before SGLang resolves its arguments it becomes DFLASH plus a tree (``_Settings`` on
the argument record, which travels to the scheduler with it). About twenty places in SGLang compare the name with
"DFLASH" literally; a new name would miss them (docs/decisions/003-plugin-first.md)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import Any

from sglang_ddtree import guard, ledger, live
from sglang_ddtree.config import (
    ALGORITHM,
    BASE_ALGORITHM,
    Config,
    ModelFacts,
    Refused,
    make_config,
    refuse_arguments,
    refuse_flags,
    refuse_models,
)
from sglang_ddtree.hooks import Hooks

logger = logging.getLogger(__name__)
HOOKS = Hooks()
FIELD = "speculative_ddtree_budget"
_GIVEN = "_ddtree_given"  # on the argument record: the budget as the user gave it
_CONFIG = "_ddtree_config"  # on the argument record: the resolved Config
_PICTURES = "_ddtree_pictures"  # on the argument record: whether the target sees pictures


def register() -> None:
    """Install the hooks; none of them changes anything until DDTREE is asked for."""
    HOOKS.install("sglang.srt.arg_groups.pipeline:run_resolution_pipeline", _wrap_pipeline)
    HOOKS.install(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify", _wrap_width
    )
    HOOKS.install("sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_worker", _wrap_create_worker)
    HOOKS.install("sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", _wrap_headroom)
    HOOKS.install("sglang.srt.speculative.dflash_utils:resolve_dflash_verify_mask_policy", _wrap_mask_policy)
    guard.install_scheduler(HOOKS, lambda: settings() is not None and not _sees_pictures())
    if not _has_field():
        HOOKS.install("sglang.srt.server_args:ServerArgs.add_cli_args", _wrap_add_cli_args)
        HOOKS.install("sglang.srt.server_args:ServerArgs.from_cli_args", _wrap_from_cli_args)
        HOOKS.install("sglang.srt.plugins:load_plugins", _wrap_load_plugins)
        _hook_engine()


def _hook_engine() -> None:
    """Only a process that has imported Engine pays for hooking it."""
    if "sglang.srt.entrypoints.engine" in sys.modules:
        HOOKS.install("sglang.srt.entrypoints.engine:Engine.server_args_class", _wrap_server_args_class)


def _wrap_load_plugins(original: Any) -> Any:
    """Engine's constructor loads the plugins before it makes its arguments, also when they were loaded long before."""

    def load_plugins() -> None:
        original()
        _hook_engine()

    return load_plugins


def _has_field() -> bool:
    """Whether the patch series gave SGLang a real field for the budget."""
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    return FIELD in field_names(ServerArgs)


def settings() -> Config | None:
    """The tree's sizes in this process, or None when the engine does not use DDTREE."""
    from sglang.srt.runtime_context import get_context

    try:
        server_args = get_context().server_args
    except ValueError:
        return None
    return getattr(server_args, _CONFIG, None)


def _sees_pictures() -> bool:
    from sglang.srt.runtime_context import get_context

    return bool(getattr(get_context().server_args, _PICTURES, False))


def _wrap_add_cli_args(original: Any) -> Any:
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        original(parser)
        parser.add_argument(
            "--speculative-ddtree-budget",
            default=None,
            help="DDTREE: draft nodes of the tree, 1 to 255 (default: twice the drafter's block, less one).",
        )

    return add_cli_args


def _wrap_from_cli_args(original: Any) -> Any:
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        server_args = original(cls, args)
        setattr(server_args, _GIVEN, getattr(args, FIELD, None))
        return server_args

    return from_cli_args


def _wrap_server_args_class(original: Any) -> Any:
    def server_args_class(**kwargs: Any) -> Any:
        budget = kwargs.pop(FIELD, None)
        server_args = original(**kwargs)
        setattr(server_args, _GIVEN, budget)
        return server_args

    return staticmethod(server_args_class)


def _wrap_pipeline(original: Any) -> Any:
    def run_resolution_pipeline(server_args: Any) -> Any:
        live.install()
        given = getattr(server_args, FIELD, None) if _has_field() else getattr(server_args, _GIVEN, None)
        if str(server_args.speculative_algorithm or "").upper() != ALGORITHM:
            if given is not None:
                raise Refused("--speculative-ddtree-budget needs --speculative-algorithm DDTREE")
            return original(server_args)
        guard.install_intake(HOOKS, lambda: settings() is not None)
        HOOKS.require()
        config = _prepare(server_args, given)
        setattr(server_args, _CONFIG, config)
        result = original(server_args)
        _finish(server_args, config)
        return result

    return run_resolution_pipeline


def _prepare(server_args: Any, given: object | None) -> Config:
    """Read the drafter's block, settle the sizes, and hand SGLang a DFLASH engine of the tree's width."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    refuse_flags({field.name: getattr(server_args, field.name) for field in record_fields(type(server_args))})
    if cfg.speculative_draft_model_path is None:
        raise Refused("DDTREE needs a drafter; give --speculative-draft-model-path")
    if cfg.speculative_num_draft_tokens is not None:
        raise Refused(
            "with DDTREE the tree's size is --speculative-ddtree-budget; remove --speculative-num-draft-tokens"
        )
    draft = _draft_config(cfg)
    config = make_config(given, os.environ, _block(draft, cfg.speculative_dflash_block_size))
    refuse_models(ModelFacts(draft_heads=_draft_heads(draft)))
    fields: dict[str, Any] = {
        "speculative_algorithm": BASE_ALGORITHM,
        "speculative_num_draft_tokens": config.window,
        "speculative_dflash_block_size": None,
    }
    if _has_field():
        fields[FIELD] = config.budget
    if not cfg.attention_backend and str(cfg.device or "").split(":")[0] != "cpu":
        # SGLang would choose fa3 on Hopper; what is chosen for a user runs on every card
        fields["attention_backend"] = "triton"
    declare_resolution(server_args, "sglang_ddtree", **fields)
    return config


def _finish(server_args: Any, config: Config) -> None:
    """After SGLang's own resolution: refuse what does not fit, by the resolved values."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view, use_mla_backend

    cfg = resolving_view(server_args)
    if not _has_field():
        logger.warning(
            "ddtree: the patch series is not applied: /server_info lacks the budget, spec_accept_rate divides by nodes"
        )
    declare_resolution(server_args, "sglang_ddtree", speculative_dflash_block_size=config.block)
    refuse_arguments({field.name: getattr(cfg, field.name) for field in record_fields(type(server_args))})
    model = model_config_of(server_args)
    setattr(server_args, _PICTURES, bool(getattr(model, "is_multimodal", False)))
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    refuse_models(
        ModelFacts(
            mla=bool(use_mla_backend(server_args)),
            hybrid=bool(kinds - {"full_attention", "sliding_attention"}) or hasattr(text, "mamba_d_state"),
            sliding_window="sliding_attention" in kinds or bool(getattr(model, "is_hybrid_swa", False)),
        )
    )
    _print_ledger(cfg, config, model)


def _print_ledger(cfg: Any, config: Config, model: Any) -> None:
    """What the tree's memory goes to, on standard error, before anything is allocated. Never a reason to fail."""
    try:
        target, draft = model.hf_text_config, _draft_config(cfg)
        tp = int(cfg.tp_size or 1)

        def kv(c: Any) -> int:
            heads = int(getattr(c, "num_key_value_heads", None) or c.num_attention_heads)
            dim = int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
            return 2 * int(c.num_hidden_layers) * max(1, heads // tp) * dim * size

        size = 4 if str(model.dtype).endswith("float32") else 2
        taps = (getattr(draft, "dflash_config", None) or {}).get("target_layer_ids") or [0] * 5
        running = int(cfg.max_running_requests or 48)  # SGLang's own default for DFLASH
        shape = ledger.Shape(
            vocab=int(target.vocab_size),
            aux=len(taps) * int(target.hidden_size),
            kv_bytes=kv(target),
            draft_kv_bytes=kv(draft),
            bytes=size,
            context=int(model.context_len),
            running=running,
            graph_batch=_largest_graph(cfg, running),
            backend=str(cfg.attention_backend),
        )
        print(ledger.text(config, shape), file=sys.stderr, flush=True)
    except Exception as error:
        logger.warning("ddtree: no memory ledger: %s", error)


def _largest_graph(cfg: Any, running: int) -> int:
    """Requests of the largest CUDA graph for decoding; 0 if there will be none."""
    if str(cfg.device or "").split(":")[0] == "cpu" or cfg.disable_decode_cuda_graph:
        return 0
    return max(cfg.cuda_graph_bs_decode or [int(cfg.cuda_graph_max_bs_decode or running)])


def _draft_config(cfg: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        return get_config(
            cfg.speculative_draft_model_path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.speculative_draft_model_revision,
            model_override_args=json.loads(cfg.json_model_override_args),
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise Refused(
            f"the drafter's config at {cfg.speculative_draft_model_path!r} cannot be read ({reason}); "
            "check --speculative-draft-model-path"
        ) from None


def _block(draft: Any, given: int | None) -> int:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    block = (
        given
        if given is not None
        else parse_dflash_draft_config(draft_hf_config=draft).resolve_block_size(default=None)
    )
    if block is None:
        raise Refused("the drafter's config has no block_size; give --speculative-dflash-block-size")
    return int(block)


def _draft_heads(draft: Any) -> tuple[str, ...]:
    """Heads that draft a path: the selector, LiLiCorr, Domino, and the causal Nemotron drafter."""
    nested = getattr(draft, "dflash_config", None) or {}

    def value(key: str) -> Any:
        return nested.get(key, getattr(draft, key, None))

    heads = []
    if value("selector_rank") or value("selector_top_k"):
        heads.append("selector")
    if value("projector_type") not in (None, "", "none", "linear"):
        heads.append(str(value("projector_type")))
    if any("lilicorr" in str(key).lower() for key in nested):
        heads.append("LiLiCorr")
    return tuple(heads)


def _wrap_width(original: Any) -> Any:
    """The target verifies the tree, the drafter its block (``srt/speculative/spec_info.py:291``)."""

    def get_num_tokens_per_req_for_target_verify(self: Any, num_draft_tokens: int, is_draft_worker: bool) -> int:
        config = settings()
        if config is not None and self.is_dflash():
            return config.block if is_draft_worker else config.width
        return int(original(self, num_draft_tokens, is_draft_worker))

    return get_num_tokens_per_req_for_target_verify


def _wrap_mask_policy(original: Any) -> Any:
    """CUDA graphs of the verify pass are captured with a mask (``decode_cuda_graph_runner.py:2114``, its only caller):
    a chain needs none, so the backends that are allowed here would capture without."""

    def resolve_dflash_verify_mask_policy(attn_backend: Any) -> tuple[str, bool]:
        name, masked = original(attn_backend)
        return name, masked or settings() is not None

    return resolve_dflash_verify_mask_policy


def _wrap_headroom(original: Any) -> Any:
    """Room in a request's row for what decoding allocates ahead (``srt/mem_cache/allocation_sizing.py:96`` gives a
    chain ``4 + width`` at page size 1, but ``srt/speculative/dflash_info_v2.py:147`` allocates two windows)."""

    def get_req_to_token_extra_context_len() -> int:
        extra = int(original())
        config = settings()
        if config is None:
            return extra
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size

        return max(extra, 2 * config.window + int(get_alloc_page_size()) + 3)

    return get_req_to_token_extra_context_len


def _wrap_create_worker(original: Any) -> Any:
    def create_worker(self: Any, server_args: Any) -> Any:
        if getattr(server_args, _CONFIG, None) is None or not self.is_dflash():
            return original(self, server_args)
        HOOKS.require()
        from sglang_ddtree.worker import DDTreeWorker

        return DDTreeWorker

    return create_worker
