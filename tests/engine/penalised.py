"""Greedy continuations by Transformers in float32 under penalties: what an engine must answer.

usage: penalised.py MODEL SPEC.json OUT.json
SPEC [{"ids": prompt, "params": of SGLang, "ends": [ids that end a text], "tokens": n}]; OUT [[ids]], ended at ``ends``

Repetition penalty, minimum length and bias are Transformers' own processors; frequency and presence, which it lacks,
are below. The prompt counts nowhere, as in SGLang."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)


class Counted(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties over what follows the prompt."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self.start, self.frequency, self.presence = start, frequency, presence

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for row, ids in enumerate(input_ids[:, self.start :].tolist()):
            for token in set(ids):
                scores[row, token] -= self.frequency * ids.count(token) + self.presence
        return scores


def processors(length: int, params: dict[str, Any], ends: list[int]) -> LogitsProcessorList:
    """In SGLang's order; ``length`` of the prompts."""
    out = [Counted(length, params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0))]
    if "repetition_penalty" in params:
        out.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"], prompt_ignore_length=length))
    if params.get("min_new_tokens"):
        out.append(MinNewTokensLengthLogitsProcessor(length, params["min_new_tokens"], ends))
    if params.get("logit_bias"):
        out.append(SequenceBiasLogitsProcessor([[[int(k)], float(v)] for k, v in params["logit_bias"].items()]))
    return LogitsProcessorList(out)


def main() -> None:
    model_path, spec_path, out_path = sys.argv[1:4]
    spec = json.loads(Path(spec_path).read_text())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups: dict[str, list[int]] = defaultdict(list)
    for index, asked in enumerate(spec):
        groups[json.dumps([len(asked["ids"]), asked["params"], asked["ends"], asked["tokens"]])].append(index)
    out: list[list[int]] = [[] for _ in spec]
    with torch.no_grad():
        for key, rows in groups.items():
            length, params, ends, tokens = json.loads(key)
            ids = torch.tensor([spec[row]["ids"] for row in rows])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=processors(length, params, ends),
            )
            for row, text in zip(rows, made[:, length:].tolist(), strict=True):
                cut = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
                out[row] = text[:cut]
    Path(out_path).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
