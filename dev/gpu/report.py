# ruff: noqa: E501 (tables are printed in one piece)
"""Tables and a picture from the runs of gpu-engine.json.

usage: report.py gpu-engine.json [PICTURE.svg]
"""

from __future__ import annotations

import json
import statistics
import sys
from math import comb
from pathlib import Path
from typing import Any

ORDER = ("plain", "chain4", "chain8", "chain16", "tree3", "tree7", "tree15", "tree31", "tree63")
COLOURS = {"plain": "#888888", "chain4": "#f0b080", "chain8": "#e08030", "chain16": "#a04000", "tree3": "#9fc5e8", "tree7": "#5b9bd5", "tree15": "#1f6fb5", "tree31": "#134a80", "tree63": "#0a2540"}  # fmt: skip

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


def picture(runs: Runs) -> str:
    """Bars of tok/s over the 16 wide chain's (at 64, the best chain's), a group a concurrency."""
    bar, gap, height, top = 13, 26, 260, 40
    x, parts = 50.0, []
    scale = height / 1.7
    for concurrency, engines in sorted(runs.items()):
        chains = [n for n in engines if n.startswith("chain")]
        base = "chain16" if "chain16" in engines else max(chains, key=lambda n: median(engines[n], "tok_s"))
        begin = x
        for n in ORDER:
            if n in engines and n != "plain":
                value = median(engines[n], "tok_s") / median(engines[base], "tok_s")
                parts.append(
                    f'<rect x="{x:.0f}" y="{top + height - value * scale:.1f}" width="{bar - 2}" height="{value * scale:.1f}" fill="{COLOURS[n]}"/>'
                )
                x += bar
        parts.append(
            f'<text x="{(begin + x) / 2:.0f}" y="{top + height + 16}" text-anchor="middle">{concurrency}</text>'
        )
        x += gap
    for mark in (0.5, 1.0, 1.5):
        y = top + height - mark * scale
        parts.append(
            f'<line x1="44" x2="{x - gap:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#999" stroke-width="0.6"/><text x="40" y="{y + 4:.1f}" text-anchor="end">{mark}</text>'
        )
    legend = [n for n in ORDER if n != "plain" and any(n in e for e in runs.values())]
    for i, n in enumerate(legend):
        parts.append(
            f'<rect x="{50 + i * 74}" y="{top + height + 44}" width="11" height="11" fill="{COLOURS[n]}"/><text x="{65 + i * 74}" y="{top + height + 54}">{n}</text>'
        )
    title = '<text x="44" y="20">tok/s over the chain of width 16 (at 64: over the best chain), by concurrency; 8B shape, one H200</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(x, 60 + len(legend) * 74):.0f} {top + height + 66}" '
            f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{title}{"".join(parts)}</svg>\n')  # fmt: skip


def main() -> int:
    """Command line."""
    if len(sys.argv) < 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    runs = grouped(json.loads(Path(sys.argv[1]).read_text())["raw"]["speed"])
    print(table(runs))
    for concurrency, engines in sorted(runs.items()):
        for mine, other in (("tree15", "chain16"), ("tree7", "chain8"), ("tree3", "chain4"), ("tree63", "chain16")):
            if mine in engines and other in engines:
                print(f"concurrency {concurrency}: {mine} over {other}: {against(engines[mine], engines[other])}")
        chains = [n for n in engines if n.startswith("chain")]
        trees = [n for n in engines if n.startswith("tree")]
        best, tree = (max(names, key=lambda n: median(engines[n], "tok_s")) for names in (chains, trees))
        print(
            f"concurrency {concurrency}: best tree {tree} over best chain {best}: {against(engines[tree], engines[best])}"
        )
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(picture(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
