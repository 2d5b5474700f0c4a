"""Hyper-connections on CPUs: the mixing matrix is balanced, and wrong arguments raise errors."""

from __future__ import annotations

import pytest
import torch

from transom_kernels.hyper_connections import hc_head, hc_norm, hc_post, hc_pre

X, Y = torch.ones(2, 3, 4), torch.ones(2, 4)


def test_a_balanced_mix_neither_grows_nor_shrinks_the_streams() -> None:
    torch.manual_seed(0)
    parts = torch.randn(2, 15), torch.ones(15), torch.zeros(15)
    _, _, mix = hc_pre(torch.randn(2, 3, 4), *parts, rounds=20, eps=1e-6)
    for dim in (1, 2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(2, 3), atol=1e-4, rtol=0)


def test_streams_without_a_mix_only_get_the_output() -> None:
    out = hc_post(Y, X, torch.full((2, 3), 0.5), torch.zeros(2, 3, 3))
    assert out.equal(torch.full((2, 3, 4), 0.5))


def test_normalised_by_what_all_streams_have_in_common() -> None:
    x = torch.tensor([[[3.0, 3.0], [1.0, 1.0]]])
    torch.testing.assert_close(hc_norm(x, 0.0), torch.tensor([[3.0, 3.0, 1.0, 1.0]]) / 5**0.5)


def test_what_does_not_fit_is_refused() -> None:
    good = torch.zeros(2, 15), torch.zeros(15), torch.zeros(15)
    with pytest.raises(ValueError, match="there are 15 coefficients"):
        hc_pre(X, torch.zeros(2, 14), *good[1:], rounds=1, eps=1e-6)
    with pytest.raises(ValueError, match="there are 3 coefficients"):
        hc_head(X, *good, eps=1e-6)
    with pytest.raises(ValueError, match="coefficients are float32"):
        hc_pre(X, good[0].half(), *good[1:], rounds=1, eps=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        hc_pre(X, *good, rounds=0, eps=1e-6)
    with pytest.raises(ValueError, match="give \\[tokens, streams, width\\]"):
        hc_norm(Y, 1e-6)
    for y in (Y.half(), Y[:1]):
        with pytest.raises(ValueError, match="of the same dtype"):
            hc_post(y, X, torch.zeros(2, 3), torch.zeros(2, 3, 3))
