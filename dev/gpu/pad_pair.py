# ruff: noqa: E501
"""Embed a small model pair in the shape of an 8B model without changing its function.

usage: pad_pair.py PAIR OUT          PAIR holds target/ (Llama) and drafter/ (DFlash); OUT gets both, in bfloat16

Acceptance is then a real pair's, and a step costs what an 8B step costs: 36 layers, hidden 4096, MLP 12288, 4096 query and
1024 key columns a layer (64 and 16 heads of 64), 5 drafter layers. The vocabulary stays the small pair's.

How it stays the same function: the residual stream is zero beyond the small model's columns, because nothing ever writes
there (rows of o_proj, down_proj, embedding are zero), and an RMS norm over a wider vector is the narrow one times
sqrt(narrow / wide), which the norm's weight and epsilon take back. What only feeds zero columns (extra heads, extra MLP
rows, inputs from zero columns, whole extra layers) is random, so that it costs what real weights cost.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class Wide:
    """The shape to embed in."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 64
    kv_heads: int = 16
    layers: int = 36
    draft_layers: int = 5


Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and all tensors of a model folder, float32."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
                tensors[key] = opened.get_tensor(key).float()
    return json.loads((folder / "config.json").read_text()), tensors


class Padder:
    """Pads one model's tensors from its own sizes to the wide ones."""

    def __init__(self, config: dict[str, Any], wide: Wide, device: str, dtype: torch.dtype) -> None:
        self.c, self.w, self.device, self.dtype = config, wide, device, dtype
        self.dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        self.shrink = math.sqrt(config["hidden_size"] / wide.hidden)

    def noise(self, rows: int, columns: int) -> torch.Tensor:
        """Random weights of a usual size."""
        return torch.randn(rows, columns, device=self.device, dtype=torch.float32) * 0.02

    def norm(self, weight: torch.Tensor | None) -> torch.Tensor:
        """A norm over the hidden size."""
        out = torch.ones(self.w.hidden, device=self.device)
        if weight is not None:
            out[: weight.shape[0]] = weight.to(self.device) * self.shrink
        return out

    def heads(self, weight: torch.Tensor | None, kv: bool) -> torch.Tensor:
        """Rows of a query, key or value projection; query head i of key head j goes to j's group."""
        out = self.noise((self.w.kv_heads if kv else self.w.heads) * self.dim, self.w.hidden)
        if weight is not None:
            for new, old in self.places(kv):
                out[new, : weight.shape[1]] = weight[old].to(self.device)
        return out

    def places(self, kv: bool) -> list[tuple[slice, slice]]:
        """(new rows, old rows) of each head."""
        old_group = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        new_group = self.w.heads // self.w.kv_heads
        count = self.c["num_key_value_heads"] if kv else self.c["num_attention_heads"]
        spots = [(i, i) if kv else (i // old_group * new_group + i % old_group, i) for i in range(count)]
        return [(slice(n * self.dim, (n + 1) * self.dim), slice(o * self.dim, (o + 1) * self.dim)) for n, o in spots]

    def output(self, weight: torch.Tensor | None) -> torch.Tensor:
        """o_proj: zero but for the small model's heads and rows."""
        out = torch.zeros(self.w.hidden, self.w.heads * self.dim, device=self.device)
        if weight is not None:
            for new, old in self.places(False):
                out[: weight.shape[0], new] = weight[:, old].to(self.device)
        return out

    def layer(self, get: Callable[[str], torch.Tensor | None], prefix: str) -> Tensors:
        """One layer; ``get`` returns None for a layer that the small model has not."""
        w, out = self.w, {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[name] = self.norm(get(name))
        out["self_attn.q_proj"] = self.heads(get("self_attn.q_proj"), False)
        out["self_attn.k_proj"] = self.heads(get("self_attn.k_proj"), True)
        out["self_attn.v_proj"] = self.heads(get("self_attn.v_proj"), True)
        out["self_attn.o_proj"] = self.output(get("self_attn.o_proj"))
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            out[name] = self.noise(w.intermediate, w.hidden)
            if (small := get(name)) is not None:
                out[name][: small.shape[0], : small.shape[1]] = small.to(self.device)
        out["mlp.down_proj"] = torch.zeros(w.hidden, w.intermediate, device=self.device)
        if (small := get("mlp.down_proj")) is not None:
            out["mlp.down_proj"][: small.shape[0], : small.shape[1]] = small.to(self.device)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            small = get(name)
            if small is not None:
                out[name] = small.to(self.device)
        return {f"{prefix}{k}.weight": v.to(self.dtype).cpu().contiguous() for k, v in out.items()}

    def columns(self, weight: torch.Tensor) -> torch.Tensor:
        """An embedding: zero columns beyond the small model's."""
        out = torch.zeros(weight.shape[0], self.w.hidden)
        out[:, : weight.shape[1]] = weight
        return out.to(self.dtype)


def pad_pair(pair: Path, out: Path, wide: Wide, device: str, dtype: torch.dtype) -> None:
    """Write ``out``/target and ``out``/drafter; tokenizer files are copied. Layer files are written in parallel."""
    torch.manual_seed(0)
    pool = ThreadPoolExecutor(6)
    config, small = load(pair / "target")
    folder = out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    pad = Padder(config, wide, device, dtype)
    pending = []

    def write(tensors: Tensors, path: Path) -> None:
        pending.append(pool.submit(save_file, tensors, str(path), {"format": "pt"}))

    head = small.get("lm_head.weight", small["model.embed_tokens.weight"])
    write(
        {
            "model.embed_tokens.weight": pad.columns(small["model.embed_tokens.weight"]),
            "lm_head.weight": pad.columns(head),
            "model.norm.weight": pad.norm(small["model.norm.weight"]).to(dtype).cpu(),
        },
        folder / "model-ends.safetensors",
    )
    for i in range(wide.layers):
        write(
            pad.layer(lambda n, i=i: small.get(f"model.layers.{i}.{n}.weight"), f"model.layers.{i}."),
            folder / f"model-layer{i:02d}.safetensors",
        )
    epsilon = config["rms_norm_eps"] * config["hidden_size"] / wide.hidden
    sizes = {
        "hidden_size": wide.hidden,
        "intermediate_size": wide.intermediate,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": pad.dim,
        "rms_norm_eps": epsilon,
        "dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(
        json.dumps(config | sizes | {"num_hidden_layers": wide.layers, "tie_word_embeddings": False})
    )
    for extra in (pair / "target").glob("*"):
        if extra.suffix != ".safetensors" and extra.name not in ("config.json", "model.safetensors.index.json"):
            (folder / extra.name).write_bytes(extra.read_bytes())

    draft, small_draft = load(pair / "drafter")
    folder = out / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    pad = Padder(draft, wide, device, dtype)
    tensors: Tensors = {}
    for i in range(wide.draft_layers):
        got = pad.layer(lambda n, i=i: small_draft.get(f"layers.{i}.{n}.weight"), f"layers.{i}.")
        for name in ("q_norm", "k_norm"):
            got.setdefault(f"layers.{i}.self_attn.{name}.weight", torch.ones(pad.dim, dtype=dtype))
        tensors |= got
    narrow, taps = draft["hidden_size"], len(draft["dflash_config"]["target_layer_ids"])
    fc = torch.zeros(wide.hidden, taps * wide.hidden)
    for t in range(taps):
        fc[:narrow, t * wide.hidden : t * wide.hidden + narrow] = small_draft["fc.weight"][
            :, t * narrow : (t + 1) * narrow
        ]
    tensors["fc.weight"] = fc.to(dtype)
    for name in ("hidden_norm.weight", "norm.weight"):
        tensors[name] = pad.norm(small_draft[name]).to(dtype).cpu()
    write(tensors, folder / "model.safetensors")
    draft |= sizes | {
        "rms_norm_eps": draft["rms_norm_eps"] * narrow / wide.hidden,
        "num_hidden_layers": wide.draft_layers,
        "num_target_layers": wide.layers,
    }
    if draft.get("layer_types"):
        draft["layer_types"] = ["full_attention"] * wide.draft_layers
    draft.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(draft))
    for job in pending:
        job.result()


def main() -> None:
    """Command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("pair", type=Path)
    ask.add_argument("out", type=Path)
    args = ask.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pad_pair(args.pair, args.out, Wide(), device, torch.bfloat16)


if __name__ == "__main__":
    main()
