"""The Hadamard rotation: its own inverse, at any width, and invisible in the scores."""

from __future__ import annotations

import pytest
import torch

from transom_kernels.kv_write.hadamard import rotate_heads
from transom_kernels.kv_write.prepare import PLAIN, Preparation, prepare_qkv_reference

WIDTHS = (1, 2, 6, 8, 64, 80, 128, 192)


@pytest.mark.parametrize("width", WIDTHS)
def test_twice_is_the_identity_and_products_stay(width: int) -> None:
    q, k = torch.randn(2, 5, 3, width)
    torch.testing.assert_close(rotate_heads(rotate_heads(q)), q)
    torch.testing.assert_close((rotate_heads(q) * rotate_heads(k)).sum(-1), (q * k).sum(-1), atol=1e-4, rtol=1e-4)


def test_an_outlier_is_spread_over_its_block() -> None:
    head = torch.zeros(1, 1, 12)
    head[..., 5] = 8.0  # in the second block of four
    assert rotate_heads(head).abs().flatten().tolist() == [0.0] * 4 + [4.0] * 4 + [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_view_keep_their_dtype_and_become_contiguous(dtype: torch.dtype) -> None:
    wide = torch.randn(4, 5, 8, dtype=dtype)
    view = wide[:, 1:3]
    rotated = rotate_heads(view)
    assert (rotated.dtype, rotated.is_contiguous(), rotated.shape) == (dtype, True, view.shape)
    assert rotate_heads(wide[:, :0]).shape == (4, 0, 8)


def test_queries_and_keys_are_rotated_last_and_values_are_not() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    k_plain, v_plain, k_rotated, v_rotated = torch.zeros(4, 1, 4, 2, 8)
    angles = torch.randn(3, 8)
    tables = (angles.cos(), angles.sin())
    plain = prepare_qkv_reference(q, k, v, k_plain, v_plain, torch.arange(3), tables, PLAIN)
    rotated = prepare_qkv_reference(q, k, v, k_rotated, v_rotated, torch.arange(3), tables, Preparation(hadamard=True))
    torch.testing.assert_close(rotated, rotate_heads(plain))
    torch.testing.assert_close(k_rotated, rotate_heads(k_plain))
    torch.testing.assert_close(v_rotated, v_plain, atol=0, rtol=0)
