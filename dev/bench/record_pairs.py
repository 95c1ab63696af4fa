"""Pairs of real engines on the SmolLM2 pair, recorded as an analysis records them, for make bench-decisions.

usage: record_pairs.py OUT_FOLDER BASELINE CANARY SECONDS [TOKENS]     BASELINE, CANARY: plain | chain | tree
Writes smollm2-BASELINE-CANARY.jsonl.gz with as many pairs as fit into SECONDS. With BASELINE and CANARY alike one
engine is asked twice: pairs without any difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from ddtree_operator.analysis import Pair, Policy, Record, evaluate, record, shipped_prompts  # noqa: E402
from ddtree_operator.api.spec import AnalysisSpec  # noqa: E402
from ddtree_operator.probe import PairRunner, SGLangReader  # noqa: E402
from engine.fleet import environment, models, python, shadow  # noqa: E402

START = 300.0  # seconds an engine may take to start
SEED = 20261130
CONCURRENCY = 2  # cores that are used; an engine has one thread


def command(mode: str, port: int) -> list[str]:
    """The engine as the operator starts it."""
    folder = models("smollm2")
    drafter = ["--speculative-draft-model-path", str(folder / "drafter")]
    flags = {
        "plain": [],
        "chain": ["--speculative-algorithm", "DFLASH", *drafter],
        "tree": ["--speculative-algorithm", "DDTREE", *drafter, "--speculative-ddtree-budget", "15"],
    }[mode]
    base = [python(), "-m", "sglang.launch_server", "--model-path", str(folder / "target"), "--host", "127.0.0.1"]
    sizes = ["--max-total-tokens", "4096", "--max-running-requests", "4"]
    return [*base, "--port", str(port), "--enable-metrics", *sizes, *flags]


@contextlib.contextmanager
def engine(mode: str, log: Path) -> Iterator[str]:
    """Its address; the process ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment({"PYTHONPATH": shadow("patches/sglang-0.5.23"), "OMP_NUM_THREADS": "1"})
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(mode, port), env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def pairs(urls: list[str], seconds: float, tokens: int) -> list[Pair]:
    """Pairs until the time is up."""
    async with aiohttp.ClientSession() as session:
        end = time.monotonic() + START
        for url in urls:
            while not await SGLangReader(session, url).healthy():
                if time.monotonic() > end:
                    sys.exit(f"{url} is not up after {START:g} s; its log is in build")
                await asyncio.sleep(0.5)
        runner = PairRunner(
            session, urls[:1], urls[-1:], shipped_prompts("smollm2"), SEED, CONCURRENCY, tokens, warmup=1
        )
        found: list[Pair] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found += await runner.run(CONCURRENCY)
            print(f"\r{len(found)} pairs", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return found


def main(out: Path, baseline: str, canary: str, seconds: float, tokens: int) -> None:
    """Record, judge and write."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"smollm2-{baseline}-{canary}"
    logs = ROOT / "build"
    logs.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(engine(mode, logs / f"{name}-{mode}.log")) for mode in dict.fromkeys([baseline, canary])
        ]
        found = asyncio.run(pairs(urls, seconds, tokens))
    policy = Policy.from_spec(AnalysisSpec(), dtype="float32")
    verdict = evaluate(found, policy)
    notes = {
        "baseline": baseline,
        "canary": canary,
        "maxTokens": str(tokens),
        "concurrency": str(CONCURRENCY),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": "make record-pairs",
    }
    (out / f"{name}.jsonl.gz").write_bytes(record.dump(Record(policy, tuple(found), verdict, seed=SEED, notes=notes)))
    print(f"{name}: {verdict.outcome} after {len(found)} pairs: {verdict.reason}")


if __name__ == "__main__":
    if len(sys.argv) not in {5, 6}:
        sys.exit(__doc__)
    folder, base, other, limit, *more = sys.argv[1:]
    main(Path(folder), base, other, float(limit), int(more[0]) if more else 24)
