"""Faulty plugins on a GPU: each must be refused at start or write text that is plainly another. Writes one JSON file.

usage: mutants.py OUT.json --pair FOLDER --prompts IDS.json [--engine tree15] [--start SECONDS] [--faults NAME,...]

The faults are ``tests/engine/mutations``, the CPU tests' own. A plain engine, the sound plugin and every faulty one
start side by side, the faulty from copies of the package. Verdicts: ``refused`` (by the start-up check), ``text``
(parts from plain's text where plain's two best tokens are more than --gap apart, or hardly ever agrees), ``slower``
(same text, fewer accepted drafts: for a fault of the drafter), ``unnoticed``, and ``no verdict`` with the reason: an
engine that died of something else or was late proves nothing. Status 0 if the sound one serves and each fault has the
verdict it must have.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from engines import Child, came_up, engine_kwargs, read_prompts
from journal import Journal

from engine import summary

FAULTS = Path(__file__).resolve().parents[2] / "tests/engine/mutations"
sys.path.append(str(FAULTS))
from make import MUST  # noqa: E402

SEEN = [fault for fault, must in MUST.items() if must != "penalised"]  # without penalties in a request
REFUSAL = "ddtree: refused: the start-up check failed: "


def package() -> Path:
    """The folder of the sound plugin on this machine's path."""
    spec = importlib.util.find_spec("sglang_ddtree")
    if spec is None or not spec.origin:
        raise SystemExit("sglang_ddtree is not on PYTHONPATH")
    return Path(spec.origin).parent


def copy_with(fault: str, folder: Path) -> Path:
    """A copy of the package with the fault, in ``folder``. Ends the program if the patch does not apply."""
    from sglang_ddtree import patches, series

    sound = package()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder / "sglang_ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    try:
        patch = series.parse((FAULTS / f"{fault}.patch").read_text(), f"{fault}.patch")
        files = series.run([patch], patches.reader(sound.parent))
    except (OSError, series.PatchError) as error:
        raise SystemExit(f"{fault}: {error}; write the faults again: tests/engine/mutations/make.py") from None
    for path, text in files.items():
        assert text is not None
        (folder / path).write_text(text)
    return folder


def gaps(plain: Child, prompts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> list[float]:
    """How far plain's two best tokens are apart where ``got`` parts from ``want``, of every text that does."""
    probes = []
    for ids, a, b in zip(prompts, want, got, strict=True):
        if a != b:
            at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            probes.append(ids + a[:at])
    if not probes:
        return []
    return [abs(top[0][0] - top[1][0]) for top in plain.ask("gap", {"prompts": probes})["top"]]


def verdict(row: dict[str, Any], sound: dict[str, Any], gap: float) -> str:
    """Of an engine that serves, beside the sound plugin's row."""
    if row["largest gap"] > gap or row["equal"] < sound["equal"] / 2:
        return "text"
    return "slower" if row["accept"] < 0.9 * sound["accept"] else "unnoticed"


def main() -> int:
    """Command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("out", type=Path)
    ask.add_argument("--pair", type=Path, required=True)
    ask.add_argument("--prompts", type=Path, required=True)
    ask.add_argument("--engine", default="tree15", help="as in engine.py, options included")
    ask.add_argument("--faults", type=lambda s: s.split(","), default=SEEN)
    ask.add_argument("--dtype", default="bfloat16")
    ask.add_argument("--start", type=float, default=300, help="seconds all engines have to come up, together")
    ask.add_argument("--stagger", type=float, default=0.5)
    ask.add_argument("--count", type=int, default=24)
    ask.add_argument("--tokens", type=int, default=48)
    ask.add_argument("--gap", type=float, default=1.0, help="8 ulp of a bfloat16 logit of 16 to 32")
    args = ask.parse_args()
    if unknown := [fault for fault in args.faults if fault not in MUST]:
        print(f"unknown fault {unknown[0]!r}: {', '.join(MUST)}", file=sys.stderr)
        return 2
    prompts = read_prompts(args.prompts, args.pair)[: args.count]
    logs = args.out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    extra = {
        "dtype": args.dtype,
        "cuda_graph_bs_decode": [1, 2, 4],
        "max_running_requests": 4,
        "max_total_tokens": 4096,
    }
    kwargs = engine_kwargs(args.engine, args.pair, extra)
    plain_name = "+".join(["plain", *args.engine.split("+")[1:]])
    children = [
        Child(plain_name, engine_kwargs(plain_name, args.pair, extra), logs),
        Child(args.engine, kwargs, logs),
    ]
    try:
        for fault in args.faults:
            folder = copy_with(fault, logs / f"package-{fault}")
            children.append(Child(fault, kwargs, logs, path=folder))
            time.sleep(args.stagger)
        return judge(children, prompts, args)
    finally:
        for child in children:
            child.stop()


def judge(children: list[Child], prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Wait for the engines, ask those that serve, and write the verdicts."""
    plain, sound = children[0].name, children[1].name
    alive, failed = came_up(children, args.start)
    order = {"prompts": prompts, "concurrency": 4, "params": {"temperature": 0, "max_new_tokens": args.tokens}}
    bad = 0
    with Journal(args.out, {"command": " ".join(sys.argv), "engine": sound, "failed": failed}) as journal:
        journal.begin("mutants")
        if plain not in alive or sound not in alive:
            journal.put("error", "plain or the sound plugin does not serve, so nothing else can be judged")
            print("FAILED: plain or the sound plugin does not serve", flush=True)
            return 1
        want = alive[plain].ask("run", order)["outputs"]
        reference: dict[str, Any] = {}
        for child in children[1:]:
            row: dict[str, Any] = {"engine": child.name, "must": MUST.get(child.name, "serves")}
            if child.name in alive:
                try:
                    got = child.ask("run", order, 120)
                    apart = gaps(alive[plain], prompts, want, got["outputs"])
                    row |= {"equal": len(want) - len(apart), "of": len(want), "largest gap": max(apart, default=0.0)}
                    row |= summary(order, got)
                    reference = reference or row
                    row["verdict"] = "serves" if child.name == sound else verdict(row, reference, args.gap)
                    if child.name == sound and row["largest gap"] > args.gap:
                        row["verdict"] = "text"
                    if child.name != sound and f"package-{child.name}" not in child.plugin:
                        row |= {"verdict": "no verdict", "reason": f"the engine loaded {child.plugin}"}
                except RuntimeError as error:
                    row |= {"verdict": "no verdict", "reason": str(error)[-600:]}
            else:
                said = child.log.read_text(errors="replace")
                refused = [line for line in said.splitlines() if line.startswith(REFUSAL)]
                row |= {"verdict": "refused", "said": refused[0]} if refused else {
                    "verdict": "no verdict", "reason": failed[child.name][-600:]}  # fmt: skip
            bad += row["verdict"] != row["must"]
            journal.add("rows", row)
            mark = "  " if row["verdict"] == row["must"] else "! "
            print(mark + json.dumps({k: v for k, v in row.items() if k not in ("sha256", "seconds")}), flush=True)
            if child.name == sound and row["verdict"] != "serves":
                return 1
        journal.end()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
