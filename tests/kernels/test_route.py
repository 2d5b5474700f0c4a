"""The router's reference against obvious code in float64, the CPU kernels against the reference, and errors for wrong arguments.

The Triton kernels have the tests of `RouteTests`, too: a test module inherits it and gives the fixture `kernel`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.conftest import nan_memory
from transom_kernels.route import Routing, route
from transom_kernels.route.cpu import TILE, route_cpu
from transom_kernels.route.reference import route_reference, routes_of

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
Pair = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[..., Pair]


def check_route(kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, routing: Routing, **parts: Any) -> Pair:
    """Chosen as by the reference and weighed alike; memory is NaN before."""
    with nan_memory():
        found, weights = kernel(x, weight, routing, **parts)
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

    def test_experts_are_chosen_from_the_best_groups(self, kernel: Kernel) -> None:
        """Four groups of three. Without a correction a group counts as its best expert, with one as its two best ones."""
        row, other = [0.0, 1, 5, 3, 4, 3, 2, 2, 2, 4.5, -9, -9], [7.0, 7, 7, 0, 0, 0, 7, 7, 7, 8, 0, 0]
        x, weight = logits_of(row, other)
        best, pairs = Routing(num_chosen=4, num_groups=4, top_groups=2), torch.zeros(12)
        assert check_route(kernel, x, weight, best)[0].tolist() == [[2, 9, 1, 0], [9, 0, 1, 2]]
        pairs[3:6] = 0.25
        found, _ = check_route(kernel, x, weight, replace(best, score="sigmoid"), correction=pairs)
        assert [sorted({expert // 3 for expert in ids}) for ids in found.tolist()] == [[1, 2], [0, 2]]
        random = torch.randint(-40, 40, (6, 160)).float()
        many = replace(best, num_chosen=6, num_groups=20, top_groups=3)
        check_route(kernel, torch.eye(6), random.T.contiguous(), many)
        check_route(kernel, torch.eye(6), random.T.contiguous(), many, correction=torch.randperm(160) / 4.0)

    def test_a_fixed_choice(self, kernel: Kernel) -> None:
        x, weight, scale = torch.randn(5, 30), torch.randn(7, 30), torch.rand(7)
        chosen = torch.randint(0, 7, (5, 3))
        chosen[2] = 6
        routing = Routing(num_chosen=3, score="sigmoid", scale=1.5)
        found, weights = check_route(kernel, x, weight, routing, chosen=chosen, expert_scale=scale)
        scores = (x @ weight.T).sigmoid().gather(1, chosen)
        assert found.equal(chosen)
        torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) * scale[chosen] * 1.5)


def obvious(logits: list[float], routing: Routing, correction: list[float] | None) -> tuple[list[int], list[float]]:
    """Experts and weights of one token."""
    if routing.score == "softmax":
        scores = [math.exp(v - max(logits)) for v in logits]
        scores = [score / sum(scores) for score in scores]
    elif routing.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    preference = logits if correction is None else [s + c for s, c in zip(scores, correction, strict=True)]
    chosen = sorted(range(len(logits)), key=lambda e: (-preference[e], e))[: routing.num_chosen]
    total = sum(scores[e] for e in chosen) if routing.normalise else 1.0
    return chosen, [scores[e] / total * routing.scale for e in chosen]


@settings(max_examples=25)
@given(
    st.integers(0, 4), st.integers(1, 9), st.integers(1, 12), st.sampled_from(SCORES), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_routes(tokens: int, width: int, experts: int, score: Any, normalise: bool, random: Any) -> None:
    torch.manual_seed(random.getrandbits(32))
    chosen = random.randint(1, experts)
    # few distinct numbers, exact in float32, so that experts often are equal
    x, weight = torch.randint(-2, 3, (tokens, width)), torch.randint(-1, 2, (experts, width))
    bias = torch.randint(-1, 2, (experts,)) / 2
    routing = Routing(num_chosen=chosen, score=score, normalise=normalise, scale=1.5)
    found, weights = route(x.bfloat16(), weight.float(), routing, bias=bias)
    assert (found.shape, found.dtype, weights.dtype) == ((tokens, chosen), torch.int64, torch.float32)
    for row, logits in enumerate((x.double() @ weight.double().T + bias).tolist()):
        wanted, shares = obvious(logits, routing, None)
        assert found[row].tolist() == wanted
        torch.testing.assert_close(weights[row], torch.tensor(shares), atol=1e-6, rtol=1e-5)


def test_corrections_choose_and_do_not_weigh() -> None:
    logits, correction = torch.randn(20, 9) * 2, torch.randn(9)
    for score in SCORES:
        routing = Routing(num_chosen=3, score=score, scale=2.5)  # type: ignore[arg-type]
        found, weights = routes_of(logits, routing, correction=correction)
        for row in range(20):
            wanted, shares = obvious(logits[row].tolist(), routing, correction.tolist())
            assert found[row].tolist() == wanted
            torch.testing.assert_close(weights[row], torch.tensor(shares))


@pytest.mark.parametrize(
    ("logits", "routing", "chosen"),
    [
        ([-math.inf] * 5, Routing(num_chosen=4), [0, 1, 2, 3]),
        ([math.nan] * 5, Routing(num_chosen=4), [0, 1, 2, 3]),
        ([1.0, 5.0, math.nan, math.inf], Routing(num_chosen=3, score="sigmoid"), [2, 3, 1]),
        ([50.0, 90.0, 70.0], Routing(num_chosen=2, score="sigmoid"), [1, 2]),  # both scores are 1
        ([-300.0, -200.0, 0.0], Routing(num_chosen=3), [2, 1, 0]),
    ],
)
def test_equal_experts_are_chosen_in_their_order_and_nan_first(
    logits: list[float], routing: Routing, chosen: list[int]
) -> None:
    assert routes_of(torch.tensor([logits]), routing)[0].tolist() == [chosen]


def test_the_product_is_in_float32() -> None:
    """With weights of 14 bits, whose last one decides, and which bfloat16 (8 bits) and TF32 (11) would lose.

    All sums are whole numbers below 2 ** 24: exact in float32, in any order.
    """
    x, weight = torch.randint(-2, 3, (20, 512)).bfloat16(), torch.randint(-(2**13), 2**13, (5, 512)).float()
    weight[1] = weight[0]
    weight[1, :8] += torch.tensor([1, -1] * 4)
    found, _ = route_reference(x, weight, Routing(num_chosen=5))
    assert found.equal((x.double() @ weight.double().T).sort(descending=True, stable=True).indices)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": torch.zeros(2, 5)}, r"x \(2, 5\) does not fit weight \(4, 6\)"),
        ({"weight": torch.zeros(4, 6).bfloat16()}, "in float32"),
        ({"routing": Routing(num_chosen=5)}, "5 experts per token are to be chosen from 4; choose 1 to 4"),
        ({"routing": Routing(num_chosen=0)}, "0 experts per token"),
        ({"bias": torch.zeros(3)}, r"each is \[4\] in float32"),
        ({"correction": torch.zeros(4).double()}, r"each is \[4\] in float32"),
        ({"chosen": torch.zeros(2, 3, dtype=torch.int64)}, r"2 tokens take \[2, 2\] int64"),
        ({"chosen": torch.zeros(2, 2, dtype=torch.int32)}, r"2 tokens take \[2, 2\] int64"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(2, 6), "weight": torch.zeros(4, 6), "routing": Routing(num_chosen=2)}
    with pytest.raises(ValueError, match=says):
        route(**(given | changes))


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
