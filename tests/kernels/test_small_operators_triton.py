"""The small Triton kernels against their references, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.matrices import matrix
from transom_kernels.block_copy import gpu as block_copy_gpu
from transom_kernels.gated_mlp.gpu import gated_activation_triton
from transom_kernels.gated_mlp.op import activated_product_reference
from transom_kernels.rms_norm.gpu import head_norm_triton_, rms_norm_triton
from transom_kernels.rms_norm.op import rms_norm_reference
from transom_kernels.rotary.gpu import rotary_triton_
from transom_kernels.rotary.op import rotary_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


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
    torch.testing.assert_close(wide[:, 1:-1], rms_norm_reference(before[:, 1:-1], weight, 1e-5))
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
    gate, up = x.chunk(2, dim=-1)
    for activation, limit in (("silu", None), ("gelu_tanh", None), ("silu", 0.5)):
        got = gated_activation_triton(x, gelu=activation == "gelu_tanh", limit=limit)
        torch.testing.assert_close(got, activated_product_reference(gate, up, activation, limit))  # type: ignore[arg-type]


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
