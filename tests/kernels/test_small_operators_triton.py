"""The small Triton kernels, and that of `prepare_qkv` and `kv_write`, against their references, in the interpreter (or on a GPU
where there is one)."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.test_hyper_connections_cpu import SIZES, Sizes, check_operators, streams_of
from tests.kernels.test_kv_write import PREPARATIONS, keys_alone, make_inputs
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME
from tests.matrices import matrix
from transom_kernels.block_copy import gpu as block_copy_gpu
from transom_kernels.block_copy.gpu import copy_blocks_triton
from transom_kernels.gated_mlp.gpu import gated_activation_triton
from transom_kernels.gated_mlp.op import activated_product_reference
from transom_kernels.hyper_connections.gpu import hc_head_triton, hc_norm_triton, hc_post_triton, hc_pre_triton
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.launch import INTERPRETED, prefer
from transom_kernels.quantised_kv import dequantise_rows
from transom_kernels.rms_norm.gpu import rms_norm_triton
from transom_kernels.rms_norm.op import rms_norm_reference
from transom_kernels.rotary.gpu import rotary_triton_
from transom_kernels.rotary.op import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize(
    ("dtype", "weights", "shape", "parts"),
    matrix(
        DTYPES,
        [torch.float32, None],
        [(0, 8), (1, 1), (3, 7), (2, 1000)],
        [("weight",), ("weight", "residual"), ("residual", "inner"), ("weight", "residual", "inner")],
    ),
)
def test_rms_norm(
    dtype: torch.dtype, weights: torch.dtype | None, shape: tuple[int, int], parts: tuple[str, ...]
) -> None:
    rows, width = shape
    x, residual = torch.randn(rows, width + 3).to(dtype)[:, :width], torch.randn(rows, width + 5).to(dtype)[:, :width]
    inner, weight = (torch.rand(width).add(0.5).to(weights or dtype) for _ in range(2))
    given = {name: value for name, value in (("residual", residual), ("inner", inner)) if name in parts}
    factor = 0.75 if given else 1.0
    out, sums = rms_norm_triton(x, weight if "weight" in parts else None, 1e-5, **given, factor=factor)
    added = rms_norm_reference(x, inner, 1e-5) if "inner" in parts else x
    total = (residual + added) * factor if given else x
    if "inner" not in parts and dtype is not torch.bfloat16:  # which the interpreter cuts off
        assert sums.equal(total)  # as if the sum had been a step of its own
    torch.testing.assert_close(sums.float(), total.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])
    wanted = rms_norm_reference(sums, weight, 1e-5) if "weight" in parts else sums
    torch.testing.assert_close(out.float(), wanted.float(), atol=LIMIT[dtype], rtol=LIMIT[dtype])


def test_blocks_go_between_two_places() -> None:
    slab, staging = (torch.randint(0, 255, (6, 3 * 4096 + 256), dtype=torch.uint8) for _ in range(2))
    wanted = staging.clone()
    wanted[[0, 4, 5]] = slab[[3, 3, 1]]
    copy_blocks_triton(slab, staging, [(3, 0), (3, 4), (1, 5)])
    assert staging.equal(wanted)


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
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(gated_activation_triton(x, "relu2"), activated_product_reference(x, x, "relu2"))
    for activation, limits in (("silu", None), ("gelu_tanh", None), ("silu", (0.5, 0.3))):
        got = gated_activation_triton(x, activation, limits)
        torch.testing.assert_close(got, activated_product_reference(gate, up, activation, limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("to_host", [False, True])
def test_numbers_of_blocks_are_where_the_kernel_runs(to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks go to pinned host memory; a tensor without data stands for the GPU's."""
    seen: list[torch.Tensor] = []

    class TakesNote:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.extend(arguments[2:4])

    monkeypatch.setattr(block_copy_gpu, "copy_words", TakesNote())
    host, device = torch.empty(4, 64, dtype=torch.uint8), torch.empty(4, 64, dtype=torch.uint8, device="meta")
    block_copy_gpu.copy_blocks_triton(*((device, host) if to_host else (host, device)), [(0, 1), (2, 3)])
    assert [(ids.shape, ids.device.type) for ids in seen] == [((2,), "meta")] * 2


def check_streams(x: torch.Tensor, *, rounds: int) -> None:
    kernels = {"hc_norm": hc_norm_triton, "hc_pre": hc_pre_triton, "hc_head": hc_head_triton, "hc_post": hc_post_triton}
    check_operators(SimpleNamespace(**kernels), x, rounds=rounds)


@pytest.mark.usefixtures("memory_full_of_nan")
@pytest.mark.parametrize(("sizes", "dtype", "rounds"), matrix(SIZES, DTYPES, [1, 20]))
def test_hyper_connections(sizes: Sizes, dtype: torch.dtype, rounds: int) -> None:
    check_streams(streams_of(sizes, dtype), rounds=rounds)


@pytest.mark.usefixtures("memory_full_of_nan")
def test_streams_that_are_one_tensor_still() -> None:
    check_streams(torch.randn(3, 1, 40).expand(-1, 4, -1), rounds=5)


@pytest.mark.parametrize(("name", "rotated", "dtype"), matrix(list(PREPARATIONS), [0, 8, 16], DTYPES))
def test_prepare_and_write(name, rotated, dtype):
    wanted, got = make_inputs(PREPARATIONS[name], 16, rotated, dtype=dtype)
    limit, queries = LIMIT[dtype], (prepare_qkv_triton(got), prepare_qkv_reference(wanted))
    for one, other in (queries, (got.k_cache, wanted.k_cache), (got.v_cache, wanted.v_cache)):
        torch.testing.assert_close(one.float(), other.float(), atol=limit, rtol=limit, equal_nan=True)


@pytest.mark.parametrize("heads", [0, 5])
def test_keys_alone_and_a_cache_of_fewer_bits(heads):
    wanted, got = keys_alone(heads)
    torch.testing.assert_close(prepare_qkv_triton(got), prepare_qkv_reference(wanted))
    torch.testing.assert_close(got.k_cache, wanted.k_cache, atol=3e-2, rtol=3e-2, equal_nan=True)


def rounding_of(values):
    """What numbers of fp8 may differ by: the interpreter drops small ones, rounds the others otherwise, by a step, and halves
    what is rounded up to a power of two."""
    wide = values.float().abs()
    is_power = wide.clamp(min=2**-9).log2().frac().eq(0)
    return torch.where(is_power, wide / 2, wide / 8) + 2**-6


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
@pytest.mark.parametrize("size", [16, 12])
def test_quantised_caches(name, size):
    """Also rows of zeros, and rows that are not finite."""
    how = Preparation(norm=True, value_factor=1.5, hadamard=name == "int4", eps=1e-5)
    wanted, got = make_inputs(how, size, 0, kv_format=name)
    wanted.v[0, 1], wanted.v[2, 0, 3], wanted.v[3, 1, 1] = 0.0, float("nan"), float("inf")
    prepare_qkv_reference(wanted)
    prepare_qkv_triton(got)
    for ours, scale, theirs, wanted_scale in (
        (got.k_cache, got.k_scale, wanted.k_cache, wanted.k_scale),
        (got.v_cache, got.v_scale, wanted.v_cache, wanted.v_scale),
    ):
        torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0, equal_nan=True)
        written, ones = wanted_scale.isfinite(), torch.ones_like(wanted_scale)
        if name == "fp8":
            assert bool(((ours.float() - theirs.float()).abs() <= rounding_of(theirs))[written].all())
        else:
            away = dequantise_rows(ours, ones) - dequantise_rows(theirs, ones)
            assert float(away[written].abs().max()) <= 1.0


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
def test_operators_give_what_a_layer_has_to_triton(monkeypatch):
    """Tables with an axis for heads, scales of 16 bits, and keys and values without queries or without tokens."""
    monkeypatch.delattr("transom_kernels.kv_write.op.prepare_qkv_reference")
    made, expected = make_inputs(Preparation(norm=True, value_norm=True, value_factor=0.7), 16, 8)
    made = replace(made, tables=(made.tables[0][:, None], made.tables[1][:, None]))
    caches = {"k_cache": made.k_cache, "v_cache": made.v_cache, "slots": made.slots}
    with prefer("interpreted"):
        scale = made.query_scale.bfloat16()
        out = prepare_qkv(replace(made, query_scale=scale))
        torch.testing.assert_close(out, prepare_qkv_reference(replace(expected, query_scale=scale.float())))
        kv_write(made.k, made.v, **caches)
        kv_write(made.k[:0], made.v[:0], **{**caches, "slots": made.slots[:0]})
    assert made.k_cache[4, 3].equal(made.k[3])
    assert made.v_cache[4, 3].equal(made.v[3])
