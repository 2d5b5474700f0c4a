"""How clearly experts are chosen, measured."""

from __future__ import annotations

import math

import pytest
import torch

from tests.expert_choices import ExpertChoices, choice_margin


def test_the_closest_choice_of_all_rows() -> None:
    scores = torch.tensor([[0.5, 0.1, 0.4, 0.3], [0.2, 0.75, 0.25, 1.0]])
    assert choice_margin(scores, 2) == pytest.approx(0.1 / 0.5)
    assert choice_margin(scores, 3) == pytest.approx(0.05)


def test_a_tie_and_no_choice() -> None:
    assert choice_margin(torch.tensor([3.0, 1.0, 1.0]), 2) == 0
    assert choice_margin(torch.tensor([3.0, 1.0]), 2) == math.inf


def test_masked_scores_do_not_tie() -> None:
    assert choice_margin(torch.tensor([[2.0, -math.inf, -math.inf]]), 2) == math.inf
    assert choice_margin(torch.tensor([[2.0, 1.0, -math.inf]]), 2) == math.inf


def test_every_choice_of_a_pass_counts() -> None:
    with torch.inference_mode(), ExpertChoices() as choices:
        assert choices.margin == math.inf
        chosen = torch.tensor([1.0, 0.5, 0.25]).topk(1).indices
        torch.topk(torch.tensor([[1.0, 0.9, 0.25]]), 1, sorted=False)
    assert chosen.tolist() == [0]
    assert choices.margin == pytest.approx(0.1)
