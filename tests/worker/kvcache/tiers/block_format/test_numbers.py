"""Number formats of blocks give torch's bytes and numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transom_kernels.quantised_kv import FORMATS, KvFormat, dequantise_rows, quantise_rows
from transom_worker.kvcache.tiers.block_format.numbers import decode, dequantise, encode, quantise, rotate

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    65519.0,
    65520.0,
    1e-8,
    -3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
    2**-24,
    448.0,
    0.5,
]


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, 1, generator=generator).exp()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_plain_formats(name: str) -> None:
    values = torch.cat([numbers((4, 3, 16)).flatten(), torch.tensor(SPECIAL)]).reshape(1, -1)
    wanted = values.to(getattr(torch, name))
    got = encode(values.numpy(), name)
    np.testing.assert_array_equal(decode(got, name), wanted.float().numpy())
    is_number = np.repeat(~wanted.isnan().numpy(), wanted.element_size(), axis=-1)  # a NaN has many representations
    np.testing.assert_array_equal(got[is_number], wanted.view(torch.uint8).numpy()[is_number])


@pytest.mark.parametrize("kv_format", FORMATS.values(), ids=lambda kv_format: kv_format.name)
def test_quantised_formats(kv_format: KvFormat) -> None:
    values = numbers((5, 7, 16), seed=1)
    values[1, 2] = 0.0
    values[2, 3, 4] = float("inf")
    values[3, 0] = torch.linspace(-7.0, 7.0, 16).round() * 0.5  # halves, which go to even
    elements, scales = quantise_rows(values, kv_format)
    got, got_scales = quantise(values.numpy(), kv_format.name)
    np.testing.assert_array_equal(got_scales, scales.numpy())
    finite = np.isfinite(got_scales)
    np.testing.assert_array_equal(got[finite], elements.view(torch.uint8).numpy()[finite])
    np.testing.assert_array_equal(
        dequantise(elements.view(torch.uint8).numpy(), scales.numpy(), kv_format.name),
        dequantise_rows(elements, scales).numpy(),
    )


def test_every_code_of_fp8() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    got = dequantise(codes[:, None], np.ones(256, dtype=np.float32), "fp8")[:, 0]
    np.testing.assert_array_equal(got, wanted)
    halfway = ((wanted[:126] + wanted[1:127]) / 2)[:, None]
    row = np.concatenate([halfway, np.full_like(halfway, 448.0)], axis=1)  # so that the scale is 1
    expected = torch.from_numpy(row).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(quantise(row, "fp8")[0], expected)


@pytest.mark.parametrize("width", [1, 2, 6, 64, 80])
def test_a_rotation_is_its_own_inverse(width: int) -> None:
    rows = numbers((2, 3, width)).numpy()
    rotated = rotate(rows)
    np.testing.assert_allclose(rotate(rotated), rows, atol=1e-5)
    np.testing.assert_allclose((rotated**2).sum(-1), (rows**2).sum(-1), rtol=1e-4)
    if width == 6:
        np.testing.assert_allclose(rotated[..., 0], (rows[..., 0] + rows[..., 1]) / np.sqrt(2), atol=1e-6)
