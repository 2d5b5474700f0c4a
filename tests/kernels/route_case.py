"""The tests that the router's CPU and Triton kernels share. A test module inherits `RouteTests` and gives the fixture `kernel`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transom_kernels.route import Routing
from transom_kernels.route.op import route_reference

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
Pair = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[..., Pair]


def check_route(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, routing: Routing, **parts: Any) -> Pair:
    """Chosen as by the reference and weighed alike; memory is NaN before."""
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        found, weights = kernel(x, weight, routing, **parts)
    finally:
        torch.use_deterministic_algorithms(False)
    wanted, shares = route_reference(x, weight, routing, **parts)
    assert found.equal(wanted)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, shares, atol=1e-6, rtol=1e-5, equal_nan=True)
    return found, weights


def logits_of(*rows: list[float]) -> Pair:
    """Inputs and weights whose logits are these, each a single product."""
    return torch.eye(len(rows)), torch.tensor(rows).T.contiguous()


class RouteTests:
    """Which experts are chosen where logits are equal, extreme or no numbers."""

    def test_equal_experts_are_chosen_in_their_order(self, kernel: Kernel) -> None:
        x, weight = logits_of([1.0, 2.0, 2.0, 1.0, 2.0, 0.0] * 4, [0.0, -0.0, 0.0, -0.0, 0.0, 0.0] * 4)
        found, _ = check_route(kernel, x, weight, Routing(num_chosen=13))
        assert found.tolist() == [[1, 2, 4, 7, 8, 10, 13, 14, 16, 19, 20, 22, 0], list(range(13))]
        correction = torch.tensor([0.0, 1, 0, 1, 0, 1] * 4)
        check_route(kernel, x, weight, Routing(num_chosen=6, score="sigmoid"), correction=correction)

    @pytest.mark.filterwarnings("ignore:(invalid|divide|overflow)")  # numpy's, in the interpreter
    @pytest.mark.parametrize("score", SCORES)
    def test_infinite_logits_and_nan_choose_experts_that_are_there(self, kernel: Kernel, score: Any) -> None:
        x, weight, inf = torch.zeros(4, 3), torch.randn(5, 3), math.inf
        x[0, 0], x[1], x[2] = math.nan, inf, 1.0
        routing, correction = Routing(num_chosen=4, score=score), torch.tensor([0.0, math.nan, -inf, 3, inf])
        for bias in ([0.0, -inf, 2, -inf, 1], [-inf] * 5, [0.0, 1, math.nan, 2, inf]):
            for corrected in (correction, None) if score == "softmax" else (correction,):
                found, _ = kernel(x, weight, routing, bias=torch.tensor(bias), correction=corrected)
                assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 5 for row in found.tolist())
            if score == "softmax":
                check_route(kernel, x[2:], weight, routing, bias=torch.tensor(bias))

    @pytest.mark.parametrize("score", SCORES)
    def test_scores_where_a_formula_overflows_or_cancels(self, kernel: Kernel, score: Any) -> None:
        x, weight = logits_of([-40.0, -20.0, -17.0, -9.0], [19.99, 20.01, 45.0, 88.0], [-1e-4, 0.0, 1e-4, 1.0])
        check_route(kernel, x, weight, Routing(num_chosen=4, score=score))
        check_route(kernel, x, weight, Routing(num_chosen=2, score=score, normalise=False))

    def test_a_fixed_choice(self, kernel: Kernel) -> None:
        x, weight, scale = torch.randn(5, 30), torch.randn(7, 30), torch.rand(7)
        chosen = torch.randint(0, 7, (5, 3))
        chosen[2] = 6
        routing = Routing(num_chosen=3, score="sqrt_softplus", scale=1.5)
        check_route(kernel, x, weight, routing, chosen=chosen, expert_scale=scale)
