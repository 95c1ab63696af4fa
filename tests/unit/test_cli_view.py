"""What people read, to the letter."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ddtreectl import output, view
from ddtreectl.exits import Exit
from unit.ddt_fake import analyzing, resource, rolled_back, stable

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)

ROLLOUT = """\
qwen3-8b in namespace llm
  phase     Analyzing   throughput: not yet told from -5.0%
  step      3/7 analysis   weight 0%   started 12m ago
  stable    3f2a1b9c0d   DFLASH   accept length 2.11   engine@ab12cd34ef56
  canary    8c1d2e3f40   DDTREE/64   engine@ab12cd34ef56
  baseline  3f2a1b9c0d   stable
  ready     4/4 engines serve
  blocked   77aa88bb99   3h ago   parity

METRIC            BASELINE   CANARY   DIFFERENCE      INTERVAL           NEEDS         PAIRS   OUTCOME
acceptLength      2.11       2.65     +25.6%          +20.1% to +31.0%   above -3.0%   34      pass
throughput        41.20      44.00    +6.8%           -8.0% to any       above -5.0%   34      not yet
parity            34         34       0 unexplained                      at most 0     34      pass
prometheus/ttft              0.31                                        at most 0.8           pass
verdict: not yet (34 pairs, 1 unusable): not yet"""


def test_rollout() -> None:
    assert view.rollout(analyzing(), color=False, now=NOW) == ROLLOUT


def test_listing() -> None:
    assert view.listing([analyzing(), resource("new", observed=None)], False, False, False, NOW) == (
        "NAME       PHASE       STABLE       CANARY       STEP           ACCEPT   READY   AGE\n"
        "qwen3-8b   Analyzing   3f2a1b9c0d   8c1d2e3f40   3/7 analysis   2.11     4/4     2h\n"
        "new                                                                      0/4     2h"
    )


def test_listing_of_every_namespace_and_wide() -> None:
    lines = view.listing([stable()], True, True, False, NOW).splitlines()
    assert lines[0].startswith("NAMESPACE   NAME")
    assert lines[1].startswith("llm         qwen3-8b")
    assert lines[1].endswith("4/4 engines ready")


def test_history() -> None:
    assert view.history(rolled_back(), False, NOW).splitlines()[:3] == [
        "NUMBER   REVISION     RESULT       ALGORITHM    ACCEPT   TOK/S   AGE   BY         REASON",
        "1        3f2a1b9c0d   promoted     DFLASH       2.11     41.20   1d    operator   every step passed",
        "2        77aa88bb99   rolledBack   DDTREE/128                    3h    operator   "
        "analysis failed: parity: 3 of 40 outputs differ",
    ]


def test_nodes() -> None:
    fits = {"name": "a", "fits": True, "free": 3, "product": "NVIDIA-H200"}
    obj = resource(nodes=[fits, {"name": "b", "fits": False, "reason": "product NVIDIA-L4"}])
    assert view.nodes(obj, False).splitlines() == [
        "NODE   FITS   FREE   PRODUCT       REASON",
        "a      yes    3      NVIDIA-H200",
        "b      no                          product NVIDIA-L4",
    ]


def test_colour_does_not_shift_columns() -> None:
    import re

    plain = view.rollout(analyzing(), color=False, now=NOW)
    coloured = view.rollout(analyzing(), color=True, now=NOW)
    assert coloured != plain
    assert re.sub(r"\033\[\d+m", "", coloured) == plain


@pytest.mark.parametrize(
    ("obj", "code", "words"),
    [
        (stable(), Exit.DONE, "qwen3-8b: Stable, 4/4 engines ready"),
        (stable(observed=2), Exit.GOING, "has not looked at this spec yet"),
        (resource(observed=None), Exit.GOING, "has not looked at this spec yet"),
        (analyzing(), Exit.GOING, "Analyzing"),
        (analyzing(phase="Paused"), Exit.GOING, "Paused"),
        (rolled_back(), Exit.ROLLED_BACK, "analysis failed"),
        (rolled_back(observed=2), Exit.GOING, "has not looked"),
        (resource(phase="Invalid", message="spec.x: unknown field"), Exit.ERROR, "spec.x: unknown field"),
        (resource(phase="Degraded"), Exit.ERROR, "Degraded"),
        (resource(phase="SomethingNew"), Exit.GOING, "SomethingNew"),
    ],
)
def test_outcome(obj: dict[str, Any], code: Exit, words: str) -> None:
    found, sentence = view.outcome(obj)
    assert found == code
    assert words in sentence


def test_a_status_of_another_version_does_not_break_the_view() -> None:
    obj = resource(phase="Analyzing", analysis={"metrics": [{}, {"metric": "new", "estimate": None}]}, canary=None)
    assert "Analyzing" in view.rollout(obj, False, NOW)
    obj["status"] = None
    assert "Pending" in view.rollout(obj, False, NOW)


@pytest.mark.parametrize(("wanted", "number"), [(None, 3), ("2", 2), ("77aa", 2), ("3f2a1b9c0d", 1), ("9", None)])
def test_finding_a_revision(wanted: str | None, number: int | None) -> None:
    entry = view.find_entry(analyzing(), wanted)
    assert (entry or {}).get("number") == number


@pytest.mark.parametrize(
    ("stamp", "shown"),
    [
        ("2026-11-29T11:59:15Z", "45s"),
        ("2026-11-29T11:10:00Z", "50m"),
        ("2026-11-29T11:00:00Z", "60m"),
        ("2026-11-28T11:00:00Z", "1d"),
        ("2026-11-29T12:00:05Z", "0s"),
        (None, ""),
    ],
)
def test_ages(stamp: str | None, shown: str) -> None:
    assert output.age(stamp, NOW) == shown


def test_one_entry_of_the_history_says_everything() -> None:
    entry = {
        "number": 7,
        "revision": "8c1d2e3f40",
        "result": "rolledBack",
        "cause": "alert",
        "by": "alert DDTreeAcceptLengthLow",
        "wentBackTo": "3f2a1b9c0d",
        "verdictDigest": "sha256:12",
        "alert": {"name": "DDTreeAcceptLengthLow", "startsAt": "2026-11-30T01:00:00Z", "labels": {"b": "2", "a": "1"}},
        "log": [{"at": "2026-11-30T01:00:05Z", "by": "ann", "verb": "promote", "text": "step 3 (pause) passed over"}],
    }
    assert view.history_entry(entry).splitlines() == [
        "number        7",
        "revision      8c1d2e3f40",
        "result        rolledBack",
        "cause         alert",
        "by            alert DDTreeAcceptLengthLow",
        "verdict       sha256:12",
        "went back to  3f2a1b9c0d",
        "alert         DDTreeAcceptLengthLow, since 2026-11-30T01:00:00Z",
        "              a=1, b=2",
        "log           2026-11-30T01:00:05Z  ann: step 3 (pause) passed over",
    ]
    assert view.history_entry({}) == ""
