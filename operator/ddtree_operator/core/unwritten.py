"""What the status says when the API server does not take what the operator writes: who reads it has to know.

The rest of the status stays as it was written before, since what was decided has not been done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree_operator.api.status import ConditionType, Phase
from ddtree_operator.core.report import condition, stamp
from ddtree_operator.core.units import clip

CONFLICTS = 25  # looks in a row that a conflict ended: as many are not chance


@dataclass(frozen=True, slots=True)
class Refusal:
    """A write that was refused."""

    code: int  # HTTP
    verb: str  # as RBAC names it
    resource: str  # plural, with its subresource
    words: str  # the API server's
    times: int = 1  # looks in a row that ended so

    @property
    def reason(self) -> str:
        """One word for it; "" for what is no news: a few conflicts, and what heals by itself."""
        known = {403: "Forbidden", 422: "Refused", 409: "Conflicts" if self.times >= CONFLICTS else ""}
        return known.get(self.code, "")

    @property
    def sentence(self) -> str:
        """What was refused, and what helps."""
        what = f"{self.verb} {self.resource}".strip() or "go on"
        if self.code == 403:
            return clip(f"the operator may not {what}: {self.words}; give its Role that right, or see to the namespace")
        if self.code == 409:
            why = ", since somebody else changes it" if self.verb else ""  # else a check of the operator's own
            return clip(f"the operator cannot {what}{why}, {CONFLICTS} times in a row and more: {self.words}")
        return clip(f"the API server refuses what the operator would write ({what}): {self.words}")


def told(old: dict[str, Any], refusal: Refusal, now: float, generation: int) -> dict[str, Any]:
    """The status that was written, with the refusal in it. ``generation`` is the resource's."""
    kept = cleared(old)
    bad = condition(ConditionType.WRITTEN, "False", refusal.reason, refusal.sentence)
    conditions = kept.get("conditions", []) + stamp([bad], old.get("conditions", []), now, generation)
    return {"phase": str(Phase.PENDING), **kept, "message": refusal.sentence, "conditions": conditions}


def cleared(status: dict[str, Any]) -> dict[str, Any]:
    """A status without what :func:`told` said, as long as nothing is refused."""
    conditions = [c for c in status.get("conditions", []) if c.get("type") != ConditionType.WRITTEN]
    return {**status, "conditions": conditions} if "conditions" in status else status
