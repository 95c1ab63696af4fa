"""Prompt sets: one JSON object a line, ``{"id": …, "kind": …, "text": …}``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources

MAX_TEXT = 100_000  # characters
MAX_PROMPTS = 100_000
SHIPPED = ("default", "smollm2", "tiny")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, sent to the engine as it is (no chat template is applied).

    A user's prompt, sampled from live traffic, has token ids instead; neither is ever part of a log line.
    """

    id: str
    kind: str
    text: str = field(repr=False)
    ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def live(self) -> bool:
        """Whether a user wrote it: then nothing of it, nor of an answer to it, may be kept."""
        return bool(self.ids)


def load_prompts(text: str, source: str = "prompts.jsonl") -> list[Prompt]:
    """Parse a prompt set. Raises ValueError with one sentence that names the line."""
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        prompt = _parse(line, where)
        if prompt.id in lines:
            raise ValueError(f"{where}: id {prompt.id!r} is already used on line {lines[prompt.id]}")
        lines[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"{where}: more than {MAX_PROMPTS} prompts")
    if not prompts:
        raise ValueError(f'{source} has no prompts; write one {{"id": …, "kind": …, "text": …}} a line')
    return prompts


def shipped_prompts(name: str = "default") -> list[Prompt]:
    """A prompt set that comes with the operator: ``default`` (several kinds), ``smollm2`` (chat template applied),
    ``tiny`` (for the tiny test pair). Raises ValueError for another name.
    """
    if name not in SHIPPED:
        raise ValueError(f"no shipped prompt set {name!r}; there are {', '.join(SHIPPED)}")
    file = resources.files("ddtree_operator").joinpath("data", "prompts", f"{name}.jsonl")
    return load_prompts(file.read_text(encoding="utf-8"), f"{name}.jsonl")


def _parse(line: str, where: str) -> Prompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where} is not JSON: {e.msg} at column {e.colno}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where} is not a JSON object with id, kind and text")
    unknown = sorted(set(data) - {"id", "kind", "text"})
    if unknown:
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}; only id, kind and text are known")
    values: dict[str, str] = {}
    for name in ("id", "kind", "text"):
        value = data.get(name, "" if name == "kind" else None)
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} is {'missing' if name not in data else 'not a string'}")
        values[name] = value
    if not values["id"] or len(values["id"]) > 200:
        raise ValueError(f"{where}: id must have 1 to 200 characters")
    if not values["text"].strip():
        raise ValueError(f"{where}: text is empty")
    if len(values["text"]) > MAX_TEXT:
        raise ValueError(f"{where}: text has {len(values['text'])} characters, more than {MAX_TEXT}")
    return Prompt(values["id"], values["kind"], values["text"])
