"""One SGLang engine in a process of its own, driven by JSON lines on stdin; answers on the file descriptor given.

usage: child.py FD KWARGS.json
Commands: {"run": {"prompts": [[ids]], "params": {...}, "concurrency": n,
"lengths": [tokens of each answer], "logprob": true to have those of the text}}, {"gap": {"prompts": [[ids]]}},
{"profile": {...as run..., "folder": path}}, {"stop": {}}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


async def generate(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """All prompts, at most ``concurrency`` at a time."""
    gate = asyncio.Semaphore(order["concurrency"])

    async def one(ids: list[int], length: int) -> dict[str, Any]:
        params = order["params"] | ({"max_new_tokens": length} if length else {})
        async with gate:
            if not order.get("stream"):
                more = {"return_logprob": True} if order.get("logprob") else {}
                return dict(await engine.async_generate(input_ids=ids, sampling_params=params, **more))
            seen, at, answer = 0, 0.0, {}
            async for answer in await engine.async_generate(input_ids=ids, sampling_params=params, stream=True):
                now, count = time.perf_counter(), answer["meta_info"]["completion_tokens"]
                if seen and count > seen:
                    steps_seen.append((now - at) * 1000)
                    gaps_seen.extend([(now - at) * 1000 / (count - seen)] * (count - seen))
                seen, at = count, now
            return dict(answer)

    gaps_seen: list[float] = []
    steps_seen: list[float] = []
    begin = time.perf_counter()
    lengths = order.get("lengths") or [0] * len(order["prompts"])
    answers = await asyncio.gather(*map(one, order["prompts"], lengths))
    metas = [a["meta_info"] for a in answers]
    taken = time.perf_counter() - begin
    itl = sorted(gaps_seen)
    quantiles = {f"itl_p{q}": round(itl[min(len(itl) - 1, len(itl) * q // 100)], 4) for q in (50, 99)} if itl else {}
    if steps_seen:  # between two answers of a request: a step, as long as no prefill comes between
        quantiles["gap_p50"] = round(sorted(steps_seen)[len(steps_seen) // 2], 4)
    return {
        "seconds": taken,
        **quantiles,
        "outputs": [list(a["output_ids"]) for a in answers],
        **({"logprobs": [[t[0] for t in m["output_token_logprobs"]] for m in metas]} if order.get("logprob") else {}),
        "tokens": sum(m["completion_tokens"] for m in metas),
        "verify": [m.get("spec_verify_ct") or 0 for m in metas],
        "correct": [m.get("spec_num_correct_drafts") or 0 for m in metas],
    }


async def gaps(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Top-2 log-probabilities of the next token after each prompt."""
    out = []
    for ids in order["prompts"]:
        answer = await engine.async_generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            top_logprobs_num=2,
        )
        out.append([[float(t[0]), int(t[1])] for t in answer["meta_info"]["output_top_logprobs"][0]])
    return {"top": out}


async def profile(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """A run under the torch profiler; the trace lands in ``folder``."""
    from sglang.srt.managers.io_struct import ProfileReq

    request = ProfileReq(
        output_dir=order["folder"],
        activities=order["activities"],
        with_stack=order.get("stack", False),
        record_shapes=False,
    )
    await engine.tokenizer_manager.start_profile(request)
    done = await generate(engine, order)
    await engine.tokenizer_manager.stop_profile()
    return done


def main() -> None:
    """Start, then obey."""
    pipe = os.fdopen(int(sys.argv[1]), "w")

    def say(what: dict[str, Any]) -> None:
        pipe.write(json.dumps(what) + "\n")
        pipe.flush()

    try:
        import sglang

        begin = time.perf_counter()
        engine = sglang.Engine(**json.loads(Path(sys.argv[2]).read_text()))
        plugin = sys.modules.get("sglang_ddtree")
        say({"started": time.perf_counter() - begin, "plugin": plugin.__file__ if plugin else None})
        for line in sys.stdin:
            ((name, order),) = json.loads(line).items()
            if name == "stop":
                break
            action = {"run": generate, "gap": gaps, "profile": profile}[name]
            try:
                say(engine.loop.run_until_complete(action(engine, order)))
            except Exception:
                say({"error": traceback.format_exc()[-2000:]})
        engine.shutdown()
    except BaseException:
        say({"error": traceback.format_exc()[-2000:]})
        raise


if __name__ == "__main__":
    main()
