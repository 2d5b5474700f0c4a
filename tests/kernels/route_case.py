"""What the tests of the router's CPU and Triton kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transom_kernels.route import Routing
from transom_kernels.route.op import route_reference

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
Pair = tuple[torch.Tensor, torch.Tensor]


def check_route(
    kernel: Callable[..., Pair], x: torch.Tensor, weight: torch.Tensor, routing: Routing, **parts: Any
) -> Pair:
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


def large_and_small_logits() -> Pair:
    """Inputs and weights of logits where a score's formula overflows or cancels."""
    return logits_of([-40.0, -20.0, -17.0, -9.0], [19.99, 20.01, 45.0, 88.0], [-1e-4, 0.0, 1e-4, 1.0])
