"""Lets DFLASH resolve on a CPU.

``srt/arg_groups/speculative_hook.py:287-303`` accepts cuda, npu and xpu only, or an out-of-tree platform that says
yes; ``:886-940`` accepts a list of drafter backends without torch_native, or what an out-of-tree platform supports.
So for the time of that one call the platform is seen through a proxy that answers as an out-of-tree platform would.
"""

from __future__ import annotations

from typing import Any


class CpuPlatformView:
    """The current platform, with the questions about DFLASH answered for a CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend in ("torch_native", "triton")

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"


def allow_draft_backend() -> None:
    """``srt/speculative/draft_worker_common.py:32`` checks the list itself, whatever the platform says."""
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    if "torch_native" not in DRAFT_ATTENTION_BACKEND_CHOICES:
        DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")


def wrap_handle_dflash(original: Any) -> Any:
    def handle_dflash(server_args: Any) -> Any:
        from sglang.srt.arg_groups import speculative_hook
        from sglang.srt.arg_groups.overrides import resolving_view

        if resolving_view(server_args).device != "cpu":
            return original(server_args)
        platform = speculative_hook.current_platform
        speculative_hook.current_platform = CpuPlatformView(platform)
        try:
            return original(server_args)
        finally:
            speculative_hook.current_platform = platform

    return handle_dflash
