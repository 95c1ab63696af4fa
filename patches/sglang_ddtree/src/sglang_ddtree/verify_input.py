"""The target's verify pass over a tree."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):  # type: ignore[misc]
    """DFlash's verify input with a tree mask and depth positions: ``draft_token`` and ``positions`` [bs * width],
    ``draft_token_num`` = width, ``custom_mask`` flat bool in SGLang's FULL_MASK layout.

    ``topk`` 2 tells backends that ask that this is a tree; ``tree_topk`` -1 that it has no fixed branching
    (``srt/speculative/ngram_info.py:49`` sets the precedent)."""

    topk: int = 2
    tree_topk: int = -1
