"""What an analysis can tell, worked out once for each spec and each pace that earlier analyses left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ddtree_operator.analysis.pace import Pace
from ddtree_operator.analysis.power import outlook, statement
from ddtree_operator.api.spec import AnalysisSpec
from ddtree_operator.core.facts import Problem, Revision

KEPT = 1000  # outlooks; many resources share one

Said = tuple[str, Problem | None]


class Outlooks:
    """Keeps what was worked out: it takes a tenth of a second and more of a core."""

    def __init__(self) -> None:
        self._said: dict[str, asyncio.Task[Said]] = {}  # latest used last

    async def of(self, spec: AnalysisSpec, pace: Pace | None, source: str) -> Said:
        """Pairs and time in words, or why no decision is possible."""
        inputs = f"{spec.model_dump_json()} {pace} {source}"
        known = self._said.pop(inputs, None)
        if known is None:
            known = asyncio.create_task(asyncio.to_thread(_work_out, spec, pace, source))
        while len(self._said) >= KEPT:
            del self._said[next(iter(self._said))]
        self._said[inputs] = known
        try:
            return await asyncio.shield(known)  # others may wait for it, too
        except Exception:
            self._said.pop(inputs, None)
            raise


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
