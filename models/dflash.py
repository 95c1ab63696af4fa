"""The DFlash drafter in plain torch: what SGLang 0.5.23 runs as ``DFlashDraftModel``, for training and for offline
checks.

A block of ``block`` positions starts with the last known token (the anchor); the others hold a mask token. Every layer
attends from the block to the target's hidden states of all earlier tokens (projected once by ``fc``) and to the block
itself, in both directions. Embedding and output head are the target's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter. ``taps``: target layers whose output is read (0-based; never the last)."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    mask_token: int
    taps: tuple[int, ...]
    target_layers: int
    rope_theta: float
    max_position: int
    eps: float = 1e-6
    bos: int = 1
    eos: int = 2

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """From the ``config.json`` of an exported drafter."""
        c = json.loads((folder / "config.json").read_text())
        d = c["dflash_config"]
        return cls(
            c["vocab_size"], c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"],
            c["num_key_value_heads"], c["head_dim"], c["block_size"], d["mask_token_id"], tuple(d["target_layer_ids"]),
            c["num_target_layers"], c["rope_theta"], c["max_position_embeddings"], c["rms_norm_eps"], c["bos_token_id"],
            c["eos_token_id"],
        )  # fmt: skip

    def config(self) -> dict[str, object]:
        """``config.json`` as SGLang 0.5.23 reads it (``srt/speculative/dflash_utils.py:588``)."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.layers,
            "dtype": "float32",
            "bos_token_id": self.bos,
            "eos_token_id": self.eos,
            "block_size": self.block,
            "num_target_layers": self.target_layers,
            "dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)},
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights. SGLang ignores unknown names and does not miss absent ones, so be exact."""
        out: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.hidden, self.hidden * len(self.taps)),
            "hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
        }
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            out |= {
                f"{prefix}self_attn.q_proj.weight": (q, self.hidden),
                f"{prefix}self_attn.k_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (kv, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, q),
                f"{prefix}mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.q_norm.weight": (self.head_dim,),
                f"{prefix}self_attn.k_norm.weight": (self.head_dim,),
            }
        return out


def random_weights(shape: Shape, seed: int, std: float = 0.02) -> dict[str, torch.Tensor]:
    """Fresh weights; also a drafter that fits the shapes and predicts nothing (a misfit)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * std if len(size) == 2 else torch.ones(size)
        for name, size in shape.tensors().items()
    }


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_tables(theta: float, dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [length, dim / 2]."""
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(0, dim, 2).float() / dim)
    return angle.cos(), angle.sin()


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of x [b, t, heads, dim]; cos and sin [b, t, dim / 2]."""
    half = x.shape[-1] // 2
    c, s, a, b = cos[:, :, None], sin[:, :, None], x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class Drafter(nn.Module):
    """Trainable drafter over named weights (names as in the checkpoint)."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        missing = {n: s for n, s in shape.tensors().items() if n not in weights or tuple(weights[n].shape) != s}
        if missing:
            raise ValueError(f"drafter weights do not fit the shape: {missing}")
        self.shape = shape
        self.w = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(value) for name, value in weights.items()})
        cos, sin = rope_tables(shape.rope_theta, shape.head_dim, shape.max_position)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def weight(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.w[f"{name}.weight".replace(".", "/")]
        return value

    def export(self) -> dict[str, torch.Tensor]:
        return {name.replace("/", "."): value.detach().cpu().contiguous() for name, value in self.w.items()}

    def forward(
        self, features: torch.Tensor, anchors: torch.Tensor, at: torch.Tensor, embed: torch.Tensor
    ) -> torch.Tensor:
        """features [b, S, taps * hidden]; anchors [b, A] token ids at positions ``at`` [b, A], each with its own
        block that sees features of positions < at. Returns hidden states [b, A, block - 1, hidden] of the drafted
        positions."""
        s = self.shape
        b, length, _ = features.shape
        n, block = at.shape[1], s.block
        device = features.device
        context = rms(F.linear(features, self.weight("fc")), self.weight("hidden_norm"), s.eps)
        ids = torch.full((b, n, block), s.mask_token, device=device)
        ids[:, :, 0] = anchors
        x = embed[ids].view(b, n * block, s.hidden)
        positions = (at[:, :, None] + torch.arange(block, device=device)).view(b, n * block)
        qc, qs = self.cos[positions], self.sin[positions]
        kc, ks = self.cos[None, :length], self.sin[None, :length]
        own = torch.arange(n, device=device).repeat_interleave(block)
        seen = torch.arange(length, device=device)[None, None] < at.repeat_interleave(block, 1)[:, :, None]
        mask = torch.cat([seen, (own[:, None] == own[None])[None].expand(b, -1, -1)], 2)[:, None]
        for i in range(s.layers):
            p = f"layers.{i}."
            y = rms(x, self.weight(p + "input_layernorm"), s.eps)
            q = F.linear(y, self.weight(p + "self_attn.q_proj")).view(b, -1, s.heads, s.head_dim)
            q = rope(rms(q, self.weight(p + "self_attn.q_norm"), s.eps), qc, qs)
            keys, values = [], []
            for source, cos, sin in ((context, kc, ks), (y, qc, qs)):
                k = F.linear(source, self.weight(p + "self_attn.k_proj")).view(b, -1, s.kv_heads, s.head_dim)
                keys.append(rope(rms(k, self.weight(p + "self_attn.k_norm"), s.eps), cos, sin))
                values.append(F.linear(source, self.weight(p + "self_attn.v_proj")).view(b, -1, s.kv_heads, s.head_dim))
            a = F.scaled_dot_product_attention(
                q.transpose(1, 2), torch.cat(keys, 1).transpose(1, 2), torch.cat(values, 1).transpose(1, 2),
                attn_mask=mask, enable_gqa=True,
            )  # fmt: skip
            x = x + F.linear(a.transpose(1, 2).reshape(b, n * block, -1), self.weight(p + "self_attn.o_proj"))
            y = rms(x, self.weight(p + "post_attention_layernorm"), s.eps)
            gate, up = F.linear(y, self.weight(p + "mlp.gate_proj")), F.linear(y, self.weight(p + "mlp.up_proj"))
            x = x + F.linear(F.silu(gate) * up, self.weight(p + "mlp.down_proj"))
        return rms(x, self.weight("norm"), s.eps).view(b, n, block, s.hidden)[:, :, 1:]


def write_drafter(folder: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
    """A folder that ``--speculative-draft-model-path`` takes; float32, which exact equality needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    save_file(
        {k: v.float().contiguous() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def describe(shape: Shape) -> str:
    return json.dumps(asdict(shape))
