"""What DDTree accepts, and what it says otherwise."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang_ddtree/src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang_cpu/src"))
from sglang_cpu.defaults import cpu_defaults
from sglang_ddtree import ledger
from sglang_ddtree.config import (
    _ARGUMENTS,
    Config,
    ModelFacts,
    Refused,
    make_config,
    refuse_arguments,
    refuse_models,
)

pytestmark = pytest.mark.unit
GOOD = {field: fine for field, fine, _ in _ARGUMENTS} | {"device": "cuda", "attention_backend": "triton"}


def refusal(call: Any, *args: Any) -> str:
    with pytest.raises(Refused) as caught:
        call(*args)
    text = str(caught.value)
    assert text.startswith("ddtree: refused: ")
    assert "\n" not in text
    return caught.value.sentence


def test_sizes() -> None:
    wide, narrow = Config(31, 8), Config(3, 8)
    assert (wide.width, wide.window, wide.depth, wide.steps) == (32, 32, 7, 8)
    assert (narrow.width, narrow.window, narrow.depth, narrow.steps) == (4, 8, 3, 4)


def test_where_the_budget_comes_from() -> None:
    assert make_config(None, {}, 16).budget == 31
    assert make_config(None, {"SGLANG_DDTREE_BUDGET": "7"}, 16).budget == 7
    assert make_config("15", {"SGLANG_DDTREE_BUDGET": "7"}, 16).budget == 15
    assert make_config(255, {"SGLANG_DDTREE_SPINE": "1"}, 16).spine


@pytest.mark.parametrize("budget", ["0", "256", "-1", "many", "3.5"])
def test_budget_out_of_range(budget: str) -> None:
    assert "from 1 to 255" in refusal(make_config, budget, {}, 16)
    assert "SGLANG_DDTREE_BUDGET" in refusal(make_config, None, {"SGLANG_DDTREE_BUDGET": budget}, 16)


def test_block_and_spine() -> None:
    assert "block_size is 64" in refusal(make_config, 15, {}, 64)
    assert "at least 15" in refusal(make_config, 7, {"SGLANG_DDTREE_SPINE": "1"}, 16)


def test_a_plain_gpu_engine_is_accepted() -> None:
    refuse_arguments(GOOD)
    refuse_arguments(GOOD | {"device": "cpu", "attention_backend": "torch_native"})
    refuse_models(ModelFacts())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": "npu"}, "devices"),
        ({"attention_backend": "trtllm_mha"}, "--attention-backend fa3 or triton"),
        ({"decode_attention_backend": "flashmla"}, "--decode-attention-backend"),
        ({"speculative_draft_attention_backend": "fa4"}, "--speculative-draft-attention-backend"),
        ({"pp_size": 2}, "--pp-size"),
        ({"attn_dp_size": 4}, "--attn-dp-size"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["a=b"]}, "--lora-paths"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ],
)
def test_what_is_refused_names_the_flag(change: dict[str, Any], word: str) -> None:
    assert word in refusal(refuse_arguments, GOOD | change)


@pytest.mark.parametrize(("field", "fine"), [(field, fine) for field, fine, _ in _ARGUMENTS])
def test_every_guard_fires_and_says_what_to_change(field: str, fine: Any) -> None:
    other = {bool: True, int: 2, str: "other", list: ["a=b"], type(None): "x"}[type(fine)]
    sentence = refusal(refuse_arguments, GOOD | {field: other})
    assert f"--{field.replace('_', '-')}" in sentence
    missing = {name: value for name, value in GOOD.items() if name != field}
    assert f"has no {field}" in refusal(refuse_arguments, missing), "a guard that cannot see is no guard"


@pytest.mark.parametrize(
    "facts",
    [
        ModelFacts(mla=True),
        ModelFacts(hybrid=True),
        ModelFacts(sliding_window=True),
        ModelFacts(draft_heads=("domino",)),
    ],
)
def test_model_kinds_are_refused_with_a_way_out(facts: ModelFacts) -> None:
    assert "--speculative-algorithm DFLASH" in refusal(refuse_models, facts)


def test_cpu_defaults_leave_what_the_user_gave(tmp_path: Path) -> None:
    given = {
        "device": None,
        "dtype": "auto",
        "attention_backend": None,
        "max_running_requests": 3,
        "context_length": None,
    }
    out = cpu_defaults(given | {"model_path": str(tmp_path)})
    assert out["device"] == "cpu"
    assert out["dtype"] == "float32"
    assert "max_running_requests" not in out
    assert out["context_length"] == 2048
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert cpu_defaults(given | {"model_path": str(tmp_path)})["context_length"] == 512
    assert "dtype" not in cpu_defaults(given | {"dtype": "bfloat16"})


def test_the_ledger_counts_what_a_width_costs() -> None:
    # Qwen3-8B, 64 nodes' width, 32 requests: field figures are 1.2 GB of KV at 128 wide and 1.2 GB of float32 logits
    shape = ledger.Shape(151_936, 5 * 4096, 147_456, 20_480, 2, 40_960, 32, 32)
    entries = {e.what.split()[0] + e.flag: e.size for e in ledger.ledger(Config(63, 16), shape)}
    assert entries["KV--max-running-requests"] == 2 * 32 * 64 * 167_936
    assert entries["target's--speculative-ddtree-budget"] == 32 * 64 * 151_936 * 4
    assert entries["SGLang's--context-length"] == 32 * 64 * (40_960 + 64)
    narrow = ledger.ledger(Config(7, 16), shape)
    assert sum(e.size for e in narrow) < sum(entries.values()) / 4
    lines = ledger.text(Config(63, 16), shape).splitlines()
    assert all(line.startswith("ddtree: memory: ") and "(--" in line for line in lines)
    assert len(lines) == 7
    flash = ledger.ledger(Config(63, 16), replace(shape, backend="fa3"))[-1]
    assert (flash.size, flash.flag) == (2 * 4 * 32 * 40_960, "--context-length")
    cpu = ledger.text(Config(63, 16), replace(shape, backend="torch_native", graph_batch=0))
    assert "CUDA graphs" not in cpu
    assert f"the mask of a step, {32 * 64} rows" in cpu


def test_what_graphs_took_is_said_with_the_flag_that_shrinks_it() -> None:
    lines = ledger.graphs({"the target": 3.5 * ledger.MIB, "the drafter": 0.0}, [1, 2, 4, 8]).splitlines()
    rest = "for 4 batch sizes up to 8 (--cuda-graph-max-bs-decode)"
    assert lines == [
        f"ddtree: memory:      3.5 MiB  measured: CUDA graphs of the target, {rest}",
        f"ddtree: memory:      0.0 MiB  measured: CUDA graphs of the drafter, {rest}",
    ]
