"""Linear layers over quantised weights on GPUs: the Triton kernel against the weights, in the interpreter; fp8 by torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.conftest import nan_memory
from tests.matrices import matrix
from transom_kernels.launch import prefer
from transom_kernels.linear import linear
from transom_kernels.linear.gpu import gpu_weight
from transom_kernels.moe import gpu, gpu_weights
from transom_kernels.quantised_linear import GpuRows

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# numbers, columns of a group (0: a scale for each row), whether there are zero points
KINDS = {
    f"{numbers} {group or 'rows'}{' zeros' * zeros}": (numbers, group, zeros)
    for numbers, group, zeros in (
        *(("int4", group, zeros) for group in (32, 64, 128, 0) for zeros in (False, True)),
        *(("int8", 128, False), ("int8", 0, False), ("int8", 32, True)),
        *(("fp8", 128, False), ("fp8", 0, False), ("fp4", 16, False), ("fp4", 32, False)),
    )
}


def quantised_rows(kind: str, outputs: int, width: int) -> GpuRows:
    """A weight of random numbers, elements of about 1."""
    numbers, group, has_zeros = KINDS[kind]
    size, bits = group or 128, 4 if numbers.endswith("4") else 8
    shape, largest = (outputs, -(-width // size)), {"fp4": 4.0, "fp8": 200.0, "int4": 8.0, "int8": 100.0}[numbers]
    levels = torch.randint(0, 1 << bits, (outputs, width), dtype=torch.uint8)
    if numbers == "fp8":
        levels = (torch.randn(outputs, width) * largest).clamp(-448, 448).to(E4M3).view(torch.uint8)
    scales: Any = {16: E4M3, 32: torch.float8_e8m0fnu}.get(size, BF16) if numbers == "fp4" else BF16
    return GpuRows(
        numbers=numbers,  # type: ignore[arg-type]
        levels=levels,
        group=size,
        scales=(2.0 ** torch.randint(-3, 2, shape) * (1 + torch.rand(shape)) / largest).to(scales) if group else None,
        zeros=torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if has_zeros else None,
        row_scales=(torch.rand(outputs) + 0.5) / largest if not group or size == 16 else None,
    )


@pytest.mark.parametrize(
    ("kind", "sizes", "is_hopper"),
    matrix(list(KINDS), [(1, 40, 96), (3, 17, 288), (70, 150, 130), (130, 33, 64)], [False, True], strength=2),
)
def test_products(monkeypatch: pytest.MonkeyPatch, kind: str, sizes: tuple[int, int, int], is_hopper: bool) -> None:
    """Widths that fill no group and no tile; rows of x a stride apart, with a bias."""
    for module in (gpu, gpu_weights):
        monkeypatch.setattr(module, "spreads_elements", lambda _: is_hopper)
    rows, outputs, width = sizes
    width -= width % 16 if KINDS[kind][0] == "fp4" else 0
    stored, bias = quantised_rows(kind, outputs, width), torch.randn(outputs)
    x = torch.randn(rows, width + 8).to(BF16)[:, :width]
    with prefer("interpreted"):
        weight = gpu_weight(stored, bias)
        with nan_memory():
            got = linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(got, x.float() @ stored.dequantised().T + bias, atol=2e-4 * width**0.5, rtol=1e-4)


@pytest.mark.parametrize("static", [0.0, 0.02])
def test_inputs_of_fp8_layers_are_rounded(static: float) -> None:
    """By a scale of the checkpoint, or (0) by each row's own; a row of zeros stays zeros."""
    stored = replace(quantised_rows("fp8 rows", 48, 64), input_scales=torch.full((48,), static))
    x, bias = torch.cat([torch.randn(5, 64), torch.zeros(1, 64)]).to(BF16), torch.randn(48)
    with prefer("reference"):
        got = linear(x, gpu_weight(stored, bias))
    scale = static or (x.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
    rounded = (x.float() / scale).clamp(-448, 448).to(E4M3).float() * scale
    torch.testing.assert_close(got.float(), rounded @ stored.dequantised().T + bias, atol=0.02, rtol=2**-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_held(kind: str) -> None:
    """At most 1.05 of those of a file: numbers, scales in 16 bits (of fp4: 8), zero points as numbers."""
    numbers, group, zeros = KINDS[kind]
    stored, bits = quantised_rows(kind, 512, 4096), 4 if numbers.endswith("4") else 8
    of_group = (8 if numbers == "fp4" else 16) + bits * zeros
    file_bytes = 512 * (4096 * bits + 4096 // (group or 4096) * of_group) / 8
    assert gpu_weight(stored.to(torch.device("meta"))).nbytes <= 1.05 * file_bytes
