"""Prompt sets: the shipped ones, and errors that name the line."""

from __future__ import annotations

import pytest

from ddtree_operator.analysis.prompts import SHIPPED, load_prompts, shipped_prompts

pytestmark = pytest.mark.unit


def test_shipped_set_is_large_and_varied():
    prompts = shipped_prompts()
    assert len(prompts) >= 200
    kinds = [p.kind for p in prompts]
    assert {k: kinds.count(k) >= 30 for k in ("chat", "code", "maths", "json", "languages")} == dict.fromkeys(
        ("chat", "code", "maths", "json", "languages"), True
    )
    assert len({p.text for p in prompts}) == len(prompts)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_set_loads(name):
    assert len(shipped_prompts(name)) >= 60


def test_smollm2_set_is_rendered():
    for prompt in shipped_prompts("smollm2"):
        assert prompt.text.startswith("<|im_start|>system\n")
        assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_tiny_set_stays_in_the_tiny_vocabulary():
    known = {"\n", *map(chr, range(32, 127)), *map(chr, range(0xE0, 0x100))}
    for prompt in shipped_prompts("tiny"):
        assert set(prompt.text) <= known


def test_unknown_set():
    with pytest.raises(ValueError, match="no shipped prompt set 'x'"):
        shipped_prompts("x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no prompts"),
        ('{"id":"a","text":"t"}\n\n{"id":"a","text":"u"}', "line 3: id 'a' is already used on line 1"),
        ("{oops}", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"id":"a"}', "line 1: text is missing"),
        ('{"id":1,"text":"t"}', "line 1: id is not a string"),
        ('{"id":"a","text":"  "}', "line 1: text is empty"),
        ('{"id":"","text":"t"}', "id must have 1 to 200"),
        ('{"id":"a","text":"t","tags":[]}', "unknown field 'tags'"),
        ('{"id":"a","text":"' + "x" * 100_001 + '"}', "characters, more than"),
    ],
)
def test_errors_name_the_line(text, says):
    with pytest.raises(ValueError, match=says):
        load_prompts(text)


def test_kind_may_be_left_out():
    assert load_prompts('{"id":"a","text":"t"}')[0].kind == ""
