"""What DDTree accepts, and the sentences that refuse the rest. Pure: no SGLang, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALGORITHM = "DDTREE"
BASE_ALGORITHM = "DFLASH"
BUDGET_ENV = "SGLANG_DDTREE_BUDGET"
SPINE_ENV = "SGLANG_DDTREE_SPINE"
ATTENTION_ENV = "SGLANG_DDTREE_ATTENTION"
TAIL_ENV = "SGLANG_DDTREE_TAIL"
MIN_BUDGET, MAX_BUDGET = 1, 255
MAX_BLOCK = 32

# Attention backends whose verify reads a tree mask, each proven by a test (GPU backends: tests/gpu).
BACKENDS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"torch_native"}),
    "cuda": frozenset({"triton", "fa3"}),
}


class Refused(SystemExit):
    """The engine must not serve. Its text is the one line that users and the operator look for; an uncaught one prints
    exactly that line on stderr and ends the process with status 1."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"ddtree: refused: {sentence}")
        self.sentence = sentence


@dataclass(frozen=True)
class Config:
    """Sizes of a DDTree engine, all in tokens per request and step.

    budget: draft nodes of the tree; block: positions the drafter drafts, anchor included, as it was trained;
    spine: always include the drafter's first choice of every position (needs budget >= block - 1).
    """

    budget: int
    block: int
    spine: bool = False

    @property
    def width(self) -> int:
        """Rows the target verifies: the root and the draft nodes."""
        return self.budget + 1

    @property
    def window(self) -> int:
        """KV slots a step writes: the drafter's block or the tree, whichever is wider."""
        return max(self.width, self.block)

    @property
    def depth(self) -> int:
        """Deepest node."""
        return min(self.block - 1, self.budget)

    @property
    def steps(self) -> int:
        """Most tokens a step can commit: a path of draft nodes and the target's own token."""
        return self.depth + 1


def parse_budget(value: object, source: str) -> int:
    """A budget from a flag, a keyword or the environment; ``source`` names which, for the refusal."""
    try:
        budget = int(str(value))
    except ValueError:
        raise Refused(f"{source} must be a whole number from {MIN_BUDGET} to {MAX_BUDGET}, not {value!r}") from None
    if not MIN_BUDGET <= budget <= MAX_BUDGET:
        raise Refused(f"{source} must be from {MIN_BUDGET} to {MAX_BUDGET}, not {budget}")
    return budget


def make_config(budget: object | None, environment: Mapping[str, str], block: int) -> Config:
    """The budget given by flag or keyword, else by environment, else twice the chain's width less the root."""
    if not 2 <= block <= MAX_BLOCK:
        raise Refused(f"the drafter's block_size is {block}; DDTree takes drafters of 2 to {MAX_BLOCK}")
    if budget is not None:
        size = parse_budget(budget, "--speculative-ddtree-budget")
    elif environment.get(BUDGET_ENV):
        size = parse_budget(environment[BUDGET_ENV], BUDGET_ENV)
    else:
        size = 2 * block - 1
    spine = environment.get(SPINE_ENV, "0").lower() in ("1", "true", "yes")
    if spine and size < block - 1:
        raise Refused(
            f"{SPINE_ENV}=1 needs a budget of at least {block - 1} (the drafter's block less one), not {size}"
        )
    return Config(size, block, spine)


@dataclass(frozen=True)
class ModelFacts:
    """What the refusals ask about the models; ``draft_heads`` names heads DDTree cannot use (selector, domino, …)."""

    mla: bool = False
    hybrid: bool = False
    sliding_window: bool = False
    draft_heads: tuple[str, ...] = ()


def refuse_arguments(args: Mapping[str, Any]) -> None:
    """Refuse what DDTree cannot do, by SGLang's resolved arguments. SGLang's own guards for trees test
    ``speculative_eagle_topk > 1``, which stays 1 here, so they do not fire: this list stands in for them."""
    device = str(args.get("device") or "").split(":")[0]
    allowed = BACKENDS.get(device)
    if allowed is None:
        raise Refused(f"DDTree runs on the devices {', '.join(sorted(BACKENDS))}, not on {device!r}")
    for field in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ):
        backend = args.get(field)
        if backend is not None and backend not in allowed:
            flag = "--" + field.replace("_", "-")
            raise Refused(
                f"{flag} {backend} has no tree mask that is proven here; use {flag} {' or '.join(sorted(allowed))}"
            )
    refuse_flags(args)


def refuse_flags(args: Mapping[str, Any]) -> None:
    """The part of ``refuse_arguments`` that needs no resolved values: run on what the user gave, so that SGLang's own
    errors about the same flags do not come first. ``args`` has every argument: one that SGLang no longer knows would
    be a guard that never fires, so that is refused too."""
    for field, fine, sentence in _ARGUMENTS:
        if field not in args:
            raise Refused(f"this SGLang has no {field}, which DDTree has to look at; use the release it is made for")
        value = args[field]
        if value is not None and value != fine:
            raise Refused(sentence.format(value=value))


def refuse_models(facts: ModelFacts) -> None:
    """Refuse model kinds that are not proven with a tree."""
    chain = "or --speculative-algorithm DFLASH"
    if facts.mla:
        raise Refused(
            f"the target's MLA attention has no backend with a tree mask; use a dense MHA or GQA model {chain}"
        )
    if facts.hybrid:
        raise Refused(f"the target's recurrent layers cannot branch; use a model with attention layers only {chain}")
    if facts.sliding_window:
        raise Refused(f"a sliding window is not exact in a tree; use a target with full attention {chain}")
    for head in facts.draft_heads:
        raise Refused(
            f"the drafter's {head} head drafts one path, not each position; use a plain DFlash drafter {chain}"
        )


# field, the value that is fine, why another is not; the flag is the field's name
_ARGUMENTS: tuple[tuple[str, Any, str], ...] = (
    ("pp_size", 1, "DDTree does not work with pipeline parallelism; use --pp-size 1"),
    ("attn_dp_size", 1, "DDTree does not work with DP attention; use --attn-dp-size 1"),
    ("enable_dp_attention", False, "DDTree does not work with DP attention; remove --enable-dp-attention"),
    ("dcp_size", 1, "DDTree does not work with decode context parallelism; use --dcp-size 1"),
    ("attn_cp_size", 1, "DDTree does not work with context parallelism; use --attn-cp-size 1"),
    ("disaggregation_mode", "null", "DDTree is not proven with disaggregation; remove --disaggregation-mode {value}"),
    ("enable_lora", False, "DDTree is not proven with LoRA; remove --enable-lora"),
    ("lora_paths", [], "DDTree is not proven with LoRA; remove --lora-paths"),
    ("speculative_adaptive", False, "DDTree has a fixed budget; remove --speculative-adaptive"),
    (
        "speculative_use_block_verification",
        False,
        "DDTree verifies a tree; remove --speculative-use-block-verification",
    ),
    (
        "speculative_use_rejection_sampling",
        False,
        "DDTree samples exactly; remove --speculative-use-rejection-sampling",
    ),
    (
        "speculative_draft_window_size",
        None,
        "DDTree needs the whole draft cache; remove --speculative-draft-window-size",
    ),
    (
        "enable_custom_logit_processor",
        False,
        "a custom logit processor sees a request, not a node's path; remove --enable-custom-logit-processor",
    ),
    ("enable_unified_memory", False, "the unified memory pool cannot move KV slots; remove --enable-unified-memory"),
    ("enable_page_major_kv_layout", False, "DDTree is not proven with it; remove --enable-page-major-kv-layout"),
    ("enable_hisparse", False, "DDTree is not proven with HiSparse; remove --enable-hisparse"),
    ("enable_hierarchical_cache", False, "DDTree is not proven with it; remove --enable-hierarchical-cache"),
    ("enable_lmcache", False, "DDTree is not proven with it; remove --enable-lmcache"),
    ("enable_flexkv", False, "DDTree is not proven with it; remove --enable-flexkv"),
    (
        "enable_unified_cache_external_linker",
        False,
        "DDTree is not proven with it; remove --enable-unified-cache-external-linker",
    ),
    ("enable_kv_cache_sharding", False, "KV slots on other GPUs cannot be moved; remove --enable-kv-cache-sharding"),
    ("enable_prefill_cp", False, "DDTree does not work with context parallelism; remove --enable-prefill-cp"),
    ("uno_lora_path", None, "DDTree is not proven with LoRA; remove --uno-lora-path"),
    ("enable_single_batch_overlap", False, "DDTree is not proven with it; remove --enable-single-batch-overlap"),
    ("enable_two_batch_overlap", False, "DDTree is not proven with it; remove --enable-two-batch-overlap"),
    ("enable_return_routed_experts", False, "DDTree does not return them; remove --enable-return-routed-experts"),
)
