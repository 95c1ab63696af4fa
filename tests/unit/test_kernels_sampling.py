"""Draws of a tree's tokens where probabilities are no numbers: some token comes, and nothing raises."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="sampling needs torch: run `make test-kernels`")

from sglang_ddtree.sampling import draw, numbers  # noqa: E402

pytestmark = pytest.mark.unit
VOCAB = 50


def rows() -> torch.Tensor:
    """Softmax of scores: sound, with an infinite one, with none that is possible, with one that is no number."""
    scores = torch.zeros(4, VOCAB)
    scores[0, 7] = 100.0
    scores[1, 3] = float("inf")
    scores[2] = float("-inf")
    scores[3, 9] = float("nan")
    return scores.softmax(-1)


def test_rows_without_numbers_are_drawn_from_too() -> None:
    with pytest.raises(RuntimeError):
        torch.multinomial(rows(), 1)
    drawn = draw(rows())
    assert drawn[0] == 7
    assert ((drawn >= 0) & (drawn < VOCAB)).all()


def test_rows_become_weights() -> None:
    got = numbers(rows())
    assert torch.equal(got[0], rows()[0])
    assert torch.equal(got[1:], torch.ones(3, VOCAB))
    assert torch.multinomial(got, 1).shape == (4, 1)


def test_draws_have_the_odds_of_the_weights() -> None:
    torch.manual_seed(1)
    odds = torch.tensor([0.5, 0.3, 0.0, 0.2])
    count = torch.bincount(draw(odds.repeat(40_000, 1)), minlength=4) / 40_000
    assert torch.allclose(count, odds, atol=0.015)  # 6 standard deviations
    assert count[2] == 0
