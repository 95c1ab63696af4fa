"""Requests that would end an engine: each rule at its border, and both seams."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang_ddtree/src"))
from sglang_ddtree import guard
from sglang_ddtree.hooks import Hooks

pytestmark = pytest.mark.unit
VOCAB = 128
NEVER = {str(token): -1e300 for token in range(VOCAB)}


def params(**asked: Any) -> Any:
    """SGLang's SamplingParams, completed."""
    fixed = {"max_new_tokens": 8, "min_new_tokens": 0, "top_k": 1 << 30, "repetition_penalty": 1.0, "logit_bias": None,
             "stop_token_ids": None, "skip_special_tokens": True, "spaces_between_special_tokens": True}  # fmt: skip
    return SimpleNamespace(**fixed | asked)


@pytest.mark.parametrize("make", [list, lambda ids: array("q", ids)])
def test_prompts(make: Callable[[list[int]], Any]) -> None:
    assert guard.bad_prompt(make([0, 127, 5]), VOCAB) is None
    assert guard.bad_prompt(make([1, 128, -1]), VOCAB) == (
        "token id 128 at position 1 of the prompt is not in the model's vocabulary of 128; "
        "give ids from 0 to 127, from this model's tokenizer"
    )
    assert "token id -1 at position 0 " in (guard.bad_prompt(make([-1]), VOCAB) or "")
    assert guard.bad_prompt(make([]), VOCAB) == "the prompt is empty; give at least one token"


def test_a_prompt_of_numbers_too_large_and_of_none() -> None:
    assert f"token id {2**70} at position 1 " in (guard.bad_prompt([3, 2**70], VOCAB) or "")
    assert guard.bad_prompt(cast("list[int]", [3, "x"]), VOCAB) is None, "SGLang says that"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; give a whole number"),
        ({"top_k": 2.5}, "top_k is 2.5; give a whole number"),
        ({"top_k": 1 << 31}, "top_k is 2147483648; give"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens is 'x'; give true or false"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300; give"),
        ({"stop_token_ids": {128}, "min_new_tokens": 1}, "token id 128 in stop_token_ids is not in"),
        ({"logit_bias": {"5": "x"}}, "the bias of token 5 in logit_bias is 'x'; give a number"),
        ({"logit_bias": {"5": float("nan")}}, "the bias of token 5 in logit_bias is nan; give a number"),
        ({"logit_bias": {"5": 1e300}}, "the bias of token 5 in logit_bias is 1e+300; give a number"),
        ({"logit_bias": NEVER}, "forbid every token"),
        ({"logit_bias": NEVER | {"7": 0}, "stop_token_ids": {7}, "min_new_tokens": 1}, "forbid every token"),
    ],
)
def test_params(asked: dict[str, Any], said: str) -> None:
    assert said in (guard.bad_params(params(**asked), VOCAB) or "")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_new_tokens": None, "top_k": (1 << 31) - 1, "repetition_penalty": 1e-20},
        {"stop_token_ids": {128, -5}},  # can never come, and nothing looks it up
        {"stop_token_ids": {127}, "min_new_tokens": 1},
        {"logit_bias": {"5": -float("inf"), "6": 1e30, "7": True}},
        {"logit_bias": NEVER | {"7": -100}},
        {"logit_bias": NEVER | {"7": 0}, "stop_token_ids": {7}},
    ],
)
def test_params_that_are_fine(asked: dict[str, Any]) -> None:
    assert guard.bad_params(params(**asked), VOCAB) is None


def test_logprobs() -> None:
    assert guard.bad_logprobs(VOCAB, 0, VOCAB) is None
    assert guard.bad_logprobs(0, -1, VOCAB) is None
    assert "top_logprobs_num is 129; give" in (guard.bad_logprobs(129, 0, VOCAB) or "")
    assert "logprob_start_len is -2; give" in (guard.bad_logprobs(1, -2, VOCAB) or "")


def wrapped(install: Callable[[Any, Callable[[], bool]], None], original: Any, in_use: bool) -> Any:
    """What a seam puts in the place of ``original``."""
    made: list[Any] = []
    hooks = SimpleNamespace(install=lambda path, wrap: made.append(wrap(original)))
    install(cast("Hooks", hooks), lambda: in_use)
    return made[0]


def intake(in_use: bool = True) -> Callable[..., Any]:
    """SGLang's intake, which makes of a request what ``made`` says."""

    def original(self: Any, obj: Any, text: Any, ids: Any, embeds: Any, pictures: Any) -> Any:
        return obj.made

    create = wrapped(guard.install_intake, original, in_use)

    def call(ids: Any, pictures: Any = None, made: Any = None, **obj: Any) -> Any:
        manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
        made = made or SimpleNamespace(sampling_params=params(), return_logprob=False)
        return create(manager, SimpleNamespace(made=made, **obj), None, ids, None, pictures) is made

    return call


def test_the_intake_refuses_with_what_sglang_makes_a_400() -> None:
    send = intake()
    assert send([1, 2])
    with pytest.raises(ValueError, match="token id 128 at position 1"):
        send([1, 128])
    with pytest.raises(ValueError, match="the prompt is empty"):
        send([])
    with pytest.raises(ValueError, match="top_k is"):
        send([1], made=SimpleNamespace(sampling_params=params(top_k=2.5), return_logprob=False))
    best = SimpleNamespace(sampling_params=params(), return_logprob=True, top_logprobs_num=129, logprob_start_len=-1)
    with pytest.raises(ValueError, match="top_logprobs_num is 129"):
        send([1], made=best)


def test_the_intake_lets_pass_what_is_none_of_its_business() -> None:
    assert intake(in_use=False)([1, 128])
    assert intake()([1, -7], pictures=SimpleNamespace())
    assert intake()([], session_params={"id": "s"})
    assert intake()(None)  # embeddings


def request(ids: list[int], **asked: Any) -> Any:
    return SimpleNamespace(origin_input_ids=array("q", ids), vocab_size=VOCAB, sampling_params=params(**asked))


def test_the_scheduler_refuses_and_makes_the_request_harmless() -> None:
    check = wrapped(guard.install_scheduler, lambda req, overlap: "as ever", True)
    assert check(request([1, 2]), True) == "as ever"
    bad = request([1, 128], min_new_tokens=3, stop_token_ids={900}, logit_bias={"5": "x"})
    assert "token id 128 at position 1" in check(bad, True)
    assert guard.bad_params(bad.sampling_params, VOCAB) is None
    assert "top_k is 2.5" in check(request([1], top_k=2.5), True)
    assert wrapped(guard.install_scheduler, lambda req, overlap: None, False)(request([128]), True) is None


def test_an_oversight_in_the_scheduler_ends_nothing() -> None:
    check = wrapped(guard.install_scheduler, lambda req, overlap: "as ever", True)
    assert check(SimpleNamespace(vocab_size=None), True) == "as ever"
