"""The router's CPU kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.route_case import SCORES, Pair, check_route, large_and_small_logits, logits_of
from transom_kernels.route import Routing, route
from transom_kernels.route.cpu import TILE, route_cpu
from transom_kernels.route.op import route_reference


def check(x: torch.Tensor, weight: torch.Tensor, routing: Routing, **parts: Any) -> Pair:
    return check_route(route_cpu, x, weight, routing, **parts)


@pytest.mark.parametrize("tokens", [0, 1, TILE, TILE + 1])
@pytest.mark.parametrize(("width", "experts", "chosen"), [(1, 1, 1), (16, 16, 2), (77, 33, 4), (8, 5, 5), (300, 17, 1)])
def test_sizes(tokens: int, width: int, experts: int, chosen: int) -> None:
    x, weight, bias = torch.randn(tokens, width), torch.randn(experts, width), torch.randn(experts)
    for score, dtype in zip(SCORES, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True):
        check(x.to(dtype), weight, Routing(num_chosen=chosen, score=score), bias=bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalise", [False, True])
def test_corrections_and_scales(score: Any, normalise: bool) -> None:
    x, weight = torch.randn(9, 40).bfloat16(), torch.randn(20, 40) * 0.2
    routing = Routing(num_chosen=3, score=score, normalise=normalise, scale=2.5)
    for correction in (None, torch.randn(20)):
        check(x, weight, routing, correction=correction, expert_scale=torch.rand(20))


def test_equal_experts_are_chosen_in_their_order() -> None:
    x, weight = logits_of([1.0, 2.0, 2.0, 1.0, 2.0, 0.0] * 4, [0.0, -0.0, 0.0, -0.0, 0.0, 0.0] * 4)
    found, _ = check(x, weight, Routing(num_chosen=13))
    assert found.tolist() == [[1, 2, 4, 7, 8, 10, 13, 14, 16, 19, 20, 22, 0], list(range(13))]
    check(x, weight, Routing(num_chosen=6, score="sigmoid"), correction=torch.tensor([0.0, 1, 0, 1, 0, 1] * 4))


@pytest.mark.parametrize("score", SCORES)
def test_infinite_logits_and_nan(score: Any) -> None:
    x, weight, inf = torch.zeros(4, 3), torch.randn(5, 3), math.inf
    x[0, 0], x[1], x[2] = math.nan, inf, 1.0
    for bias in ([0.0, -inf, 2, -inf, 1], [-inf] * 5, [0.0, 1, math.nan, 2, inf]):
        check(x, weight, Routing(num_chosen=4, score=score), bias=torch.tensor(bias))
        correction = torch.tensor([0.0, math.nan, -inf, 3, inf])
        found, _ = route_cpu(x, weight, Routing(num_chosen=4, score=score), correction=correction)
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 5 for row in found.tolist())


@pytest.mark.parametrize("score", SCORES)
def test_scores_of_large_and_of_small_logits(score: Any) -> None:
    x, weight = large_and_small_logits()
    check(x, weight, Routing(num_chosen=4, score=score))
    check(x, weight, Routing(num_chosen=2, score=score, normalise=False))


def test_a_fixed_choice() -> None:
    x, weight, scale = torch.randn(5, 30), torch.randn(7, 30), torch.rand(7)
    chosen = torch.randint(0, 7, (5, 3))
    chosen[2] = 6
    check(x, weight, Routing(num_chosen=3, score="sqrt_softplus", scale=1.5), chosen=chosen, expert_scale=scale)


def test_rows_that_lie_apart() -> None:
    x, weight, routing = torch.randn(6, 90), torch.randn(12, 90), Routing(num_chosen=2)
    found = check(x[:, :70], weight[:, :70], routing)
    close = route(x[:, :70].contiguous(), weight[:, :70].contiguous(), routing)
    assert all(torch.equal(a, b) for a, b in zip(found, close, strict=True))
    for other in (route(x.T.contiguous().T, weight, routing), route(x, weight.T.contiguous().T, routing)):
        assert other[0].equal(route_reference(x, weight, routing)[0])


def test_a_token_does_not_depend_on_the_others_or_on_the_threads() -> None:
    x, weight, routing = torch.randn(TILE + 1, 300).bfloat16(), torch.randn(20, 300), Routing(num_chosen=3)
    together = route(x, weight, routing)
    for row in (0, TILE - 1, TILE):
        alone = route(x[row : row + 1], weight, routing)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))
    for num_threads in (1, 3):
        with kernel_threads(num_threads):
            assert all(torch.equal(a, b) for a, b in zip(route(x, weight, routing), together, strict=True))


def small_case() -> None:
    x, weight = torch.randn(TILE + 2, 35).bfloat16(), torch.randn(21, 35) * 0.2
    parts = {"correction": torch.randn(21), "expert_scale": torch.rand(21), "bias": torch.randn(21)}
    check(x, weight, Routing(num_chosen=4, score="sigmoid"), **parts)
