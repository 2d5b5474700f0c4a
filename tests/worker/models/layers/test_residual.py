"""The residual stream gives the same sums with torch and with Triton's kernels, and the same bits with torch."""

from __future__ import annotations

import pytest
import torch

from transom_kernels.launch import INTERPRETED, prefer
from transom_worker.models.layers.linear import Linear, make_linear
from transom_worker.models.layers.norm import LayerNorm, Norm, RmsNorm
from transom_worker.models.layers.residual import Residual

EPS = 1e-5
INTERPRETER = pytest.param("interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="there is a GPU"))


@pytest.fixture(params=["reference", "auto", INTERPRETER], autouse=True)
def kernels(request: pytest.FixtureRequest):
    torch.manual_seed(2)
    with prefer(request.param):
        yield


def norms() -> list[RmsNorm]:
    return [RmsNorm(torch.rand(12) + 0.5, EPS) for _ in range(3)]


def linear() -> Linear:
    return make_linear(torch.randn(12, 8), torch.randn(12))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_norms_before_sublayers(rows):
    before, after, last = norms()
    first, second = linear(), linear()
    x, y = torch.randn(rows, 12), torch.randn(rows, 8)
    residual = Residual(x)
    torch.testing.assert_close(residual.read(before), before(x))
    residual.add_output(first, None, y)
    torch.testing.assert_close(residual.read(after), after(x + first(y)))
    residual.add_output(second, None, y)
    torch.testing.assert_close(residual.read(last), last(x + first(y) + second(y)))
    torch.testing.assert_close(residual.read(), x + first(y) + second(y))


def test_norms_on_both_sides_and_a_factor():
    inner, outer, last = norms()
    x, y, layer = torch.randn(4, 12), torch.randn(4, 8), linear()
    before = x.clone()
    residual = Residual(x)
    residual.add_output(layer, inner, y)
    wanted = x + inner(layer(y))
    torch.testing.assert_close(residual.read(outer), outer(wanted))
    residual.add(layer(y), inner)
    residual.scale(0.5)
    wanted = (wanted + inner(layer(y))) * 0.5
    torch.testing.assert_close(residual.read(last), last(wanted))
    residual.scale(0.25)
    torch.testing.assert_close(residual.read(), wanted * 0.25)
    assert x.equal(before)


@pytest.mark.parametrize("norm", [None, LayerNorm(torch.ones(12), EPS)], ids=["none", "with mean"])
def test_reads_that_normalise_otherwise(norm: Norm | None):
    x, y, inner = torch.randn(3, 12), torch.randn(3, 12), norms()[0]
    for first in (None, inner):
        residual = Residual(x)
        residual.add(y, first)
        wanted = x + (y if first is None else first(y))
        torch.testing.assert_close(residual.read(norm), wanted if norm is None else norm(wanted))
        torch.testing.assert_close(residual.read(), wanted)


def test_addends_are_not_lost_and_rows_are_kept():
    x, y, z = torch.randn(3, 5, 12)
    residual = Residual(x)
    residual.add(y)
    residual.add(z)
    residual.select(torch.tensor([4, 0]))
    torch.testing.assert_close(residual.read(), (x + y + z)[[4, 0]])
    residual.replace(z)
    assert residual.read().equal(z)


def test_bfloat16_is_rounded_as_if_each_were_a_step_of_its_own():
    norm, inner = (RmsNorm(torch.rand(16).bfloat16() + 0.5, EPS) for _ in range(2))
    x, y = (torch.randn(70, 16).bfloat16() for _ in range(2))
    with prefer("reference"):
        residual = Residual(x)
        residual.add(y, inner)
        assert residual.read(norm).equal(norm(x + inner(y)))


def test_selected_rows():
    x = torch.randn(4, 12)
    residual = Residual(x)
    residual.select(torch.arange(4))
    assert residual.read() is x
    residual.select(torch.tensor([1, 3]))
    assert residual.read().equal(x[[1, 3]])
    residual.select(torch.tensor([], dtype=torch.int64))
    assert residual.read().shape == (0, 12)
