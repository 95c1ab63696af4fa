"""Runs engines, each through a workload, and writes what they answered.

usage: driver.py        reads lines "SPEC.json OUT.json LOG SECONDS"; answers each with its exit status

Every engine is a process group of its own, forked from this process, and its scheduler and detokenizer are forked in
turn (SGLang would spawn them): SGLang is imported once for many engines, which is most of what a start costs. An
engine that dies or hangs takes its group with it, nothing else. ``test_server.py`` starts servers the usual way.

SPEC {"engine": kwargs of sglang.Engine or {"flags": [of launch_server]}, "env": {}, "fault": patch or "",
      "rounds": [{"requests": [REQUEST]}]}
REQUEST {"ids" or "text", "params", "delay", "rid", "abort_after", "more": other keywords of async_generate}
OUT  {"started": s, "rounds": [[{"ids", "meta"} or {"error"}]], "seconds": [of each round], "cpu": [likewise], "info"}
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


async def one(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request after its delay; with ``abort_after`` the client leaves after that many streamed pieces."""
    await asyncio.sleep(request.get("delay", 0))
    rid = request.get("rid")
    prompt = {"prompt": request["text"]} if "text" in request else {"input_ids": request["ids"]}
    prompt |= request.get("more", {})
    if "abort_after" not in request:
        try:
            answer = await engine.async_generate(**prompt, sampling_params=request["params"])
        except ValueError as error:
            return {"error": str(error)}
        return {"ids": answer["output_ids"], "meta": answer["meta_info"], "text": answer.get("text")}
    pieces, last = 0, None
    stream = await engine.async_generate(**prompt, sampling_params=request["params"], stream=True, rid=rid)
    async for piece in stream:
        pieces, last = pieces + 1, piece
        if pieces == request["abort_after"]:
            engine.tokenizer_manager.abort_request(rid)
    return {"ids": last["output_ids"] if last else [], "meta": last["meta_info"] if last else {}, "aborted": True}


def break_package(patch_path: Path) -> None:
    """Put a fault of ``mutations/`` into the imported package: run the patched source in its module again."""
    from sglang_ddtree import patches, series

    patch = series.parse(patch_path.read_text(), patch_path.name)
    root = Path(series.__file__).resolve().parents[1]
    for path, text in series.run([patch], patches.reader(root)).items():
        if path.startswith(
            "sglang_ddtree/kernels/"
        ):  # Triton wants sources in files, and a CPU's engine uses none of it
            continue
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        exec(compile(str(text), path, "exec"), vars(module))


async def play(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(one(engine, request) for request in requests)))


def cpu_seconds() -> float:
    """What this process and its children have used; unlike the clock it does not count waiting for a busy machine."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def work(spec: dict[str, Any], out_path: Path) -> None:
    """One engine, from start to shutdown."""
    import sglang

    begin = time.monotonic()
    engine = sglang.Engine(**spec["engine"])
    out: dict[str, Any] = {"started": time.monotonic() - begin, "rounds": [], "seconds": [], "cpu": []}
    try:
        for block in spec["rounds"]:
            begin, used = time.monotonic(), cpu_seconds()
            out["rounds"].append(engine.loop.run_until_complete(play(engine, block["requests"])))
            out["seconds"].append(time.monotonic() - begin)
            out["cpu"].append(cpu_seconds() - used)
        # an idle scheduler counts its free slots and ends itself if one is missing; then nothing answers any more
        engine.loop.run_until_complete(asyncio.sleep(1.0))
        out["flushed"] = bool(engine.flush_cache().success)
        answer = engine.generate(
            input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        )
        out["alive"] = len(answer["output_ids"])
        info = engine.get_server_info()
        keys = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_ddtree_budget", "page_size")
        out["info"] = {key: info.get(key) for key in keys}
        out_path.write_text(json.dumps(out))
    finally:
        engine.shutdown()


def serve(flags: list[str]) -> None:
    """What ``python -m sglang.launch_server`` does, for flags with which it must not come up."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(flags))


def run(spec_path: Path, out_path: Path, log_path: Path, seconds: float) -> int:
    """Fork an engine and wait for it; its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            spec = json.loads(spec_path.read_text())
            os.environ.update(spec["env"])
            if spec.get("fault"):
                break_package(Path(spec["fault"]))
            if "flags" in spec["engine"]:
                serve(spec["engine"]["flags"])
            else:
                work(spec, out_path)
            status = 0
        except SystemExit as end:  # as the interpreter does at the top
            print(end.code, file=sys.stderr, flush=True)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            with log_path.open("a") as log:
                log.write(f"\nkilled after {seconds:.0f} s\n")
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the engine may have left
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only the answers go to the pipe
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for line in sys.stdin:
        spec, out, log, seconds = line.split()
        print(run(Path(spec), Path(out), Path(log), float(seconds)), file=answers, flush=True)


if __name__ == "__main__":
    main()
