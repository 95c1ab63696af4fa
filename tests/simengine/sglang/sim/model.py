"""A "language model": the next token is a hash of all tokens before it, so that two engines agree and a wrong token
changes everything after it, as in a real one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.sim.script import Script

EOS = 2
FIRST = 300  # below: bytes of text + 3
VOCAB = 8192
WORDS = ("ba", "do", "fi", "ku", "la", "me", "no", "ri", "so", "tu", "ve", "zi")


@dataclass
class Answer:
    """One generation with its counters."""

    ids: list[int]
    gaps: list[float]  # log-prob gap of the two best tokens, per position
    rivals: list[int]  # second best token, per position
    finished: str  # length | stop
    verify_steps: int = 0
    accepted: int = 0


def encode(text: str) -> list[int]:
    """Text to ids: a begin token and the bytes."""
    return [1, *(b + 3 for b in text.encode())]


def decode(ids: Sequence[int]) -> str:
    """Ids to text: readable, and different for different ids."""
    parts = []
    for i in ids:
        if i >= FIRST:
            parts.append(" " + WORDS[i % 12] + WORDS[i // 12 % 12] + WORDS[i // 144 % 12] + (WORDS[i // 1728 % 12]))
        elif i >= 3:
            parts.append(chr(i - 3))
    return "".join(parts)


def generate(ids: Sequence[int], max_new: int, script: Script, accept: float) -> Answer:
    """Greedy tokens after ``ids``, and the counters of an engine with mean accept length ``accept``."""
    state = hashlib.blake2b(str(script.seed).encode(), digest_size=16)
    for i in ids:
        state.update(i.to_bytes(4, "little"))
    prompt = state.digest()
    answer = Answer([], [], [], "length")
    for position in range(max_new):
        number = int.from_bytes(state.digest(), "little")
        best = EOS if number % 331 == 0 else FIRST + number // 331 % (VOCAB - FIRST)
        rival = FIRST + (best + 1 + number // 7 % 1000) % (VOCAB - FIRST)
        tie = script.tie_every > 0 and number // 13 % script.tie_every == 0
        token = rival if tie and script.tie_flip and position else best
        if script.fault_every and position and (position + 1) % script.fault_every == 0:
            token = FIRST + (token + 77) % (VOCAB - FIRST)
        answer.ids.append(token)
        answer.rivals.append(rival)
        answer.gaps.append(1e-7 if tie else 1.0 + number // 17 % 1000 / 200)
        state.update(token.to_bytes(4, "little"))
        if token == EOS:
            answer.finished = "stop"
            break
    if accept > 1.0 or script.accept:
        _count(answer, prompt, accept, script)
    return answer


def _count(answer: Answer, prompt: bytes, accept: float, script: Script) -> None:
    # The prompt sets most of the spread, so that pairs correlate; a little is the engine's own.
    shared, own = _normal(prompt), _normal(prompt + f"{accept:.6f}".encode())
    drafts = (accept - 1) * math.exp(script.noise * (0.9 * shared + 0.4 * own))
    produced, want = 0, len(answer.ids) - 1  # prefill made the first token
    while produced < want:
        draw = int.from_bytes(
            hashlib.blake2b(prompt + produced.to_bytes(4, "little"), digest_size=4).digest(), "little"
        )
        got = int(drafts) + (draw / 2**32 < drafts - int(drafts))
        answer.verify_steps += 1
        answer.accepted += got
        produced += got + 1


def _normal(seed: bytes) -> float:
    """Roughly standard normal, from a hash: twelve uniforms."""
    digest = hashlib.blake2b(seed, digest_size=48).digest()
    return sum(int.from_bytes(digest[i : i + 4], "little") / 2**32 for i in range(0, 48, 4)) - 6.0
