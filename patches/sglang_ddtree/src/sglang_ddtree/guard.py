"""Requests that would end the engine for everybody are refused with a sentence, status 400.

Stock SGLang 0.5.23 hands some numbers of a request to tensors unchecked. A bad one raises in the scheduler or the
detokenizer, which ends the engine; on a GPU some are device-side asserts. Every rule is about an end that was seen on a
CPU.

In force for DDTREE alone, as all of the plugin: a stock engine (a canary's baseline, say) stays as it is. Two seams.
At the intake, where prompts have become token ids, a request goes no further, and a batch goes as a whole. The
scheduler's own check of DFLASH requests covers what comes another way: tokenizer workers, which load no plugins, and
gRPC. It sees prompts and SamplingParams.

Left: a bias and a grammar that together forbid every token. ``sampling`` stands that, SGLang's own sampler, which draws
a text's first token, may not."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_ddtree.hooks import Hooks

logger = logging.getLogger(__name__)
INTAKE = "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object"
SCHEDULER = "sglang.srt.speculative.dflash_utils:validate_dflash_request"
LARGEST = 1e30  # of a bias; divided by SGLang's lowest temperature, 1e-6, it still is a number in float32
LOWEST = 1e-20  # of a repetition penalty, likewise
HARMLESS = {"min_new_tokens": 0, "max_new_tokens": 1, "top_k": 1, "repetition_penalty": 1.0, "logit_bias": None,
            "skip_special_tokens": True, "spaces_between_special_tokens": True}  # fmt: skip
InUse = Callable[[], bool]


def bad_prompt(ids: Sequence[int], vocab: int) -> str | None:
    """What is wrong with a prompt's ids. Microseconds for a long prompt where nothing is."""
    if not len(ids):
        return "the prompt is empty; give at least one token"
    try:
        numbers = np.frombuffer(ids if isinstance(ids, array) else array("q", ids), dtype=np.int64)
        if numbers.min() >= 0 and numbers.max() < vocab:
            return None
    except TypeError:
        return None  # not numbers: SGLang says so, and only this request ends
    except OverflowError:
        pass
    at, token = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab)
    return (
        f"token id {token} at position {at} of the prompt is not in the model's vocabulary of {vocab}; "
        f"give ids from 0 to {vocab - 1}, from this model's tokenizer"
    )


def bad_params(params: Any, vocab: int) -> str | None:
    """What is wrong with a request's SamplingParams, which SGLang has checked and completed."""
    for name in ("max_new_tokens", "top_k"):
        value = getattr(params, name)
        if value is not None and (not isinstance(value, int) or value >= 1 << 31):
            return f"{name} is {value!r}; give a whole number below 2147483648"
    for name in ("skip_special_tokens", "spaces_between_special_tokens"):
        value = getattr(params, name)
        if not isinstance(value, (bool, int)):
            return f"{name} is {value!r}; give true or false"
    if params.repetition_penalty < LOWEST:
        return f"repetition_penalty is {params.repetition_penalty}; give a number from {LOWEST} to 2"
    stops: set[int] = set()
    if params.min_new_tokens > 0:  # else a stop token that cannot come just never stops anything
        stops |= set(params.stop_token_ids or ())
        wrong = [token for token in stops if not 0 <= token < vocab]
        if wrong:
            return (
                f"token id {wrong[0]} in stop_token_ids is not in the model's vocabulary of {vocab}; "
                f"give ids from 0 to {vocab - 1}, or no min_new_tokens"
            )
    bias = params.logit_bias or {}
    for token, value in bias.items():
        if not isinstance(value, (int, float)) or not value <= LARGEST:  # not a number either
            return f"the bias of token {token} in logit_bias is {value!r}; give a number up to {LARGEST}"
    if len(stops) + len(bias) >= vocab and len(stops | {int(t) for t, v in bias.items() if v < -LARGEST}) >= vocab:
        return "logit_bias and stop_token_ids with min_new_tokens forbid every token; leave one to choose"
    return None


def bad_logprobs(top: int, start: int | None, vocab: int) -> str | None:
    """What is wrong with top_logprobs_num and logprob_start_len of a request for log-probabilities."""
    if not 0 <= top <= vocab:
        return f"top_logprobs_num is {top}; give a number from 0 to the size of the model's vocabulary, {vocab}"
    if start is not None and start < -1:
        return f"logprob_start_len is {start}; give a position of the prompt, or -1 for none of it"
    return None


def install_intake(hooks: Hooks, in_use: InUse) -> None:
    """In the process that parsed the arguments, which has SGLang's tokenizer manager."""

    def wrap(original: Any) -> Any:
        def _create_tokenized_object(
            self: Any, obj: Any, input_text: Any, input_ids: Any, input_embeds: Any = None, mm_inputs: Any = None,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if not in_use():
                return original(self, obj, input_text, input_ids, input_embeds, mm_inputs, *args, **kwargs)
            vocab = int(self.model_config.vocab_size)
            # pictures have placeholders for tokens; a session may go on from what it has
            if input_ids is not None and mm_inputs is None and (len(input_ids) or not _goes_on(obj)):
                _refuse(bad_prompt(input_ids, vocab))
            made = original(self, obj, input_text, input_ids, input_embeds, mm_inputs, *args, **kwargs)
            _refuse(bad_params(made.sampling_params, vocab))
            if getattr(made, "return_logprob", False):
                _refuse(bad_logprobs(made.top_logprobs_num or 0, made.logprob_start_len, vocab))
            return made

        return _create_tokenized_object

    hooks.install(INTAKE, wrap)


def _goes_on(obj: Any) -> bool:
    return getattr(obj, "session_params", None) is not None or getattr(obj, "session_id", None) is not None


def _refuse(sentence: str | None) -> None:
    if sentence is not None:
        raise ValueError(sentence)  # SGLang makes it a 400


def install_scheduler(hooks: Hooks, in_use: InUse) -> None:
    """In every process; SGLang calls it in schedulers. ``in_use`` must be false for models that see pictures, whose
    requests may have placeholders here."""

    def wrap(original: Any) -> Any:
        def validate_dflash_request(req: Any, enable_overlap: bool) -> Any:
            sentence = None
            try:
                if in_use():
                    vocab, params = int(req.vocab_size), req.sampling_params
                    sentence = bad_prompt(req.origin_input_ids, vocab) or bad_params(params, vocab)
                    if sentence is not None:
                        # SGLang gives a refused request a pass of one token, which must not do what was refused
                        for name, value in HARMLESS.items():
                            setattr(params, name, value)
            except Exception as error:  # an oversight here must not end what it is to keep alive
                logger.warning("ddtree: a request was not checked: %s: %s", type(error).__name__, error)
            return sentence or original(req, enable_overlap)

        return validate_dflash_request

    hooks.install(SCHEDULER, wrap)
