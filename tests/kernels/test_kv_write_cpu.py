"""The CPU kernel of `prepare_qkv` and `kv_write` against the reference: every step, odd widths, strides, batches, threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.paged_case import Shape, empty_caches
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.kv_write.cpu import prepare_qkv_fits
from transom_kernels.kv_write.prepare import prepare_qkv_reference
from transom_kernels.kv_write.reference import kv_write_reference
from transom_kernels.launch import uses_cpu_kernels

Tables = tuple[torch.Tensor, torch.Tensor] | None
SLOTS = torch.tensor([7, -1, 0, 19])
PREPARATIONS = {
    "plain": Preparation(),
    "norm": Preparation(norm=True),
    "norm after rotation": Preparation(norm_after_rotation=True),
    "value norm": Preparation(value_norm=True, value_factor=0.7),
    "everything": Preparation(
        norm=True, norm_after_rotation=True, value_norm=True, value_factor=1.3, rotates_last=True
    ),
    "interleaved": Preparation(norm=True, interleaved=True),
    "interleaved, last": Preparation(interleaved=True, rotates_last=True),
}


def limit(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}


def heads_of(row: torch.Tensor, counts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Parts [T, heads, width] of rows, one behind the other."""
    parts = row[:, : sum(heads * width for heads, width in counts)].split([h * w for h, w in counts], dim=1)
    return [part.unflatten(1, pair) for part, pair in zip(parts, counts, strict=True)]


def tables_of(rotated: int, dtype: torch.dtype, tokens: int = 4) -> Tables:
    return (torch.randn(tokens, rotated).to(dtype), torch.randn(tokens, rotated).to(dtype)) if rotated else None


def compare(
    how: Preparation, dtype: torch.dtype, weight_dtype: torch.dtype, size: int, rotated: int, *, scaled: bool = True
) -> None:
    shape = Shape(heads=6, kv_heads=2, size=size, v_size=size - 4, block_size=4, dtype=dtype)
    wanted_caches, caches = empty_caches(shape, 5), empty_caches(shape, 5)
    row = torch.randn(4, 6 * size + 2 * size + 2 * size + 5).to(dtype)
    q, k, v = heads_of(row, [(6, size), (2, size), (2, size - 4)])
    if how.norm:
        weights = torch.randn(8, size).to(weight_dtype)
        how = replace(how, q_weight=weights[:6], k_weight=weights[6:])
    tables, scale = tables_of(rotated, dtype), torch.rand(4).to(dtype) if scaled else None
    assert uses_cpu_kernels(q)
    assert prepare_qkv_fits(q, k, v, *caches, SLOTS, tables, how, scale)
    before = row.clone()
    wanted = prepare_qkv_reference(q, k, v, *wanted_caches, SLOTS, tables, how, scale)
    got = prepare_qkv(q, k, v, *caches, SLOTS, tables, how, scale)
    assert row.equal(before)
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, **limit(dtype))
    torch.testing.assert_close(caches, wanted_caches, equal_nan=True, **limit(dtype))


@pytest.mark.parametrize("name", PREPARATIONS)
@pytest.mark.parametrize(("size", "rotated"), [(20, 0), (20, 6), (20, 20), (64, 64), (96, 34)])
def test_prepare_qkv(name, size, rotated):
    compare(PREPARATIONS[name], torch.float32, torch.float32, size, rotated)


@pytest.mark.parametrize("name", ["everything", "interleaved"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prepare_qkv_in_bfloat16(name, weight_dtype):
    compare(PREPARATIONS[name], torch.bfloat16, weight_dtype, 40, 32, scaled=name == "everything")


@pytest.mark.parametrize("heads", [0, 5])
def test_keys_alone_and_a_cache_of_fewer_bits(heads):
    wanted_cache, cache = torch.full((2, 2, 4, 1, 12), float("nan"), dtype=torch.bfloat16)
    q, k = torch.randn(3, heads, 12), torch.randn(3, 1, 12)
    how = Preparation(norm=True, k_weight=torch.randn(1, 12), interleaved=True, rotates_last=True)
    tables, slots = tables_of(4, torch.bfloat16, 3), torch.tensor([6, -1, 1])
    assert prepare_qkv_fits(q, k, None, cache, None, slots, tables, how)
    wanted = prepare_qkv_reference(q, k, None, wanted_cache, None, slots, tables, how)
    torch.testing.assert_close(prepare_qkv(q, k, None, cache, None, slots, tables, how), wanted)
    torch.testing.assert_close(cache, wanted_cache, atol=1e-5, rtol=2**-7, equal_nan=True)


def test_queries_alone():
    q, how = torch.randn(3, 5, 12), Preparation(norm=True, q_weight=torch.randn(5, 12))
    tables = tables_of(12, torch.float32, 3)
    wanted = prepare_qkv_reference(q, None, None, None, None, SLOTS[:3], tables, how)
    torch.testing.assert_close(prepare_qkv(q, None, None, None, None, SLOTS[:3], tables, how), wanted)
    with pytest.raises(ValueError, match="belong together"):
        prepare_qkv(q, None, q, None, q[None], SLOTS[:3], tables, how)


def test_a_token_does_not_depend_on_its_batch_or_on_threads():
    how = Preparation(norm=True, value_norm=True)
    q, k, v = heads_of(torch.randn(9, 60 * 100), [(40, 100), (10, 100), (10, 100)])  # more heads than an item has
    tables, slots = tables_of(100, torch.float32, 9), torch.arange(9)
    shape = Shape(kv_heads=10, size=100)
    caches = empty_caches(shape, 3)
    whole = prepare_qkv(q, k, v, *caches, slots, tables, how)
    assert tables is not None
    for token in (0, 8):
        one, own = slice(token, token + 1), empty_caches(shape, 3)
        cut = (tables[0][one], tables[1][one])
        assert prepare_qkv(q[one], k[one], v[one], *own, slots[one], cut, how).equal(whole[one])
        assert all(a[token // 4, token % 4].equal(b[token // 4, token % 4]) for a, b in zip(own, caches, strict=True))
    for threads in (1, 3):
        with kernel_threads(threads):
            assert prepare_qkv(q, k, v, *caches, slots, tables, how).equal(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "v_size"), [(6, 4), (64, None), (33, 50)])
def test_kv_write(dtype, size, v_size):
    shape = Shape(kv_heads=3, size=size, v_size=v_size, dtype=dtype, head_major=size == 64)
    wanted, got = empty_caches(shape, 5), empty_caches(shape, 5)
    k, v = heads_of(torch.randn(4, 400).to(dtype), [(3, size), (3, v_size or size)])
    slots = torch.tensor([3, 17, 8, 0])
    kv_write_reference(k, v, *wanted, slots)
    kv_write(k, v, *got, slots)
    torch.testing.assert_close(got, wanted, equal_nan=True, rtol=0, atol=0)


def test_no_tokens():
    caches = empty_caches(Shape(kv_heads=2, size=8), 2)
    q = torch.zeros(0, 2, 8)
    assert prepare_qkv(q, q, q, *caches, torch.zeros(0, dtype=torch.int64), None).shape == q.shape


def small_case() -> None:
    for name in ("everything", "interleaved"):
        compare(PREPARATIONS[name], torch.bfloat16, torch.float32, 40, 22)
        compare(PREPARATIONS[name], torch.float32, torch.float32, 20, 20)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
def test_another_processor():
    run_in_child(small_case, TRANSOM_CPU="haswell")
