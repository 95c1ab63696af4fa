"""What an engine must accept, step for step, computed without one: drafter and tree in plain torch on known greedy
text.

usage: offline.py PAIR_FOLDER SPEC.json OUT.json SPEC {"prompts": [[ids]], "texts": [[greedy ids, longer than tokens
by a block]], "tokens": n, "budget": b or 0 for the chain, "block": positions the drafter drafts} OUT  [[the accepted
path of each step: nodes of its tree, root first] of each prompt]"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "patches/sglang_ddtree/src")]
from dflash import Drafter, Shape  # noqa: E402

from sglang_ddtree import reference  # noqa: E402


def accepted(logits: torch.Tensor, text: list[int], budget: int) -> list[int]:
    """Nodes of the tree (or chain) that ``text`` follows, root first. logits [block - 1, vocab]."""
    if budget == 0:
        guesses = logits.argmax(-1).tolist()
        count = 0
        while count < len(guesses) and guesses[count] == text[count]:
            count += 1
        return list(range(count + 1))
    vals, ids = logits.topk(min(budget, logits.shape[-1]), -1)
    nodes = reference.build(reference.log_probabilities(vals.numpy(), logits.logsumexp(-1).numpy()), budget)
    tokens = [-1, *(int(ids[d - 1, r]) for d, r in zip(nodes.depths[1:], nodes.ranks[1:], strict=True))]
    path, _ = reference.walk(tokens, nodes.parents, [text[d] if d < len(text) else -1 for d in nodes.depths])
    return list(path)


def main() -> None:
    folder, spec_path, out_path = map(Path, sys.argv[1:4])
    spec = json.loads(spec_path.read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    shape = replace(Shape.read(folder / "drafter"), block=spec["block"])
    drafter = Drafter(shape, load_file(folder / "drafter" / "model.safetensors")).eval()
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    out = []
    with torch.no_grad():
        for prompt, text in zip(spec["prompts"], spec["texts"], strict=True):
            whole = prompt + text
            states = model(torch.tensor([whole]), output_hidden_states=True).hidden_states
            features = torch.cat([states[tap + 1] for tap in shape.taps], -1)
            at, steps = len(prompt), []
            while at - len(prompt) + 1 < spec["tokens"]:
                hidden = drafter(features[:, :at], torch.tensor([[whole[at]]]), torch.tensor([[at]]), embed)[0, 0]
                steps.append(accepted(hidden @ head.T, whole[at + 1 : at + shape.block], spec["budget"]))
                at += len(steps[-1])
            out.append(steps)
    out_path.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
