"""Entry point: called by SGLang in every one of its processes, before arguments are parsed."""

from __future__ import annotations

import os
from typing import Any

from sglang_cpu import attention, platform_gate, processes, shims
from sglang_cpu.defaults import cpu_defaults
from sglang_cpu.hooks import Hooks

HOOKS = Hooks("sglang-cpu")


def enabled() -> bool:
    """SGLang's own switch for its CPU engine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0").lower() in ("1", "true", "yes", "y")


def register() -> None:
    """Install the hooks when ``SGLANG_USE_CPU_ENGINE`` is set; otherwise do nothing."""
    if not enabled():
        return
    platform_gate.allow_draft_backend()
    HOOKS.install("torch:Tensor.record_stream", shims.wrap_record_stream)
    HOOKS.install("sglang.srt.arg_groups.pipeline:run_resolution_pipeline", _wrap_pipeline)
    HOOKS.install("sglang.srt.arg_groups.speculative_hook:_handle_dflash", platform_gate.wrap_handle_dflash)
    HOOKS.install(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend",
        attention.wrap_forward_extend,
    )
    HOOKS.install(
        "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs", shims.wrap_extend_forward_kwargs
    )
    HOOKS.install("sglang.srt.entrypoints.engine:_set_envs_and_config", processes.wrap_set_envs_and_config)
    HOOKS.install("sglang.srt.managers.scheduler:Scheduler.init_model_worker", _wrap_init_model_worker)


def _wrap_pipeline(original: Any) -> Any:
    """Declare the CPU defaults before SGLang resolves its arguments (``arg_groups/pipeline.py:50`` keeps earlier
    declarations), so every later default sees them and the user's own flags win."""

    def run_resolution_pipeline(server_args: Any) -> Any:
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.arg_groups.overrides import declare_resolution

        HOOKS.require()
        given = {field.name: getattr(server_args, field.name) for field in record_fields(type(server_args))}
        values = cpu_defaults(given)
        if values:
            declare_resolution(server_args, "sglang_cpu", **values)
        return original(server_args)

    return run_resolution_pipeline


def _wrap_init_model_worker(original: Any) -> Any:
    """The scheduler is a process of its own: check there too, before it loads anything."""

    def init_model_worker(self: Any) -> Any:
        HOOKS.require()
        return original(self)

    return init_model_worker
