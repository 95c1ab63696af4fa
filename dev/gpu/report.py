# ruff: noqa: E501 (tables are printed in one piece)
"""Tables and a picture from the runs of gpu-engine.json or gpu-load.json.

usage: report.py FILE.json [PICTURE.svg]

tree3/4 is a tree of 3 nodes whose drafter drafts 4 positions, root included. Only engines of one run are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from math import comb
from pathlib import Path
from typing import Any

ORDER = (
    "plain",
    "chain3",
    "chain4",
    "chain8",
    "chain16",
    "tree2/3",
    "tree3",
    "tree3/4",
    "tree3/8",
    "tree5/6",
    "tree7",
    "tree7/8",
    "tree15",
    "tree15/8",
    "tree31",
    "tree63",
    "tree127",
)
COLOURS = {
    "plain": "#888888", "chain3": "#f5cba7", "chain4": "#f0b080", "chain8": "#e08030", "chain16": "#a04000",
    "tree2/3": "#d4e9d4", "tree3": "#9fc5e8", "tree3/4": "#a9d8a9", "tree3/8": "#8cc98c", "tree5/6": "#66b266", "tree7": "#5b9bd5",
    "tree7/8": "#3a923a", "tree15": "#1f6fb5", "tree15/8": "#1e6b1e", "tree31": "#134a80", "tree63": "#0a2540", "tree127": "#000000",
}  # fmt: skip

Runs = dict[int, dict[str, dict[int, dict[str, Any]]]]


def grouped(raw: list[dict[str, Any]]) -> Runs:
    """concurrency → engine → repeat → run."""
    out: Runs = {}
    for run in raw:
        out.setdefault(run["concurrency"], {}).setdefault(run["engine"], {})[run["repeat"]] = run
    return out


def against(mine: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Paired by repeat: median ratio of tok/s, wins, and the one-sided sign test's p."""
    ratios = [mine[i]["tok_s"] / other[i]["tok_s"] for i in sorted(set(mine) & set(other))]
    wins, n = sum(r > 1 for r in ratios), len(ratios)
    return {"ratio": round(statistics.median(ratios), 3), "wins": wins, "pairs": n,
            "p": round(sum(comb(n, k) for k in range(wins, n + 1)) / 2**n, 4)}  # fmt: skip


def median(runs: dict[int, dict[str, Any]], key: str) -> float:
    """Of all repeats."""
    return statistics.median(r[key] for r in runs.values())


def table(runs: Runs) -> str:
    """tok/s, accept length, ITL p50 and p99 of every engine and concurrency, in Markdown."""
    names = [n for n in ORDER if any(n in engines for engines in runs.values())]
    lines = ["| concurrency | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for concurrency, engines in sorted(runs.items()):
        cells = []
        for n in names:
            if n not in engines:
                cells.append("–")
                continue
            mine = engines[n]
            cells.append(
                f"{median(mine, 'tok_s'):.0f}<br>{median(mine, 'itl_p50'):.1f} / {median(mine, 'itl_p99'):.0f}"
            )
        lines.append(f"| {concurrency} ({len(next(iter(engines.values())))} runs) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def base_of(engines: dict[str, dict[int, dict[str, Any]]]) -> str:
    """The fastest chain of a run."""
    return max((n for n in engines if n.startswith("chain")), key=lambda n: median(engines[n], "tok_s"))


def picture(tables: dict[str, Runs]) -> str:
    """Bars of tok/s over the best chain's of the same run, a group a run and concurrency."""
    bar, gap, height, top = 13, 26, 260, 40
    x, parts = 50.0, []
    scale = height / 1.8
    groups = [(c, name, engines) for name, runs in tables.items() for c, engines in runs.items()]
    for concurrency, name, engines in sorted(groups, key=lambda g: (g[0], g[1])):
        base, begin = base_of(engines), x
        for n in ORDER:
            if n in engines:
                value = median(engines[n], "tok_s") / median(engines[base], "tok_s")
                parts.append(
                    f'<rect x="{x:.0f}" y="{top + height - value * scale:.1f}" width="{bar - 2}" height="{value * scale:.1f}" fill="{COLOURS[n]}"/>'
                )
                x += bar
        middle = f'x="{(begin + x) / 2:.0f}" text-anchor="middle"'
        parts.append(f'<text {middle} y="{top + height + 16}">{concurrency}</text>')
        if len(tables) > 1:
            parts.append(f'<text {middle} y="{top + height + 30}" font-size="9">{name}</text>')
        x += gap
    for mark in (0.5, 1.0, 1.5):
        y = top + height - mark * scale
        parts.append(
            f'<line x1="44" x2="{x - gap:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#999" stroke-width="0.6"/><text x="40" y="{y + 4:.1f}" text-anchor="end">{mark}</text>'
        )
    legend = [n for n in ORDER if any(n in engines for _, _, engines in groups)]
    for i, n in enumerate(legend):
        parts.append(
            f'<rect x="{50 + i * 74}" y="{top + height + 44}" width="11" height="11" fill="{COLOURS[n]}"/><text x="{65 + i * 74}" y="{top + height + 54}">{n}</text>'
        )
    title = '<text x="44" y="20">tok/s over the best chain of the same run, by concurrency; 8B shape, the engines of a run on one H200</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(x, 60 + len(legend) * 74):.0f} {top + height + 66}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{title}{"".join(parts)}</svg>\n')  # fmt: skip


def main() -> int:
    """Command line."""
    if len(sys.argv) < 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    raw = json.loads(Path(sys.argv[1]).read_text())["raw"]
    sources = {"": raw} if "speed" in raw else {n: r for n, r in raw.items() if "speed" in r}
    tables = {name: grouped(source["speed"]) for name, source in sources.items()}
    for name, runs in tables.items():
        print(f"{name}\n{table(runs)}" if name else table(runs))
        for concurrency, engines in sorted(runs.items()):
            best = base_of(engines)
            for mine in (n for n in ORDER if n in engines and n.startswith("tree")):
                for other in (n for n in ORDER if n in engines and n.startswith("chain")):
                    ratio = against(engines[mine], engines[other])
                    print(f"concurrency {concurrency}: {mine} over {other}{' (best)' * (other == best)}: {ratio}")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(picture(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
