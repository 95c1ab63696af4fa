"""The interval of a metric over pairs against its threshold: as SVG, and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ddtree_operator.analysis.types import MetricVerdict, Verdict

WIDTH, HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 40
_COLOURS = {"pass": "#1a7f37", "fail": "#cf222e", "notYet": "#6e7781"}


def metric_series(verdicts: Sequence[Verdict], metric: str) -> list[MetricVerdict]:
    """One metric of growing verdicts (see ``record.timeline``). Raises ValueError for an unknown metric."""
    series = [m for v in verdicts for m in v.metrics if m.metric == metric]
    if not series:
        known = sorted({m.metric for v in verdicts for m in v.metrics})
        raise ValueError(f"no metric {metric!r} in the record; there are: {', '.join(known) or 'none'}")
    return series


def svg(series: Sequence[MetricVerdict], title: str) -> str:
    """A picture of WIDTH x HEIGHT: interval as a band, estimate as a line, threshold dashed. No outside references."""
    bottom, top = _range(series)
    last = max(m.pairs for m in series) or 1

    def x(pairs: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * pairs / last

    def y(value: float) -> float:
        share = (min(max(value, bottom), top) - bottom) / (top - bottom)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    upper = [f"{x(m.pairs):.1f},{y(m.high):.1f}" for m in series]
    lower = [f"{x(m.pairs):.1f},{y(m.low):.1f}" for m in series]
    middle = [f"{x(m.pairs):.1f},{y(m.estimate):.1f}" for m in series if m.pairs]
    colour = _COLOURS[str(series[-1].outcome)]
    threshold = series[-1].threshold
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for value in _ticks(bottom, top):
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:+.0%}</text>')
    for pairs in sorted({0, last // 2, last}):
        parts.append(f'<text x="{x(pairs):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{pairs}</text>')
    parts += [
        f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{colour}" fill-opacity="0.18"/>',
        f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(threshold):.1f}" y2="{y(threshold):.1f}" '
        'stroke="#0b1f33" stroke-dasharray="6 4"/>',
        f'<text x="{WIDTH - _RIGHT}" y="{y(threshold) - 5:.1f}" text-anchor="end">threshold {threshold:+.1%}</text>',
        f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">pairs</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def sheet(pictures: Sequence[tuple[Sequence[MetricVerdict], str]]) -> str:
    """Several pictures (series, title), one below the other, as one SVG."""
    parts = []
    for i, (series, title) in enumerate(pictures):
        place = f'<svg y="{i * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(svg(series, title).replace("<svg ", place, 1))
    height = HEIGHT * len(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(series: Sequence[MetricVerdict], width: int = 72, height: int = 14) -> str:
    """The same in characters: │ interval, ● estimate, ┄ threshold (┼ inside the interval).

    ``width``: columns besides the axis labels.
    """
    bottom, top = _range(series)
    last = max(m.pairs for m in series) or 1
    threshold = series[-1].threshold

    def row(value: float) -> int:
        share = (min(max(value, bottom), top) - bottom) / (top - bottom)
        return round((height - 1) * (1 - share))

    grid = [[" "] * width for _ in range(height)]
    grid[row(threshold)] = ["┄"] * width
    for column in range(width):
        reached = [m for m in series if m.pairs * width >= column * last and m.pairs]
        if reached:
            m = reached[0]
            for r in range(row(m.high), row(m.low) + 1):
                grid[r][column] = "┼" if r == row(threshold) else "│"
            grid[row(m.estimate)][column] = "●"
    labels = {row(top): top, row(bottom): bottom, row(threshold): threshold}
    lines = [f"{labels[r]:+8.1%} " if r in labels else " " * 9 for r in range(height)]
    axis = " " * 9 + "0" + f"{last} pairs".rjust(width - 1)
    return "\n".join([label + "".join(cells).rstrip() for label, cells in zip(lines, grid, strict=True)] + [axis])


def _range(series: Sequence[MetricVerdict]) -> tuple[float, float]:
    """Bottom and top of the picture: estimates, threshold, and the last interval with some room."""
    values = [m.estimate for m in series if m.pairs] + [series[-1].threshold]
    values += [v for v in (series[-1].low, series[-1].high) if -1 < v < 5]
    low, high = min(values), max(values)
    room = max(0.05, (high - low) * 0.25)
    return max(-1.0, low - room), high + room


def _ticks(bottom: float, top: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10((top - bottom) / 3))
    step *= next(k for k in (1, 2, 5, 10) if (top - bottom) / (step * k) <= 6)
    first = math.ceil(bottom / step)
    return [k * step for k in range(first, math.floor(top / step) + 1)]
