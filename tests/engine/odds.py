"""How likely what was drawn is, by the target itself. Every draw is looked at given its own past.

usage: odds.py MODEL SPEC.json OUT.json
SPEC {"prompts": [[ids]], "drawn": [[ids]], "params": {temperature, top_k, top_p, penalties as SGLang names them}}
OUT  {"z": one score for each group of ranks, "forbidden": draws of probability 0}
For every draw the tokens are ranked by probability; a group of ranks (first, second, 3–4, 5–10, rest) has an exact
probability. Draws of the group, less its expectation, over the standard deviation of that sum, is its score.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

EOS = 2
GROUPS = ((0, 1), (1, 2), (2, 4), (4, 10), (10, 10**9))


def penalised(logits: torch.Tensor, drawn: torch.Tensor, params: dict[str, float]) -> torch.Tensor:
    """Scores [n, vocab] at the positions where ``drawn`` [n] was drawn, under penalties over what came before."""
    seen = torch.nn.functional.one_hot(drawn, logits.shape[1]).cumsum(0).roll(1, 0)
    seen[0] = 0
    there = seen > 0
    logits = logits - params.get("frequency_penalty", 0.0) * seen - params.get("presence_penalty", 0.0) * there
    factor = torch.where(there, params.get("repetition_penalty", 1.0), 1.0)
    logits = torch.where(logits < 0, logits * factor, logits / factor)
    logits[: int(params.get("min_new_tokens", 0)), EOS] = float("-inf")
    return logits


def adjusted(logits: torch.Tensor, params: dict[str, float]) -> torch.Tensor:
    """Probabilities [n, vocab] after temperature, top-k and top-p as SGLang defines them: both cuts on the same sorted
    probabilities, the token that crosses top-p stays."""
    probs = (logits / params["temperature"]).softmax(-1)
    ordered, index = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before > params.get("top_p", 1.0), 0)
    ordered[:, int(params.get("top_k", ordered.shape[1])) :] = 0
    out = torch.zeros_like(probs).scatter_(1, index, ordered)
    return out / out.sum(-1, keepdim=True)


def main() -> None:
    model_path, spec_path, out_path = map(Path, sys.argv[1:4])
    spec = json.loads(spec_path.read_text())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    by_length: dict[int, list[int]] = {}
    whole = [p + d for p, d in zip(spec["prompts"], spec["drawn"], strict=True)]
    for row, ids in enumerate(whole):
        by_length.setdefault(len(ids), []).append(row)
    observed = torch.zeros(len(GROUPS), dtype=torch.float64)
    expected, variance = observed.clone(), observed.clone()
    forbidden = 0
    with torch.no_grad():
        for rows in by_length.values():
            logits = model(torch.tensor([whole[row] for row in rows])).logits
            for at, row in enumerate(rows):
                start, drawn = len(spec["prompts"][row]), torch.tensor(spec["drawn"][row])
                raw = penalised(logits[at, start - 1 : -1], drawn, spec["params"])
                probs = adjusted(raw, spec["params"]).double()
                ordered, order = probs.sort(-1, descending=True)
                rank = (order == drawn[:, None]).int().argmax(-1)
                forbidden += int((probs.gather(1, drawn[:, None]) == 0).sum())
                for group, (low, high) in enumerate(GROUPS):
                    p = ordered[:, low:high].sum(-1)
                    observed[group] += ((rank >= low) & (rank < high)).sum()
                    expected[group] += p.sum()
                    variance[group] += (p * (1 - p)).sum()
    used = variance > 5
    z = ((observed - expected) / variance.sqrt())[used]
    result = {"z": z.tolist(), "observed": observed.tolist(), "expected": expected.tolist(), "forbidden": forbidden}
    out_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
