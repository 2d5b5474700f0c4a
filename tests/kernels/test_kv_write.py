"""`kv_write` and `prepare_qkv`: torch against writing row by row, what is refused, and the Hadamard rotation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.kernels.kv_write_case import make_inputs
from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.quantised_case import FORMATS_BY_NAME, poisoned_caches
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.kv_write.hadamard import rotate_heads
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.launch import prefer
from transom_kernels.quantised_kv import quantise_rows


@settings(max_examples=num_examples(daily=20, exhaustive=100), deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20), st.booleans(), st.booleans(), st.sampled_from([6, 4]))
def test_kv_write_touches_its_slots_alone(kv_heads, block_size, tokens, head_major, adjacent, v_size):
    """By kernels, or by torch where the heads of a token are not adjacent."""
    shape = Shape(kv_heads=kv_heads, size=6, v_size=v_size, block_size=block_size, head_major=head_major)
    ids = tokens // block_size + 2
    wanted, got = empty_caches(shape, ids), empty_caches(shape, ids)
    slots = torch.randperm(ids * block_size)[:tokens]
    k, v = torch.randn(tokens, kv_heads, 6), torch.randn(tokens, kv_heads, v_size if adjacent else 7)[..., :v_size]
    for cache, rows in zip(wanted, (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            cache[slot // block_size, slot % block_size] = rows[token]
    kv_write(k, v, *got, slots)
    torch.testing.assert_close(got, wanted, equal_nan=True, rtol=0, atol=0)


def test_masked_tokens_may_share_a_slot():
    k_cache, v_cache = empty_caches(Shape(kv_heads=1, size=2), 2)
    kv_write(torch.ones(5, 1, 2), torch.ones(5, 1, 2), k_cache, v_cache, torch.full((5,), 7))
    assert k_cache[1, 3].eq(1).all()
    assert k_cache[0].isnan().all()


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_quantised_writes_in_torch(name):
    kv_format = FORMATS_BY_NAME[name]
    caches, wanted = (poisoned_caches(kv_format, 5, 4, 3, (20, 12)) for _ in range(2))
    k, v, slots = torch.randn(5, 3, 20), torch.randn(5, 3, 12), torch.tensor([3, 17, -1, 0, 12])
    with prefer("reference"):
        prepare_qkv(k[:, :0], k, v, slots=slots, tables=None, **caches.arguments)
    for rows, cache, scale in ((k, wanted.k, wanted.k_scale), (v, wanted.v, wanted.v_scale)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                elements, scale[slot // 4, slot % 4] = quantise_rows(rows[token], kv_format)
                cache.view(torch.uint8)[slot // 4, slot % 4] = elements.view(torch.uint8)
    for got, expected in zip(caches.arguments.values(), wanted.arguments.values(), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused():
    k_cache, v_cache = empty_caches(Shape(kv_heads=2, size=4), 2)
    k, slots = torch.zeros(3, 2, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="heads and widths"):
        kv_write(k[:, :1], k, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="float16"):
        kv_write(k.half(), k, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="2 slots"):
        kv_write(k, k, k_cache, v_cache, slots[:2])
    with pytest.raises(ValueError, match="belong together"):
        prepare_qkv(k, None, k, None, v_cache, slots, None)
    apart = torch.randn(3, 2, 8)[..., :4]
    with pytest.raises(ValueError, match="follow each other in memory"):
        prepare_qkv(apart, apart, apart, k_cache, v_cache, slots, None)


@pytest.mark.parametrize("width", [1, 6, 64, 80, 192])
def test_the_hadamard_rotation_is_its_own_inverse_and_keeps_products(width):
    q, k = torch.randn(2, 5, 3, width)
    torch.testing.assert_close(rotate_heads(rotate_heads(q)), q)
    torch.testing.assert_close((rotate_heads(q) * rotate_heads(k)).sum(-1), (q * k).sum(-1), atol=1e-4, rtol=1e-4)


def test_the_hadamard_rotation_spreads_an_outlier_over_its_block():
    head = torch.zeros(1, 1, 12)
    head[..., 5] = 8.0  # in the second block of four
    assert rotate_heads(head).abs().flatten().tolist() == [0.0] * 4 + [4.0] * 4 + [0.0] * 4


def test_queries_and_keys_are_rotated_by_hadamard_last_and_values_are_not():
    plain, other = make_inputs(Preparation(), 8, 8)
    hadamard = replace(other, preparation=Preparation(hadamard=True))
    torch.testing.assert_close(prepare_qkv_reference(hadamard), rotate_heads(prepare_qkv_reference(plain)))
    torch.testing.assert_close(hadamard.k_cache, rotate_heads(plain.k_cache), equal_nan=True)
    torch.testing.assert_close(hadamard.v_cache, plain.v_cache, atol=0, rtol=0, equal_nan=True)
