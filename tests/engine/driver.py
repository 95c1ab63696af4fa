"""Runs one engine through a workload and writes what it answered. A process of its own: an engine that dies takes its
group with it, and the test must live.

usage: driver.py SPEC.json OUT.json
SPEC {"engine": kwargs of sglang.Engine, "rounds": [{"requests": [{"ids", "params", "delay", "abort_after"}], "flush"}]}
OUT  {"started": seconds, "rounds": [[{"ids", "meta"} or {"error"}]], "tokens_free": {...}, "info": {...}}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any


async def one(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request after its delay; with ``abort_after`` the client leaves after that many streamed pieces."""
    await asyncio.sleep(request.get("delay", 0))
    rid = request.get("rid")
    extra = {key: request[key] for key in ("return_logprob", "top_logprobs_num") if key in request}
    if "abort_after" not in request:
        try:
            answer = await engine.async_generate(input_ids=request["ids"], sampling_params=request["params"], **extra)
        except ValueError as error:
            return {"error": str(error)}
        return {"ids": answer["output_ids"], "meta": answer["meta_info"], "text": answer.get("text")}
    pieces, last = 0, None
    stream = await engine.async_generate(
        input_ids=request["ids"], sampling_params=request["params"], stream=True, rid=rid
    )
    async for piece in stream:
        pieces, last = pieces + 1, piece
        if pieces == request["abort_after"]:
            engine.tokenizer_manager.abort_request(rid)
    return {"ids": last["output_ids"] if last else [], "meta": last["meta_info"] if last else {}, "aborted": True}


async def play(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(one(engine, request) for request in requests)))


def main() -> None:
    import sglang

    spec = json.loads(Path(sys.argv[1]).read_text())
    begin = time.monotonic()
    engine = sglang.Engine(**spec["engine"])
    out: dict[str, Any] = {"started": time.monotonic() - begin, "rounds": []}
    try:
        for block in spec["rounds"]:
            if block.get("flush"):
                engine.flush_cache()
            begin = time.monotonic()
            out["rounds"].append(engine.loop.run_until_complete(play(engine, block["requests"])))
            out.setdefault("seconds", []).append(time.monotonic() - begin)
        # an idle scheduler counts its free slots and ends itself if one is missing; then nothing answers any more
        engine.loop.run_until_complete(asyncio.sleep(spec.get("idle", 1.0)))
        out["flushed"] = bool(engine.flush_cache().success)
        out["alive"] = len(
            engine.generate(input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 4})["output_ids"]
        )
        info = engine.get_server_info()
        out["info"] = {
            key: info.get(key)
            for key in (
                "speculative_algorithm",
                "speculative_num_draft_tokens",
                "speculative_ddtree_budget",
                "page_size",
            )
        }
        Path(sys.argv[2]).write_text(json.dumps(out))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
