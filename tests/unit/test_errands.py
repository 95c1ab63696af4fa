"""Slow questions are asked beside the work."""

from __future__ import annotations

import asyncio

import pytest

from ddtree_operator.handlers import errands as module
from ddtree_operator.handlers.errands import Errands, StillOutError

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]


class Question:
    """Answers when told to; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.asked += 1
        return await asyncio.shield(self.answer)


async def test_an_answer_in_time_is_handed_on() -> None:
    question = Question()
    question.answer.set_result("yes")
    assert await Errands().of("a", question) == "yes"


async def test_a_late_answer_comes_to_who_asks_again_and_is_asked_for_once() -> None:
    errands, question = Errands(0.01), Question()
    for _ in range(2):
        with pytest.raises(StillOutError):
            await errands.of("a", question)
    question.answer.set_result("yes")
    assert await errands.of("a", question) == "yes"
    assert question.asked == 1


async def test_while_a_new_answer_is_out_the_last_error_holds() -> None:
    errands, failing, question = Errands(0.01), Question(), Question()
    failing.answer.set_exception(OSError("down"))
    with pytest.raises(OSError, match="down"):
        await errands.of("a", failing)
    with pytest.raises(OSError, match="down"):
        await errands.of("a", question)
    question.answer.set_result("up")
    assert await errands.of("a", question) == "up"
    later = Question()
    with pytest.raises(StillOutError):
        await errands.of("a", later)


async def test_what_nobody_fetched_in_time_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    errands, old, new = Errands(0.01), Question(), Question()
    with pytest.raises(StillOutError):
        await errands.of("a", old)
    old.answer.set_result("old")
    await asyncio.sleep(0)
    new.answer.set_result("new")
    await asyncio.wait({asyncio.ensure_future(asyncio.shield(old.answer))})
    await asyncio.sleep(0)
    monkeypatch.setattr(module, "OLD", -1.0)
    assert await errands.of("a", new) == "new"
