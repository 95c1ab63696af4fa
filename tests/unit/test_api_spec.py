"""What the resource accepts and refuses, in its users' words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ddtree_operator.api.spec import DDTreeSpec

pytestmark = pytest.mark.unit


def spec(**more: Any) -> dict[str, Any]:
    return {"model": {"path": "/models/target"}, "drafter": {"path": "/models/drafter"}, **more}


def test_the_smallest_spec_has_a_model_and_a_drafter() -> None:
    parsed = DDTreeSpec.model_validate(spec())
    assert parsed.engine.speculative.algorithm == "DDTREE"
    assert [s.model_dump(exclude_none=True) for s in parsed.canary.steps] == [{"weight": 0}, {"analysis": {}}]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (spec(replica=2), "replica"),
        (spec(engine={"speculative": {"budget": 256}}), "255"),
        (spec(engine={"speculative": {"algorithm": "DFLASH", "budget": 8}}), "only for DDTREE"),
        (spec(engine={"image": "r/x@sha256:" + "0" * 64, "build": {}}), "both given"),
        ({"model": {"path": "/m"}}, "needs a drafter"),
        (spec(canary={"steps": [{"weight": 0}]}), "no analysis step"),
        (spec(canary={"steps": [{"weight": 0, "pause": {}}]}), "exactly one"),
        (spec(canary={"analysis": {"onInconclusive": "promote"}}), "needs onInconclusiveReason"),
    ],
)
def test_refusals_name_the_field(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DDTreeSpec.model_validate(bad)
