"""Quantised KV caches: the formats, what operators refuse, and attention in torch.

A `quantised` case is a slab of blocks with keys, values and their scales, poisoned where no token is.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.paged_case import Sequence, Shape, make_case
from transom_kernels.kv_write import QkvInputs, kv_write, prepare_qkv
from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.quantised_kv import FORMATS, KvFormat, dequantise_rows, quantise_rows
from transom_kernels.quantised_kv.format import INT4, INT8

FORMATS_BY_NAME = {kv_format.name: kv_format for kv_format in FORMATS.values()}
_POISON = 0x7F  # NaN as an 8-bit float, the largest number of int8


@dataclass(kw_only=True)
class QuantisedCaches:
    """Caches [ids, P, KVH, elements] and scales [ids, P, KVH]: views of one slab."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        return {"k_cache": self.k, "v_cache": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}


def poisoned_caches(
    kv_format: KvFormat, ids: int, block_size: int, kv_heads: int, widths: tuple[int, int], *, head_major: bool = True
) -> QuantisedCaches:
    """Every number that reads as NaN where the format has one, and every scale NaN.

    A block has a gap, K, V, the scales of K and of V, and a gap; scales lie as [heads, tokens], as in a worker's blocks.
    """
    elements = [width // kv_format.numbers_per_element for width in widths]
    rows = block_size * kv_heads
    starts, end = [], 16
    for size in (rows * elements[0], rows * elements[1], 4 * rows, 4 * rows):
        starts.append(end)
        end = -(-(end + size) // 16) * 16
    stride = end + 16
    slab = torch.full((ids * stride,), _POISON, dtype=torch.uint8)
    floats = slab.view(torch.float32)

    def values(start: int, width: int) -> torch.Tensor:
        token, head = (width, block_size * width) if head_major else (kv_heads * width, width)
        view = slab.as_strided((ids, block_size, kv_heads, width), (stride, token, head, 1), start)
        return view.view(kv_format.dtype)

    def scales(start: int) -> torch.Tensor:
        view = floats.as_strided((ids, block_size, kv_heads), (stride // 4, 1, block_size), start // 4)
        return view.fill_(float("nan"))

    k, v = (values(start, width) for start, width in zip(starts[:2], elements, strict=True))
    return QuantisedCaches(k=k, v=v, k_scale=scales(starts[2]), v_scale=scales(starts[3]))


def quantised(case: Any, kv_format: KvFormat, *, head_major: bool = True) -> QuantisedCaches:
    """Quantised keys and values of a case that has `k_cache` and `v_cache`."""
    ids, block_size, kv_heads, width = case.k_cache.shape
    widths = (width, case.v_cache.shape[3])
    caches = poisoned_caches(kv_format, ids, block_size, kv_heads, widths, head_major=head_major)
    for source, cache, scale in ((case.k_cache, caches.k, caches.k_scale), (case.v_cache, caches.v, caches.v_scale)):
        elements, scales = quantise_rows(source, kv_format)
        bytes_of, is_row = cache.view(torch.uint8), scales.isfinite()
        bytes_of[is_row] = elements.view(torch.uint8)[is_row]
        scale[is_row] = scales[is_row]
    return caches


SMALL = Shape(size=20, v_size=12)
ERROR_OF_LARGEST = {"fp8": 1 / 27, "int8": 0.51 / 127, "int4": 0.51 / 7}  # of a row's largest magnitude
every_format = pytest.mark.parametrize("name", FORMATS_BY_NAME)


@every_format
def test_rows_come_back_within_half_a_step(name: str) -> None:
    rows = torch.randn(50, 3, 20) * torch.logspace(-20, 15, 50)[:, None, None]
    elements, scale = quantise_rows(rows, FORMATS_BY_NAME[name])
    assert (elements.shape, elements.dtype) == ((50, 3, 10 if name == "int4" else 20), FORMATS_BY_NAME[name].dtype)
    assert (scale.shape, scale.dtype) == ((50, 3), torch.float32)
    error = (dequantise_rows(elements, scale) - rows).abs().amax(-1)
    assert bool((error <= ERROR_OF_LARGEST[name] * rows.abs().amax(-1)).all())


def test_the_bytes_of_each_format() -> None:
    elements, scale = quantise_rows(torch.tensor([7.0, -7.0, 0.4, 3.6, -0.6, 0.0]), INT4)
    assert [f"{byte:02x}" for byte in elements.tolist()] == ["1f", "c8", "87"]  # 15 and 1, 8 and 12, 7 and 8
    assert (float(scale), dequantise_rows(elements, scale).tolist()) == (1.0, [7.0, -7.0, 0.0, 4.0, -1.0, 0.0])
    elements, scale = quantise_rows(torch.tensor([127.0, -127.0, 2.5, 3.5]), INT8)
    assert (elements.tolist(), float(scale)) == ([127, -127, 2, 4], 1.0)  # halves to even
    elements, scale = quantise_rows(torch.tensor([-448.0, 1.0, 17.0]), FORMATS_BY_NAME["fp8"])
    assert (elements.float().tolist(), float(scale)) == ([-448.0, 1.0, 16.0], 1.0)


@every_format
def test_rows_of_zeros_of_tiny_numbers_and_of_none_that_is_finite(name: str) -> None:
    rows = torch.zeros(5, 4)
    rows[1, 2] = 1e-44
    rows[2] = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    rows[3] = torch.tensor([1.0, float("-inf"), 1.0, 1.0])
    rows[4] = 1e38
    elements, scale = quantise_rows(rows, FORMATS_BY_NAME[name])
    back = dequantise_rows(elements, scale)
    assert (back[0].tolist(), float(scale[0])) == ([0.0] * 4, 0.0)
    assert bool((back[1].abs() < 1e-43).all())
    assert bool(back[2:4].isnan().all())
    torch.testing.assert_close(back[4], rows[4])


def test_an_odd_width_is_refused_where_two_numbers_share_a_byte() -> None:
    with pytest.raises(ValueError, match=r"Rows have 5 numbers; int4 packs 2 into one byte.*choose fp8 or int8"):
        quantise_rows(torch.zeros(2, 5), INT4)


def attend(caches: QuantisedCaches, case: Any, **changes: Any) -> torch.Tensor:
    return paged_attention(case.inputs(**{**caches.arguments, **changes}))


def test_caches_and_scales_that_do_not_fit_are_refused() -> None:
    case = make_case([Sequence(start=9, count=1)], SMALL)
    caches, rows = quantised(case, INT8), torch.zeros(1, 2, 20)
    as_bytes = caches.k.view(torch.uint8), caches.v.view(torch.uint8)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"k_scale": None, "v_scale": None}, r"k_cache is torch.int8 without k_scale, beside numbers of torch.float32"),
        ({"v_scale": None}, r"v_cache is torch.int8 without v_scale"),
        (
            {"v_scale": caches.v_scale[:, :, 0]},
            r"v_scale is \(6, 4\) of torch.float32.*one float32 for each token and KV head",
        ),
        ({"k_scale": caches.k_scale.double()}, r"k_scale is .* of torch.float64"),
        (
            {"k_cache": case.k_cache, "v_cache": case.v_cache},
            r"torch.float32, which has no scales: give None as k_scale",
        ),
        ({"v_cache": as_bytes[1]}, r"The caches are torch.int8 and torch.uint8; keys and values need one dtype"),
        ({"k_cache": as_bytes[0], "v_cache": as_bytes[1]}, r"of keys of 40 numbers"),
    ]
    for changes, words in refused:
        with pytest.raises(ValueError, match=words):
            attend(caches, case, **changes)
    with pytest.raises(ValueError, match=r"v \(1, 2, 20\) does not fit v_cache .* of heads of 12 numbers"):
        prepare_qkv(QkvInputs(q=rows, k=rows, v=rows, slots=case.batch.slots, **caches.arguments))
    with pytest.raises(ValueError, match=r"k_cache is torch.int8 without k_scale"):
        kv_write(rows, rows[..., :12], caches.k, caches.v, case.batch.slots)


@every_format
def test_the_reference_is_attention_over_dequantised_rows(name: str) -> None:
    """Slots and scales that no query sees are poisoned."""
    case = make_case([Sequence(start=9, count=3), Sequence(start=20, count=1, attend_from=18)], SMALL)
    caches = quantised(case, FORMATS_BY_NAME[name])
    k, v = dequantise_rows(caches.k, caches.k_scale), dequantise_rows(caches.v, caches.v_scale)
    options: dict[str, Any] = {"window": 7, "sink_logits": torch.linspace(-2, 2, 6), "soft_cap": 2.0}
    out = paged_attention_reference(case.inputs(**caches.arguments, **options))
    assert bool(out.isfinite().all())
    assert torch.equal(out, paged_attention_reference(case.inputs(k_cache=k, v_cache=v, **options)))
