"""Greedy continuations by Transformers in float32, in the engine's environment: what every engine must answer.

usage: greedy.py MODEL SPEC.json OUT.json      SPEC {"prompts": [[ids] or text], "tokens": n}; OUT [[ids]], no stop
Prompts of one length go through the model together: no padding, which would change the arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    model_path, spec_path, out_path = sys.argv[1:4]
    spec = json.loads(Path(spec_path).read_text())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [tokenizer(p, add_special_tokens=False).input_ids if isinstance(p, str) else p for p in spec["prompts"]]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    out: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad():
        for length, rows in sorted(by_length.items()):
            ids = torch.tensor([prompts[row] for row in rows])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=spec["tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            for row, sequence in zip(rows, made[:, length:].tolist(), strict=True):
                out[row] = sequence
    Path(out_path).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
