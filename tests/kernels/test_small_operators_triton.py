"""The small Triton kernels against their references, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.quantised_case import FORMATS_BY_NAME, poisoned_caches
from tests.matrices import matrix
from transom_kernels.block_copy import gpu as block_copy_gpu
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.gated_mlp.gpu import gated_activation_triton
from transom_kernels.gated_mlp.reference import gated_gelu_tanh_reference, gated_silu_reference
from transom_kernels.kv_write.gpu import kv_write_triton, prepare_qkv_triton
from transom_kernels.kv_write.prepare import Preparation, prepare_qkv_reference
from transom_kernels.kv_write.reference import kv_write_reference
from transom_kernels.quantised_kv import dequantise_rows
from transom_kernels.rms_norm.gpu import head_norm_triton_, rms_norm_triton
from transom_kernels.rms_norm.reference import head_norm_reference, rms_norm_reference
from transom_kernels.rotary.gpu import rotary_triton_
from transom_kernels.rotary.reference import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


def rounding_of(values: torch.Tensor) -> torch.Tensor:
    """What 8-bit numbers may differ by. int8: nothing. The interpreter drops small fp8 numbers, rounds the others otherwise, by a
    step, and halves what is rounded up to a power of two."""
    if values.dtype is torch.int8:
        return torch.zeros(values.shape)
    wide = values.float().abs()
    is_power = wide.clamp(min=2**-9).log2().frac().eq(0)
    return torch.where(is_power, wide / 2, wide / 8) + 2**-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 7), (2, 64), (1, 1000)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, with_residual: bool) -> None:
    wide = torch.randn(rows, width + 3).to(dtype)
    x, weight = wide[:, :width], torch.randn(width).to(dtype)
    residual = torch.randn(rows, width).to(dtype) if with_residual else None
    total = x if residual is None else x + residual
    out, sums = rms_norm_triton(x, weight, 1e-5, residual)
    torch.testing.assert_close(sums.float(), total.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])
    wanted = rms_norm_reference(total, weight, 1e-5)
    torch.testing.assert_close(out.float(), wanted.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])


@pytest.mark.parametrize(
    ("dtype", "weights", "shape", "with_inner", "with_weight"),
    matrix(DTYPES, [torch.float32, None], [(0, 8), (1, 1), (3, 7), (2, 1000)], [False, True], [False, True]),
)
def test_rms_norm_of_sums(
    dtype: torch.dtype, weights: torch.dtype | None, shape: tuple[int, int], with_inner: bool, with_weight: bool
) -> None:
    rows, width = shape
    x, residual = torch.randn(rows, width + 3).to(dtype)[:, :width], torch.randn(rows, width + 5).to(dtype)[:, :width]
    inner, weight = (torch.rand(width).add(0.5).to(weights or dtype) for _ in range(2))
    out, sums = rms_norm_triton(
        x, weight if with_weight else None, 1e-5, residual, inner=inner if with_inner else None, factor=0.75
    )
    total = (residual + (rms_norm_reference(x, inner, 1e-5) if with_inner else x)) * 0.75
    if not with_inner and dtype is not torch.bfloat16:  # which the interpreter cuts off
        assert sums.equal(total)  # as if the sum had been a step of its own
    torch.testing.assert_close(sums.float(), total.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])
    wanted = rms_norm_reference(sums, weight, 1e-5) if with_weight else sums
    torch.testing.assert_close(out.float(), wanted.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (5, 10), (40, 64)])
def test_head_norm(weighted: bool, heads: int, width: int) -> None:
    wide = torch.randn(2, heads + 2, width)
    before, weight = wide.clone(), torch.randn(heads, width) if weighted else None
    head_norm_triton_(wide[:, 1:-1], weight, 1e-5)
    torch.testing.assert_close(wide[:, 1:-1], head_norm_reference(before[:, 1:-1], weight, 1e-5))
    assert wide[:, [0, -1]].equal(before[:, [0, -1]])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "table_heads", "width"), [(1, 1, 2), (3, 1, 10), (3, 3, 6), (40, 1, 10)])
def test_rotary(interleaved: bool, heads: int, table_heads: int, width: int) -> None:
    wide = torch.full((3, heads + 2, 10), 7.0)
    wide[:, :heads] = torch.randn(3, heads, 10)
    cos, sin = torch.randn(3, table_heads, width), torch.randn(3, table_heads, width)
    wanted = rotary_reference(wide[:, :heads].clone(), cos, sin, interleaved=interleaved)
    rotary_triton_(wide[:, :heads], cos, sin, interleaved=interleaved)
    torch.testing.assert_close(wide[:, :heads], wanted)
    assert wide[:, heads:].eq(7).all()


@pytest.mark.parametrize("width", [1, 6, 2500])
def test_gated_activations(width: int) -> None:
    x = torch.randn(3, 2 * width)
    torch.testing.assert_close(gated_activation_triton(x, gelu=False), gated_silu_reference(x))
    torch.testing.assert_close(gated_activation_triton(x, gelu=True), gated_gelu_tanh_reference(x))
    gate, up = x.chunk(2, dim=-1)
    cut = torch.cat([gate.clamp(max=0.5), up.clamp(-0.5, 0.5)], dim=-1)
    torch.testing.assert_close(gated_activation_triton(x, gelu=False, limit=0.5), gated_silu_reference(cut))


def test_blocks_go_between_two_places() -> None:
    slab, staging = (torch.randint(0, 255, (6, 3 * 4096 + 256), dtype=torch.uint8) for _ in range(2))
    wanted = staging.clone()
    wanted[[0, 4, 5]] = slab[[3, 3, 1]]
    copy_blocks_triton(slab, staging, [(3, 0), (3, 4), (1, 5)])
    assert staging.equal(wanted)
    copy_blocks_triton(slab, staging, [])


@pytest.mark.parametrize("to_host", [False, True])
def test_numbers_of_blocks_are_where_the_kernel_runs(to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks go to pinned host memory; a tensor without data stands for the GPU's."""
    seen: list[torch.Tensor] = []

    class TakesNote:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.extend(arguments[2:4])

    monkeypatch.setattr(block_copy_gpu, "copy_words", TakesNote())
    host, device = torch.empty(4, 64, dtype=torch.uint8), torch.empty(4, 64, dtype=torch.uint8, device="meta")
    copy = block_copy_gpu.copy_blocks_triton
    copy(*((device, host) if to_host else (host, device)), [(0, 1), (2, 3)])
    assert [(ids.shape, ids.device.type) for ids in seen] == [((2,), "meta")] * 2


PREPARATIONS = {
    "plain": Preparation(),
    "norm": Preparation(norm=True, eps=1e-5),
    "weights": Preparation(norm=True, q_weight=torch.randn(6, 16), k_weight=torch.randn(2, 16), interleaved=True),
    "after": Preparation(norm_after_rotation=True, value_norm=True, value_factor=0.7),
    "last": Preparation(norm=True, k_weight=torch.randn(2, 16), rotates_last=True),
}


@pytest.mark.parametrize(("name", "rotated", "dtype"), matrix(list(PREPARATIONS), [0, 8, 16], DTYPES))
def test_prepare_and_write(name: str, rotated: int, dtype: torch.dtype) -> None:
    how = PREPARATIONS[name]
    shape = Shape(heads=6, kv_heads=2, size=16, v_size=12, block_size=4, dtype=dtype)
    wanted_caches, caches = empty_caches(shape, 5), empty_caches(shape, 5)
    row = torch.randn(4, 6 * 16 + 2 * 16 + 2 * 12 + 5).to(dtype)
    q, k = row[:, : 6 * 16].unflatten(1, (6, 16)), row[:, 96:128].unflatten(1, (2, 16))
    v = row[:, 128:152].unflatten(1, (2, 12))
    tables = (torch.randn(4, rotated), torch.randn(4, rotated)) if rotated else None
    slots, scale = torch.tensor([7, -1, 0, 19]), torch.rand(4)
    wanted = prepare_qkv_reference(q, k, v, *wanted_caches, slots, tables, how, scale)
    got = prepare_qkv_triton(q, k, v, *caches, slots, tables, how, scale)
    limit: dict[str, Any] = {"atol": LIMIT[dtype], "rtol": LIMIT[dtype], "equal_nan": True}
    torch.testing.assert_close(got.float(), wanted.float(), **limit)
    for one, other in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **limit)


@pytest.mark.parametrize("heads", [0, 5])
def test_prepare_and_write_keys_alone(heads: int) -> None:
    wanted_cache, cache = torch.full((2, 2, 4, 1, 12), float("nan"), dtype=torch.bfloat16)
    q, k = torch.randn(3, heads, 12), torch.randn(3, 1, 12)
    how = Preparation(norm=True, k_weight=torch.randn(1, 12), interleaved=True, rotates_last=True)
    tables, slots = (torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()), torch.tensor([6, -1, 1])
    wanted = prepare_qkv_reference(q, k, None, wanted_cache, None, slots, tables, how)
    torch.testing.assert_close(prepare_qkv_triton(q, k, None, cache, None, slots, tables, how), wanted)
    torch.testing.assert_close(cache, wanted_cache, atol=3e-2, rtol=3e-2, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
@pytest.mark.parametrize("size", [16, 12])
def test_prepare_and_write_quantised(name: str, size: int) -> None:
    kv_format = FORMATS_BY_NAME[name]
    how = replace(Preparation(norm=True, value_factor=1.5, hadamard=name == "int4"), eps=1e-5)
    wanted, got = (poisoned_caches(kv_format, 3, 4, 3, (size, size - 2)) for _ in range(2))
    k, v = torch.randn(5, 3, size), torch.randn(5, 3, size - 2)
    v[1, 2], v[2, 0, 3], v[3, 1, 1] = 0.0, float("nan"), float("inf")
    slots = torch.tensor([0, 5, 7, 11, -1])
    prepare_qkv_reference(k, k, v, wanted.k, wanted.v, slots, None, how, None, wanted.scales)
    prepare_qkv_triton(k, k, v, got.k, got.v, slots, None, how, None, got.scales)
    for one, other in zip(got.scales, wanted.scales, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)
    for one, other in ((got.k, wanted.k), (got.v, wanted.v)):
        if name == "fp8":
            written = wanted.v_scale.isfinite()
            away = (one.float() - other.float()).abs()[written]
            assert bool((away <= rounding_of(other)[written]).all())
        else:
            ones = torch.ones_like(wanted.v_scale)
            assert float((dequantise_rows(one, ones) - dequantise_rows(other, ones)).abs().max()) <= 1.0


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
def test_kv_write_quantised(name: str) -> None:
    wanted, got = (poisoned_caches(FORMATS_BY_NAME[name], 3, 4, 3, (16, 16)) for _ in range(2))
    k, slots = torch.randn(3, 3, 16), torch.tensor([0, 5, 11])
    kv_write_reference(k, -k, wanted.k, wanted.v, slots, wanted.scales)
    kv_write_triton(k, -k, got.k, got.v, slots, got.scales)
    torch.testing.assert_close(got.scales, wanted.scales, rtol=1e-6, atol=0, equal_nan=True)
    if name != "fp8":
        assert got.k.equal(wanted.k)
        assert got.v.equal(wanted.v)
