"""Train the drafter on the target's own text.

usage: train.py TARGET_FOLDER PROMPTS.json OUT_FOLDER [--seconds 880] [--tokens 208] [--batch 160] [--generate 512]

1. The target continues every prompt, three quarters greedily, one quarter at temperature 0.8 (kept in
OUT_FOLDER/text.pt). 2. The drafter of config.json is trained by cross-entropy: 10 random anchors a sequence, weight
0.86^j for position j, AdamW with a cosine from 1.2e-3, for a given time. Checkpoints every minute and at the end; a
second start goes on from the last. 3. OUT_FOLDER gets a drafter that SGLang loads; ``pack.py pack`` makes
the small file of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from dflash import Drafter, Shape, random_weights, write_drafter  # noqa: E402

ANCHORS, DECAY, RATE, WARMUP, EOS = 10, 0.86, 1.2e-3, 100, 2


@torch.no_grad()
def generate(model: torch.nn.Module, prompts: list[list[int]], tokens: int, batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts, continued. Returns right-padded ``ids`` [n, length], first made position ``start`` [n] and
    ``end`` [n]."""
    rows: list[torch.Tensor] = []
    start, end = [], []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch):
        group = [prompts[i] for i in order[first : first + batch]]
        width = max(map(len, group))
        ids = torch.tensor([[EOS] * (width - len(p)) + p for p in group], device=model.device)
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=model.device)
        sample = (first // batch) % 4 == 3
        how = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sample else {"do_sample": False}
        out = model.generate(ids, attention_mask=seen, max_new_tokens=tokens, eos_token_id=EOS, pad_token_id=EOS, **how)
        for prompt, row in zip(group, out[:, width:].cpu(), strict=True):
            made = row.tolist()
            made = made[: made.index(EOS) + 1] if EOS in made else made
            rows.append(torch.tensor(prompt + made))
            start.append(len(prompt))
            end.append(len(prompt) + len(made))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=EOS)
    return {"ids": ids, "start": torch.tensor(start), "end": torch.tensor(end)}


def sample(text: dict[str, torch.Tensor], rows: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """Sequences, random anchors in their made part, the tokens to draft, and which of these exist."""
    ids, start, end = text["ids"][rows], text["start"][rows], text["end"][rows]
    ids = ids[:, : int(end.max())]
    at = start[:, None] + (torch.rand(len(rows), ANCHORS) * (end - start - 2)[:, None]).long()
    ahead = at[:, :, None] + torch.arange(1, block)
    wanted = ids.gather(1, ahead.clamp(max=ids.shape[1] - 1).flatten(1)).view(ahead.shape)
    return ids, at, wanted, ahead < end[:, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=880)
    parser.add_argument("--tokens", type=int, default=208)
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--generate", type=int, default=512)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(a.target, dtype=kind).to(device).eval()
    if not (a.out / "text.pt").exists():
        torch.save(generate(model, json.loads(a.prompts.read_text()), a.tokens, a.generate), a.out / "text.pt")
    text = torch.load(a.out / "text.pt")
    keep = text["end"] - text["start"] > 24
    text = {name: value[keep] for name, value in text.items()}
    shape = Shape.read(HERE)
    drafter = Drafter(shape, random_weights(shape, seed=0)).to(device)
    embed = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    state = {"step": 0, "elapsed": 0.0, "history": []}
    checkpoint = a.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        drafter.load_state_dict(saved["drafter"])
        optimiser.load_state_dict(saved["optimiser"])
        state = saved["state"]
    weight = DECAY ** torch.arange(shape.block - 1, device=device).float()

    def save(elapsed: float, loss: torch.Tensor) -> None:
        state.update(elapsed=elapsed, last=[state["step"], round(loss.item(), 3)])
        torch.save({"drafter": drafter.state_dict(), "optimiser": optimiser.state_dict(), "state": state}, checkpoint)

    loss: torch.Tensor | None = None
    begin, saved_at = time.monotonic() - state["elapsed"], state["elapsed"]
    while (elapsed := time.monotonic() - begin) < a.seconds:
        for group in optimiser.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * elapsed / a.seconds))
            group["lr"] = RATE * min(1, (state["step"] + 1) / WARMUP) * (0.97 * cosine + 0.03)
        rows = torch.randint(len(text["ids"]), (min(a.batch, len(text["ids"])),))
        ids, at, wanted, exists = (x.to(device) for x in sample(text, rows, shape.block))
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
            features = torch.cat([states[tap + 1] for tap in shape.taps], -1)
        with torch.autocast(device, kind, enabled=device == "cuda"):
            hidden = drafter(features.to(embed.dtype), ids.gather(1, at), at, embed)
            share = (exists * weight).flatten()
            chosen = share > 0
            logits = F.linear(hidden.reshape(-1, shape.hidden)[chosen].to(head.dtype), head).float()
        losses = F.cross_entropy(logits, wanted.flatten()[chosen], reduction="none")
        loss = (losses * share[chosen]).sum() / share.sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        state["step"] += 1
        if state["step"] % 200 == 1:
            right = ((logits.argmax(-1) == wanted.flatten()[chosen]).float().mean()).item()
            state["history"].append([state["step"], round(loss.item(), 3), round(right, 3)])
            print(f"step {state['step']} loss {loss.item():.3f} right {right:.3f} after {elapsed:.0f} s", flush=True)
        if elapsed - saved_at > 60:
            saved_at = elapsed
            save(elapsed, loss)
    if loss is not None:
        save(elapsed, loss)
    write_drafter(a.out / "drafter", shape, drafter.export())
    (a.out / "train.json").write_text(json.dumps(state, indent=1))


if __name__ == "__main__":
    main()
