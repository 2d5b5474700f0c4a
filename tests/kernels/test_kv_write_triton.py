"""The Triton kernel of `prepare_qkv` and `kv_write` against the reference, in the interpreter (or on a GPU where there is one)."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_kv_write import PREPARATIONS, keys_alone, make_inputs
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME
from tests.matrices import matrix
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.kv_write.gpu import prepare_qkv_triton
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.launch import INTERPRETED, prefer
from transom_kernels.quantised_kv import dequantise_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


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
