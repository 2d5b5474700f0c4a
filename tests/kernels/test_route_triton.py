"""The router's kernels against the reference, in the interpreter (or on a GPU where there is one)."""

from typing import Any

import pytest
import torch

from tests.kernels.test_route import SCORES, Kernel, Pair, RouteTests, check_route
from transom_kernels.launch import INTERPRETED, prefer
from transom_kernels.route import Routing, gpu, route, router_layout
from transom_kernels.route.gpu import FEW_TOKENS, MIN_SPLIT, partial_logits_triton, route_triton


@pytest.fixture
def kernel() -> Kernel:
    return route_triton


class TestRoute(RouteTests):
    """All of `RouteTests`."""


def check(x: torch.Tensor, weight: torch.Tensor, routing: Routing, **parts: Any) -> Pair:
    return check_route(route_triton, x, weight, routing, **parts)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits on a GPU; the interpreter's products are numpy's, which may add otherwise in another shape."""
    return torch.equal(a, b) if torch.cuda.is_available() else torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tokens", "width", "experts", "chosen"),
    [
        (torch.float32, 0, 40, 4, 2),
        (torch.float16, 1, 24, 8, 1),
        (torch.bfloat16, 3, 2 * MIN_SPLIT + 5, 33, 4),
        (torch.float32, 17, MIN_SPLIT, 7, 1),
        (torch.bfloat16, 2, 8, 5, 5),
        (torch.float32, 1, 1, 1, 1),
    ],
)
def test_sizes(dtype: torch.dtype, tokens: int, width: int, experts: int, chosen: int) -> None:
    x, weight, parts = torch.randn(tokens, width).to(dtype), torch.randn(experts, width), torch.randn(2, experts)
    for score in SCORES if tokens == 1 else SCORES[:1]:
        routing = Routing(num_chosen=chosen, score=score, normalise=tokens != 3, scale=2.5)  # type: ignore[arg-type]
        check(x, weight, routing, bias=parts[0], correction=parts[1] if tokens < 3 else None)


def test_rows_that_lie_apart_and_weights_either_way() -> None:
    x, weight = torch.randn(4, 90)[:, :70], torch.randn(12, 70)
    found = check(x, weight, Routing(num_chosen=2))
    for other in (x.clone(), x.T.contiguous().T):
        for way in (weight, weight.T.contiguous().T):
            assert all(same(a, b) for a, b in zip(check(other, way, Routing(num_chosen=2)), found, strict=True))


def test_a_token_does_not_depend_on_the_others() -> None:
    x, weight, routing = torch.randn(5, 300).bfloat16(), torch.randn(20, 300), Routing(num_chosen=3)
    together = route_triton(x, weight, routing)
    assert all(a.equal(b) for a, b in zip(together, route_triton(x, weight, routing), strict=True))
    for row in (0, 4):
        alone = route_triton(x[row : row + 1], weight, routing)
        assert all(a.equal(b[row : row + 1]) for a, b in zip(alone, together, strict=True))


def test_parts_of_more_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MAX_PARTIALS", 64)
    x, weight = torch.randn(2, 300), torch.randn(20, 300)
    assert partial_logits_triton(x, weight).shape == (2, 2, 20)
    check(x, weight, Routing(num_chosen=3))


def test_tiles_for_many_tokens_add_in_the_same_order() -> None:
    x, weight = torch.randn(FEW_TOKENS + 3, 2 * MIN_SPLIT + 9).bfloat16(), torch.randn(37, 2 * MIN_SPLIT + 9)
    together = partial_logits_triton(x, weight)
    assert together.shape == (FEW_TOKENS + 3, 3, 37)
    torch.testing.assert_close(together.sum(1), x.float() @ weight.T, atol=1e-4, rtol=1e-4)
    for rows in (slice(0, 1), slice(FEW_TOKENS, FEW_TOKENS + 3)):
        assert same(partial_logits_triton(x[rows], weight), together[rows])


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
def test_the_operator_goes_by_the_switch() -> None:
    x, weight = torch.randn(2, 12).bfloat16(), torch.randn(5, 12)
    with prefer("interpreted"):
        way = router_layout(weight)
        assert way.stride() == (1, 5)
        found, weights = route(x, way, Routing(num_chosen=2))
    wanted, shares = route(x, weight, Routing(num_chosen=2))
    assert found.equal(wanted)
    torch.testing.assert_close(weights, shares)
