"""The attention backends whose passes may be taken over, and FlashAttention's own prefix lists. The backends are
stand-ins: SGLang's own need a GPU (docs/benchmarks/gpu.md)."""

from __future__ import annotations

import os
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch and Triton: run `make test-kernels`")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1: run `make test-kernels`", allow_module_level=True)

from sglang_ddtree.config import ATTENTION_ENV, Refused  # noqa: E402

pytestmark = pytest.mark.unit
WIDTH, HEADS, DIM, POOL, CONTEXT = 4, 2, 16, 128, 20


class RadixAttention(torch.nn.Module):  # type: ignore[misc]
    """As much of SGLang's layer as is asked for."""

    def __init__(self, **other: Any) -> None:
        super().__init__()
        fixed = {"layer_id": 0, "qk_head_dim": DIM, "v_head_dim": DIM, "tp_q_head_num": HEADS, "tp_k_head_num": HEADS}
        plain = {"logit_cap": 0.0, "is_cross_attention": False, "xai_temperature_len": -1, "sliding_window_size": -1}
        for key, value in (fixed | plain | {"k_scale": None, "attn_type": "decoder", "scaling": 0.25} | other).items():
            setattr(self, key, value)


class AttentionType(Enum):
    """SGLang's, by value."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class KVWriteLoc:
    """Where KV goes."""

    def __init__(self, loc: Any) -> None:
        self.loc = loc

    @classmethod
    def for_batch(cls, forward_batch: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


@pytest.fixture
def gpu_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with stand-ins for what it imports of SGLang."""
    for name, content in {
        "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention, "AttentionType": AttentionType},
        "sglang.srt.mem_cache.kv_loc_plan": {"IdSpaceKind": SimpleNamespace(FULL="full")},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sglang_ddtree.gpu_attention", raising=False)
    import sglang_ddtree.gpu_attention as module

    card = SimpleNamespace(shared_memory_per_block_optin=232_448, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.delenv(ATTENTION_ENV, raising=False)
    yield module
    sys.modules.pop("sglang_ddtree.gpu_attention", None)


class Pool:
    """A KV pool indexed by token slot."""

    def __init__(self) -> None:
        self.keys, self.values = (torch.randn((POOL, HEADS, DIM), dtype=torch.float16) for _ in range(2))

    def get_key_buffer(self, _: int) -> Any:
        return self.keys

    def get_value_buffer(self, _: int) -> Any:
        return self.values

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Any, v: Any) -> None:
        self.keys[where.loc], self.values[where.loc] = k, v


class FlashAttentionBackend:
    """As FlashAttention 3's: page tables, and no mask."""

    def __init__(self, pool: Pool, table: Any, **other: Any) -> None:
        self.token_to_kv_pool, self.req_to_token, self.max_context_len = pool, table, CONTEXT
        space = SimpleNamespace(write=None, read_v2p=None)
        self.kv_index_translator = SimpleNamespace(space=lambda _: space)
        plain = {"fa_impl_ver": 3, "num_splits": 0, "has_swa": False, "has_local_attention": False, "attn_cp_size": 1}
        none = {"kv_cache_is_mxfp8": False, "_kv_shard_pool": None, "fa_skip_kv_cache": False, "use_mla": False}
        for key, value in (plain | none | other).items():
            setattr(self, key, value)
        self.calls: list[str] = []

    def forward_extend(self, *_: Any, **__: Any) -> str:
        self.calls.append("extend")
        return "theirs"

    def init_forward_metadata(self, _: Any) -> None:
        self.calls.append("eager")

    def init_forward_metadata_out_graph(self, _: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "replay")

    def init_forward_metadata_in_graph(self, _: Any) -> None:
        self.calls.append("in graph")


class TritonAttnBackend(FlashAttentionBackend):
    """As Triton's, where it is asked about."""


def runner(backend: Any, **layer: Any) -> Any:
    return SimpleNamespace(
        attn_backend=backend,
        token_to_kv_pool=backend.token_to_kv_pool,
        model=RadixAttention(**layer),
        dtype=torch.float16,
        device="cpu",
        gpu_id=0,
        req_to_token_pool=SimpleNamespace(size=4),
    )


def batch(rows: list[int], lens: list[int], slots: Any = None, verify: bool = True) -> Any:
    mode = SimpleNamespace(is_target_verify=lambda: verify)
    rows_, lens_ = torch.tensor(rows, dtype=torch.int64), torch.tensor(lens, dtype=torch.int64)
    return SimpleNamespace(
        forward_mode=mode, req_pool_indices=rows_, seq_lens=lens_, batch_size=len(rows), out_cache_loc=slots
    )


def table() -> Any:
    """Every request's slots are others'."""
    return torch.randperm(POOL)[: 5 * CONTEXT].view(5, CONTEXT).to(torch.int32)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"fa_impl_ver": 4}, "the backend is FlashAttentionBackend"),
        ({"num_splits": 1}, "deterministic"),
        ({"has_swa": True}, "another kind"),
        ({"has_local_attention": True}, "another kind"),
        ({"attn_cp_size": 2}, "another kind"),
        ({"kv_cache_is_mxfp8": True}, "another kind"),
        ({"use_mla": True}, "another kind"),
    ],
)
def test_flash_attention_is_refused_where_ours_cannot_stand_in(gpu_attention: Any, other: Any, why: str) -> None:
    where = runner(FlashAttentionBackend(Pool(), table(), **other))
    with pytest.raises(Refused, match=f"reads no tree mask.*{why}.*use --attention-backend triton"):
        gpu_attention.install(where, WIDTH, tree=True)


def test_the_stock_kernel_is_refused_on_flash_attention(gpu_attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTENTION_ENV, "stock")
    with pytest.raises(Refused, match="reads no tree mask"):
        gpu_attention.install(runner(FlashAttentionBackend(Pool(), table())), WIDTH, tree=True)


def test_a_layer_that_caps_its_scores_is_refused(gpu_attention: Any) -> None:
    with pytest.raises(Refused, match="caps, scales or windows"):
        gpu_attention.install(runner(FlashAttentionBackend(Pool(), table()), logit_cap=30.0), WIDTH, tree=True)


def test_triton_falls_back_to_its_own_masked_kernel(gpu_attention: Any) -> None:
    backend = TritonAttnBackend(Pool(), table())
    backend.enable_deterministic, backend.dcp_size, backend.dllm_attention = True, 1, None
    backend.sliding_window_size = None
    assert gpu_attention.install(runner(backend), WIDTH, tree=True) is None
    assert "forward_extend" not in vars(backend)


@pytest.mark.parametrize("graph", [False, True])
def test_a_tree_on_flash_attention_sees_its_prefix_and_its_ancestors(gpu_attention: Any, graph: bool) -> None:
    torch.manual_seed(5)
    pool, slots = Pool(), table()
    backend = FlashAttentionBackend(pool, slots)
    words = gpu_attention.install(runner(backend), WIDTH, tree=True)
    rows, lens = [3, 1], [7, 12]
    seen = [0b0001, 0b0011, 0b0101, 0b1011]  # root, its two children, a grandchild
    words[:2, :, 0] = torch.tensor(seen, dtype=torch.int32)
    new = torch.cat([slots[row, n : n + WIDTH] for row, n in zip(rows, lens, strict=True)]).long()
    pass_ = batch(rows, lens, new)
    if graph:
        backend.init_forward_metadata_out_graph(batch([0, 0, 0], [0, 0, 0]), in_capture=True)  # the largest comes first
        backend.init_forward_metadata_out_graph(pass_, in_capture=True)
        backend.init_forward_metadata_in_graph(pass_)
        backend.init_forward_metadata_out_graph(pass_)
        assert "replay" not in backend.calls, "a replay prepares nothing"
    else:
        backend.init_forward_metadata(pass_)
        assert backend.calls == ["eager"]
    q, k, v = (torch.randn((2 * WIDTH, HEADS, DIM), dtype=torch.float16) for _ in range(3))
    layer = RadixAttention(attn_type=AttentionType.DECODER)
    out = backend.forward_extend(q.flatten(1), k, v, layer, pass_).view(-1, HEADS, DIM)
    assert torch.equal(pool.keys[new], k)
    assert torch.equal(pool.values[new], v)
    for b, (row, n) in enumerate(zip(rows, lens, strict=True)):
        prefix = slots[row, :n].long()
        for node in range(WIDTH):
            path = [b * WIDTH + other for other in range(WIDTH) if seen[node] >> other & 1]
            keys = torch.cat([pool.keys[prefix], k[path]]).float()
            values = torch.cat([pool.values[prefix], v[path]]).float()
            scores = torch.einsum("hd,nhd->hn", q[b * WIDTH + node].float(), keys) * layer.scaling
            want = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(out[b * WIDTH + node].float(), want, atol=5e-3, rtol=5e-3)


def test_other_passes_stay_flash_attentions(gpu_attention: Any) -> None:
    backend = FlashAttentionBackend(Pool(), table())
    gpu_attention.install(runner(backend), WIDTH, tree=True)
    prefill = batch([1], [5], verify=False)
    backend.init_forward_metadata(prefill)
    assert backend.forward_extend(None, None, None, RadixAttention(), prefill) == "theirs"
    backend.init_forward_metadata_out_graph(prefill)
    assert backend.calls == ["eager", "extend", "replay"]
