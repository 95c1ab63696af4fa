"""Engine processes on a GPU: which ones, by name, and how they are started, asked and ended."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMON: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
    "skip_tokenizer_init": True,
    "context_length": 2048,
    "mem_fraction_static": 0.95,
    "sleep_on_idle": True,
    "log_level": "info",
    "random_seed": 0,
}

# Tokens of a prefill graph. SGLang runs a prefill without a graph where padding would more than double it, so a prompt
# of which the radix cache has all but the last token needs a graph of 1 or 2.
PREFILL_GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024]


def engine_kwargs(name: str, pair: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Engine keywords of a name: plain, chain16, tree63, tree63+nooverlap, tree63+nograph, tree15+page16, tree15+stock,
    chain16+fa3+pg, plain+tp2, tree3+b4."""
    kind, *options = name.split("+")
    out = COMMON | extra | {"model_path": str(pair / "target")}
    if kind.startswith("chain"):
        out |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(pair / "drafter")}
        out["speculative_num_draft_tokens"] = int(kind[5:])
    elif kind.startswith("tree"):
        out |= {"speculative_algorithm": "DDTREE", "speculative_draft_model_path": str(pair / "drafter")}
        out["speculative_ddtree_budget"] = int(kind[4:])
    elif kind != "plain":
        raise SystemExit(f"unknown engine {name!r}: plain, chainWIDTH or treeBUDGET")
    for option in options:
        if option == "nooverlap":
            out["disable_overlap_schedule"] = True
        elif option == "nograph":
            out |= {"disable_decode_cuda_graph": True}
        elif option.startswith("page"):
            out["page_size"] = int(option[4:])
        elif option == "fa3":
            out["attention_backend"] = "fa3"
        elif option == "pg":  # CUDA graphs for prefill, as SGLang has them by default, for few sizes
            del out["disable_prefill_cuda_graph"]
            out["cuda_graph_bs_prefill"] = PREFILL_GRAPHS
        elif option == "pf":  # one graph a prefill in place of one a layer
            del out["disable_prefill_cuda_graph"]
            out |= {"cuda_graph_bs_prefill": PREFILL_GRAPHS, "cuda_graph_backend_prefill": "full"}
        elif option[0] == "b" and option[1:].isdigit():  # the drafter drafts fewer positions than it was trained for
            out["speculative_dflash_block_size"] = int(option[1:])
        elif option == "grammar":  # needs the target's tokenizer
            out |= {"grammar_backend": "xgrammar", "skip_tokenizer_init": False}
        elif option.startswith("tp"):
            out["tp_size"] = int(option[2:])
        elif option in ("spine", "stock"):
            pass  # an environment variable, see Child
        else:
            raise SystemExit(f"unknown engine option {option!r}")
    return out


class Child:
    """One engine process. ``path``: a folder whose packages come before the installed ones."""

    def __init__(self, name: str, kwargs: dict[str, Any], logs: Path, path: Path | None = None) -> None:
        self.name = name
        self.plugin = ""  # the file of the plugin that a started engine has loaded
        spec = logs / f"{name}.json"
        spec.write_text(json.dumps(kwargs))
        self.log = logs / f"{name}.log"
        read, write = os.pipe()
        environment = dict(os.environ)
        if path is not None:
            environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        if "+spine" in name:
            environment["SGLANG_DDTREE_SPINE"] = "1"
        if "+stock" in name:
            environment["SGLANG_DDTREE_ATTENTION"] = "stock"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                # -P: this folder has a kernels.py, and Transformers would take it for the package of that name
                [sys.executable, "-P", str(HERE / "child.py"), str(write), str(spec)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=environment,
                text=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer; an error with the log's end if there is none in time."""
        ready, _, _ = select.select([self._answers], [], [], timeout)
        line = self._answers.readline() if ready else ""
        if not line:
            tail = self.log.read_text(errors="replace")[-1500:]
            return {"error": f"{self.name}: {'died' if ready else f'no answer in {timeout:.0f} s'}\n{tail}"}
        got: dict[str, Any] = json.loads(line)
        if "error" in got:
            got["error"] += "\n" + self.log.read_text(errors="replace")[-1500:]
        return got

    def ask(self, command: str, order: dict[str, Any], timeout: float = 300) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises RuntimeError with the reason if it fails."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({command: order}) + "\n")
        self.process.stdin.flush()
        got = self.answer(timeout)
        if "error" in got:
            raise RuntimeError(f"{self.name}: {got['error']}")
        return got

    def stop(self) -> None:
        """End the engine; its own children end with it."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()


def start(
    names: list[str], pair: Path, extra: dict[str, Any], logs: Path, timeout: float, stagger: float
) -> tuple[dict[str, Child], dict[str, str]]:
    """Start engines side by side: those that came up, and of the others the end of what they said."""
    children: list[Child] = []
    try:
        for name in names:
            children.append(Child(name, engine_kwargs(name, pair, extra), logs))
            time.sleep(stagger)
        return came_up(children, timeout)
    except BaseException:
        for child in children:
            child.stop()
        raise


def came_up(children: list[Child], timeout: float) -> tuple[dict[str, Child], dict[str, str]]:
    """Wait for engines that are starting; those that fail or are late are ended."""
    alive, failed = {}, {}
    deadline = time.monotonic() + timeout
    for child in children:
        got = child.answer(max(1.0, deadline - time.monotonic()))
        if "error" in got:
            failed[child.name] = got["error"][-1200:]
            print(f"FAILED {child.name}: {failed[child.name]}", flush=True)
            child.stop()
        else:
            print(f"started {child.name} in {got['started']:.0f} s", flush=True)
            child.plugin = str(got["plugin"])
            alive[child.name] = child
    return alive, failed


def read_prompts(path: Path, pair: Path) -> list[list[int]]:
    """Token ids from a JSON list, or from the "text" of JSON lines by the target's tokenizer; in a fixed order."""
    if path.suffix != ".jsonl":
        ids: list[list[int]] = json.loads(path.read_text())
        return ids
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines() if line.strip()]
    random.Random(3).shuffle(texts)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
