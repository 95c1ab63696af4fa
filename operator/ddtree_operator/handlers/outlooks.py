"""What an analysis can tell, worked out once for each spec and each pace that earlier analyses left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ddtree_operator.analysis.pace import Pace
from ddtree_operator.analysis.power import outlook, statement
from ddtree_operator.api.spec import AnalysisSpec
from ddtree_operator.core.facts import Problem, Revision

KEPT = 500  # resources

Said = tuple[str, Problem | None]


class Outlooks:
    """Keeps the last outlook of each resource: it takes a tenth of a second and more of a core."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], tuple[str, Said]] = {}

    async def of(self, key: tuple[str, str], spec: AnalysisSpec, pace: Pace | None, source: str) -> Said:
        """Pairs and time in words, or why no decision is possible."""
        inputs = f"{spec.model_dump_json()} {pace} {source}"
        known = self._said.get(key)
        if known is not None and known[0] == inputs:
            return known[1]
        said = await asyncio.to_thread(_work_out, spec, pace, source)
        if len(self._said) >= KEPT:
            self._said.clear()
        self._said[key] = (inputs, said)
        return said


def _work_out(spec: AnalysisSpec, pace: Pace | None, source: str) -> Said:
    try:
        found = outlook(spec, pace, source)
    except ValueError as error:
        return "", Problem("InvalidAnalysis", f"spec.canary.analysis: {error}")
    if found.problem:
        return "", Problem("Undecidable", found.problem)
    return statement(found), None


def pace_of(known: Iterable[Revision], stable: str, wanted: str) -> tuple[Pace | None, str]:
    """The pace to expect and where it is from: what was measured on the stable revision, else on the newest other."""
    order = sorted(known, key=lambda r: (r.hash == stable, r.hash != wanted, r.number), reverse=True)
    for revision in order:
        pace = Pace.from_dict(revision.summary.get("pace"))
        if pace is not None:
            return pace, f"measured over {pace.pairs} pairs of revision {revision.number}"
    return None, ""
