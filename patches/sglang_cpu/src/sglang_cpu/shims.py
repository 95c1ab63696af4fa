"""Two lines of SGLang 0.5.23 that assume a GPU."""

from __future__ import annotations

from typing import Any


def wrap_extend_forward_kwargs(original: Any) -> Any:
    """``srt/model_executor/model_runner.py:1772`` casts input embeddings to bfloat16; a float32 drafter then dies in
    its first projection. Cast to the runner's dtype instead."""

    def extend_forward_kwargs(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, forward_batch, *args, **kwargs)
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            out["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return out

    return extend_forward_kwargs


def wrap_record_stream(original: Any) -> Any:
    """``srt/speculative/dflash_worker_v2.py:2481`` calls ``seq_lens.record_stream(<CPU stream>)``, which raises for CPU
    tensors. There is one stream on a CPU: nothing to record."""

    def record_stream(self: Any, stream: Any) -> Any:
        return None if self.device.type == "cpu" else original(self, stream)

    return record_stream
