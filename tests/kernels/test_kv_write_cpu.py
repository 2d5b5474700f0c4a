"""The CPU kernel of `prepare_qkv` and `kv_write` against the reference: every step, odd widths, strides, batches, threads."""

from dataclasses import replace

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.how_many import ALL_TESTS
from tests.kernels.checked import run_checked, run_in_child
from tests.kernels.kv_write_case import PREPARATIONS, keys_alone, make_inputs
from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.quantised_case import FORMATS_BY_NAME
from tests.matrices import matrix
from transom_kernels.kv_write import Preparation
from transom_kernels.kv_write.cpu import fits_cpu_kernel, prepare_qkv_cpu
from transom_kernels.kv_write.inputs import QkvInputs
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.quantised_kv import dequantise_rows

DTYPES = [torch.float32, torch.bfloat16]


def compare(how, size, rotated, *, dtype=torch.float32, **options):
    wanted, got = make_inputs(how, size, rotated, dtype=dtype, **options)
    assert uses_cpu_kernels(got.q)
    assert fits_cpu_kernel(got)
    before = got.q.clone()
    queries = prepare_qkv_cpu(got)
    assert queries.is_contiguous()
    assert got.q.equal(before)
    rtol, atol = (2e-6, 2e-6) if dtype == torch.float32 else (2**-7, 1e-5)
    torch.testing.assert_close(queries, prepare_qkv_reference(wanted), rtol=rtol, atol=atol)
    if got.k_scale is None:
        caches, expected = (got.k_cache, got.v_cache), (wanted.k_cache, wanted.v_cache)
        torch.testing.assert_close(caches, expected, equal_nan=True, rtol=rtol, atol=atol)
    else:  # norms and rotation add in another order than torch, so a number may be stored as its neighbour
        plain = how == Preparation()
        assert_written(got.k_cache, got.k_scale, wanted.k_cache, wanted.k_scale, step=0 if plain and not rotated else 1)
        assert_written(got.v_cache, got.v_scale, wanted.v_cache, wanted.v_scale, step=0 if plain else 1)


def assert_written(stored, scale, wanted, wanted_scale, *, step):
    """Equal scales, and stored numbers that are at most `step` apart; what was not written is untouched."""
    torch.testing.assert_close(scale, wanted_scale, rtol=3e-6 * step, atol=0, equal_nan=True)
    if stored.dtype == torch.float8_e4m3fn:  # whose bytes count upwards
        numbers = [cache.view(torch.uint8).float() for cache in (stored, wanted)]
    else:
        numbers = [dequantise_rows(cache, torch.ones_like(scale)) for cache in (stored, wanted)]
    assert float((numbers[0] - numbers[1]).abs().max()) <= step


@pytest.mark.parametrize(
    ("name", "sizes"),
    matrix(list(PREPARATIONS), [(20, 0), (20, 6), (20, 20), (64, 64), (96, 34)], strength=1),
)
def test_every_step(name, sizes):
    compare(PREPARATIONS[name], *sizes)


@pytest.mark.parametrize(("name", "weight_dtype"), matrix(["everything", "interleaved"], DTYPES, strength=1))
def test_bfloat16(name, weight_dtype):
    compare(PREPARATIONS[name], 40, 32, dtype=torch.bfloat16, weight_dtype=weight_dtype, scaled=name == "everything")


@pytest.mark.parametrize(("kv_format", "dtype"), matrix(list(FORMATS_BY_NAME), DTYPES, strength=1))
def test_quantised_caches(kv_format, dtype):
    compare(replace(PREPARATIONS["everything"], rotates_last=False), 40, 40, dtype=dtype, kv_format=kv_format)
    compare(Preparation(), 20, 0, dtype=dtype, kv_format=kv_format, scaled=False)


@pytest.mark.parametrize("size", [20, 40, 48, 128])
def test_the_hadamard_rotation(size):
    """Of blocks of 4, 8, 16 and 128: below a vector, a vector, several."""
    how = Preparation(norm=True, norm_after_rotation=True, hadamard=True)
    compare(how, size, size, kv_format="int4")
    compare(how, size, size)


@pytest.mark.parametrize("heads", [0, 5])
def test_keys_alone_and_a_cache_of_fewer_bits(heads):
    wanted, got = keys_alone(heads)
    assert fits_cpu_kernel(got)
    torch.testing.assert_close(prepare_qkv_cpu(got), prepare_qkv_reference(wanted))
    torch.testing.assert_close(got.k_cache, wanted.k_cache, atol=1e-5, rtol=2**-7, equal_nan=True)


def test_queries_alone_and_no_tokens():
    with_keys, _ = make_inputs(Preparation(), 20, 20)
    queries = replace(with_keys, k=None, v=None, k_cache=None, v_cache=None)
    torch.testing.assert_close(prepare_qkv_cpu(queries), prepare_qkv_reference(queries))
    none = {name: getattr(with_keys, name)[:0] for name in ("q", "k", "v", "slots")}
    assert prepare_qkv_cpu(replace(with_keys, **none, tables=None, query_scale=None)).shape == (0, 6, 20)


def test_a_token_does_not_depend_on_its_batch_or_on_threads():
    """Of more heads than an item has."""
    q, k, v = torch.randn(9, 60, 100).split_with_sizes((40, 10, 10), dim=1)
    shape = Shape(kv_heads=10, size=100)

    def inputs_of(rows):
        k_cache, v_cache = empty_caches(shape, 3)
        own = {"q": q[rows], "k": k[rows], "v": v[rows], "slots": torch.arange(9)[rows]}
        cut = (tables[0][rows], tables[1][rows])
        how = Preparation(norm=True, value_norm=True)
        return QkvInputs(**own, k_cache=k_cache, v_cache=v_cache, tables=cut, preparation=how)

    tables = (torch.randn(9, 100), torch.randn(9, 100))
    together = inputs_of(slice(None))
    whole = prepare_qkv_cpu(together)
    for token in (0, 8):
        alone = inputs_of(slice(token, token + 1))
        assert prepare_qkv_cpu(alone).equal(whole[token : token + 1])
        place = (token // 4, token % 4)
        assert alone.k_cache[place].equal(together.k_cache[place])
        assert alone.v_cache[place].equal(together.v_cache[place])
    for threads in (1, 3):
        with kernel_threads(threads):
            assert prepare_qkv_cpu(together).equal(whole)


def small_case() -> None:
    for name in ("everything", "interleaved"):
        compare(PREPARATIONS[name], 40, 22, dtype=torch.bfloat16, weight_dtype=torch.float32)
    for name in FORMATS_BY_NAME if ALL_TESTS else ("int4",):
        compare(Preparation(norm=True, hadamard=True), 22, 0, dtype=torch.bfloat16, kv_format=name)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
def test_another_processor():
    run_in_child(small_case, TRANSOM_CPU="haswell")
