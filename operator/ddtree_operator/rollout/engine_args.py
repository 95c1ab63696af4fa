"""The engine's command line from the resource. What is set here is refused in ``engine.args``."""

from __future__ import annotations

from ddtree_operator.api.names import ENGINE_PORT
from ddtree_operator.api.spec import Algorithm, DDTreeSpec


def engine_args(spec: DDTreeSpec, defaults: list[str]) -> list[str]:
    """Arguments after ``python3 -m sglang.launch_server``. ``defaults`` come from the operator's settings; the
    resource's own ``engine.args`` stand last, so that they win.
    """
    args = ["--model-path", spec.model.path, "--host", "0.0.0.0", "--port", str(ENGINE_PORT), "--enable-metrics"]
    if spec.model.revision:
        args += ["--revision", spec.model.revision]
    if spec.engine.tensor_parallel > 1:
        args += ["--tp-size", str(spec.engine.tensor_parallel)]
    speculative = spec.engine.speculative
    if speculative.algorithm is not Algorithm.NONE:
        args += ["--speculative-algorithm", str(speculative.algorithm)]
        if spec.drafter is not None and speculative.algorithm is not Algorithm.NGRAM:
            args += ["--speculative-draft-model-path", spec.drafter.path]
            if spec.drafter.revision:
                args += ["--speculative-draft-model-revision", spec.drafter.revision]
        if speculative.budget is not None:
            args += ["--speculative-ddtree-budget", str(speculative.budget)]
        if speculative.draft_block is not None:
            args += ["--speculative-dflash-block-size", str(speculative.draft_block)]
    return args + list(defaults) + list(spec.engine.args)
