"""Make a tiny target and a DFlash drafter trained on it, from a seed, in under a minute on two cores.

usage: make.py FOLDER        writes FOLDER/{target,drafter,drafter-misfit}

The target is a small Qwen3 with random weights whose layers are mixed in weakly: close to a bigram model, so a
drafter can learn it quickly, yet its text does not repeat. The tokenizer knows 128 characters and maps every other
one to <unk>, so no text can reach an id outside the vocabulary (which would end the engine)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash import Drafter, Shape, random_weights, write_drafter

SEED, STEPS, SEQUENCES, LENGTH = 0, 1000, 320, 72
SPECIALS = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>"]
SHAPE = Shape(
    vocab=128, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, block=8, mask_token=3,
    taps=(0, 2), target_layers=4, rope_theta=10000.0, max_position=2048,
)  # fmt: skip


def make_tokenizer(folder: Path) -> None:
    letters = ["\n", *(chr(c) for c in range(32, 127))]
    letters += [chr(c) for c in range(0xE0, 0xE0 + SHAPE.vocab - len(SPECIALS) - len(letters))]
    vocab = {token: i for i, token in enumerate(SPECIALS + letters)}
    assert len(vocab) == SHAPE.vocab
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)


def make_target() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=SHAPE.vocab, hidden_size=SHAPE.hidden, intermediate_size=128, num_hidden_layers=SHAPE.target_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=SHAPE.max_position,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, rope_theta=SHAPE.rope_theta,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.5 if "lm_head" in name else 0.25)
        if "o_proj" in name or "down_proj" in name:
            parameter.data.mul_(0.12)
    with torch.no_grad():  # text only: never the special tokens but <eos>, which stays as rare as any letter
        model.lm_head.weight[[0, 1, 3, 4]] *= 0.01
    return model


def train(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Cross-entropy against the target's own greedy text; later positions weigh less."""
    with torch.no_grad():
        prompts = torch.randint(len(SPECIALS), SHAPE.vocab, (SEQUENCES, 8))
        text = model.generate(prompts, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
        states = model(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[tap + 1] for tap in SHAPE.taps], -1)
    embed, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    drafter = Drafter(SHAPE, random_weights(SHAPE, SEED + 1, std=0.1))
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=STEPS)
    decay = torch.tensor([0.85**j for j in range(SHAPE.block - 1)])
    start = time.time()
    for step in range(STEPS):
        at = int(torch.randint(6, text.shape[1] - SHAPE.block, (1,)))
        rows = torch.randint(0, len(text), (64,))
        positions = torch.full((64, 1), at)
        hidden = drafter(features[rows, :at], text[rows, at][:, None], positions, embed)[:, 0]
        logits, wanted = hidden @ head.T, text[rows, at + 1 : at + SHAPE.block]
        loss = (
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted) * decay
        ).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step == STEPS - 1:
            right = [round(x, 2) for x in (logits.argmax(-1) == wanted).float().mean(0).tolist()]
            print(f"trained {STEPS} steps in {time.time() - start:.0f} s, right by position {right}", file=sys.stderr)
    return drafter.export()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the matrices are too small to share
    model = make_target()
    model.save_pretrained(folder / "target")
    make_tokenizer(folder / "target")
    write_drafter(folder / "drafter", SHAPE, train(model))
    write_drafter(folder / "drafter-misfit", SHAPE, random_weights(SHAPE, SEED + 2, std=0.1))


if __name__ == "__main__":
    main()
