"""Prompts for self-generated training text.

usage: prompts.py TARGET_FOLDER COUNT OUT.json        writes a list of token id lists, 8 to 96 long

Four in five are chat questions put together from parts below and from the system's word list; the rest are openings of
fortunes and of functions of Python's standard library. Debian packages: wamerican-small, fortunes.
"""

from __future__ import annotations

import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import AutoTokenizer

SEED = 11
_SUBJECTS = """
rain, glaciers, the moon, comets, whales, ants, roses, forests, bread, cheese, chess, football, swimming, pianos,
opera, castles, bridges, trains, maps, money, trade, taxes, voting, courts, medicine, vaccines, sleep, dreams,
memory, teaching, exams, friendship, moving house, cooking for guests, planting a garden, training a dog, buying a
bicycle, the Roman army, the silk road, the printing press, the steam engine, electricity, radio, computers,
compilers, databases, passwords, networks, sorting, recursion, fractions, triangles, probability, prime numbers,
calculus
"""
SUBJECTS = [part.strip() for part in _SUBJECTS.replace("\n", " ").split(",")]
QUESTIONS = (
    "What should everybody know about {s}?",
    "Explain {s} to a child.",
    "Explain {s} to an engineer.",
    "Give me a numbered list of tips about {s}.",
    "Write two paragraphs about {s}.",
    "Write a poem about {s}.",
    "Write a story in which {s} and {t} meet.",
    "What do {s} and {t} have in common?",
    "Name advantages and disadvantages of {s}.",
    "Give the history of {s} in five sentences.",
    "Make a quiz about {s} with answers.",
    "Draft a letter to a newspaper about {s}.",
    "Answer with a JSON object with name, summary and example: {s}.",
    "Put this into French: I have been reading about {s}.",
    "What does the word {w} mean?",
    "Use {w} and {v} in one sentence.",
    "Find words that rhyme with {w}.",
    "Describe a {w} without using the word {v}.",
)
_TASKS = """
adds two numbers, counts lines in a file, finds the longest word, merges sorted lists, checks brackets, draws a
triangle of stars, converts minutes to hours, removes duplicates, looks up a phone number, rolls dice, caches
results, parses a date, groups records by key, computes a median, encodes a message, walks a folder
"""
TASKS = [part.strip() for part in _TASKS.replace("\n", " ").split(",")]
LANGUAGES = ("Python", "JavaScript", "Bash", "SQL", "C")


def sums(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 60), rng.randint(2, 12)
    return rng.choice(
        (
            f"Calculate {a} + {b} * {c} step by step.",
            f"A box holds {c} eggs. How many boxes are needed for {a} eggs?",
            f"Solve {c}x - {b} = {a} for x.",
            f"Is {a} a prime number? Explain.",
            f"A bus goes {a} km in {c} hours. How fast is it?",
        )
    )


def question(rng: random.Random, words: list[str]) -> str:
    kind = rng.random()
    if kind < 0.75:
        s, t = rng.sample(SUBJECTS, 2)
        w, v = rng.sample(words, 2)
        return rng.choice(QUESTIONS).format(s=s, t=t, w=w, v=v)
    if kind < 0.88:
        return f"Write a {rng.choice(LANGUAGES)} program that {rng.choice(TASKS)}."
    return sums(rng)


def openings() -> list[str]:
    """Beginnings of other kinds of text, as far as this machine has them."""
    fortunes = [
        piece.strip()
        for file in Path("/usr/share/games/fortunes").glob("*")
        if not file.suffix
        for piece in file.read_text(errors="ignore").split("\n%\n")
    ]
    code = [
        piece
        for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
        for piece in re.split(r"\n(?=def |class )", file.read_text(errors="ignore"))
    ]
    return [piece for piece in fortunes + code if len(piece) > 80]


def prompts(tokenizer: AutoTokenizer, count: int) -> Iterator[list[int]]:
    rng = random.Random(SEED)
    words = [w for w in Path("/usr/share/dict/words").read_text().split() if re.fullmatch("[a-z]{4,10}", w)]
    others, seen = openings(), set()
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    while len(seen) < count:
        if others and rng.random() < 0.2:
            ids = encode(rng.choice(others))[: rng.randint(16, 56)]
        else:
            chat = [{"role": "user", "content": question(rng, words)}]
            ids = encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))[:96]
        key = tuple(ids)
        if len(ids) >= 8 and key not in seen:
            seen.add(key)
            yield ids


if __name__ == "__main__":
    target, count, out = sys.argv[1:4]
    made = list(prompts(AutoTokenizer.from_pretrained(target), int(count)))
    Path(out).write_text(json.dumps(made))
    print(f"{len(made)} prompts, {sum(map(len, made)) / len(made):.0f} tokens each")
