"""The router's CPU kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.route_case import SCORES, Kernel, RouteTests, check_route
from transom_kernels.route import Routing, route
from transom_kernels.route.cpu import TILE, route_cpu
from transom_kernels.route.op import route_reference


@pytest.fixture
def kernel() -> Kernel:
    return route_cpu


class TestRoute(RouteTests):
    """All of `RouteTests`."""


@pytest.mark.parametrize("tokens", [0, 1, TILE, TILE + 1])
@pytest.mark.parametrize(("width", "experts", "chosen"), [(1, 1, 1), (16, 16, 2), (77, 33, 4), (8, 5, 5), (300, 17, 1)])
def test_sizes(tokens: int, width: int, experts: int, chosen: int) -> None:
    x, weight, bias = torch.randn(tokens, width), torch.randn(experts, width), torch.randn(experts)
    for score, dtype in zip(SCORES, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True):
        routing = Routing(num_chosen=chosen, score=score)  # type: ignore[arg-type]
        check_route(route_cpu, x.to(dtype), weight, routing, bias=bias)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalise", [False, True])
def test_corrections_and_scales(score: Any, normalise: bool) -> None:
    x, weight = torch.randn(9, 40).bfloat16(), torch.randn(20, 40) * 0.2
    routing = Routing(num_chosen=3, score=score, normalise=normalise, scale=2.5)
    for correction in (None, torch.randn(20)):
        check_route(route_cpu, x, weight, routing, correction=correction, expert_scale=torch.rand(20))


def test_rows_that_lie_apart() -> None:
    x, weight, routing = torch.randn(6, 90), torch.randn(12, 90), Routing(num_chosen=2)
    found = check_route(route_cpu, x[:, :70], weight[:, :70], routing)
    close = route(x[:, :70].contiguous(), weight[:, :70].contiguous(), routing)
    assert all(torch.equal(a, b) for a, b in zip(found, close, strict=True))
    for other in (route(x.T.contiguous().T, weight, routing), route(x, weight.T.contiguous().T, routing)):
        assert other[0].equal(route_reference(x, weight, routing)[0])


def small_case() -> None:
    x, weight = torch.randn(TILE + 2, 35).bfloat16(), torch.randn(21, 35) * 0.2
    parts = {"correction": torch.randn(21), "expert_scale": torch.rand(21), "bias": torch.randn(21)}
    check_route(route_cpu, x, weight, Routing(num_chosen=4, score="sigmoid"), **parts)
