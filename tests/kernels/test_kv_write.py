"""`kv_write` and `prepare_qkv` on CPUs: torch against writing row by row, the kernel against torch, what is refused, and the
Hadamard rotation. Inputs are random queries, keys and values of four tokens, and caches that are NaN elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import ALL_TESTS, num_examples
from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, poisoned_caches
from tests.matrices import matrix
from transom_kernels.kv_write import Preparation, QkvInputs, kv_write, prepare_qkv
from transom_kernels.kv_write.cpu import fits_cpu_kernel, prepare_qkv_cpu
from transom_kernels.kv_write.reference import prepare_qkv_reference, rotate_heads
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.quantised_kv import dequantise_rows, quantise_rows

SLOTS = torch.tensor([7, -1, 0, 19])  # the second token is not written
HEADS, KV_HEADS = 6, 2
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


def heads_of(row: torch.Tensor, counts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Parts [T, heads, width] of rows, each after the other."""
    parts = row[:, : sum(heads * width for heads, width in counts)].split([h * w for h, w in counts], dim=1)
    return [part.unflatten(1, pair) for part, pair in zip(parts, counts, strict=True)]


def make_inputs(
    how: Preparation,
    size: int,
    rotated: int,
    *,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    kv_format: str | None = None,
    scaled: bool = True,
) -> tuple[Any, Any]:
    """The same `QkvInputs` twice, each with caches of its own: of `kv_format`, or else of `dtype`. Values are 4 narrower than keys.

    Their type is not said, so that tests need not ask whether keys and values are there.
    """
    row = torch.randn(4, (HEADS + 2 * KV_HEADS) * size + 5).to(dtype)
    q, k, v = heads_of(row, [(HEADS, size), (KV_HEADS, size), (KV_HEADS, size - 4)])
    if how.norm:
        weights = torch.randn(HEADS + KV_HEADS, size).to(weight_dtype or dtype)
        how = replace(how, q_weight=weights[:HEADS], k_weight=weights[HEADS:])
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "slots": SLOTS, "preparation": how}
    if rotated:
        given["tables"] = (torch.randn(4, rotated).to(dtype), torch.randn(4, rotated).to(dtype))
    if scaled:
        given["query_scale"] = torch.rand(4).to(dtype)
    pair = []
    for _ in range(2):
        if kv_format is None:
            shape = Shape(kv_heads=KV_HEADS, size=size, v_size=size - 4, dtype=dtype)
            caches: dict[str, Any] = dict(zip(("k_cache", "v_cache"), empty_caches(shape, 5), strict=True))
        else:
            caches = poisoned_caches(FORMATS_BY_NAME[kv_format], 5, 4, KV_HEADS, (size, size - 4)).arguments
        pair.append(QkvInputs(**given, **caches))
    return pair[0], pair[1]


def keys_alone(heads: int) -> tuple[Any, Any]:
    """The same `QkvInputs` twice: float32 keys for a cache of bfloat16, without values, and `heads` query heads."""
    pair = torch.full((2, 2, 4, 1, 12), float("nan"), dtype=torch.bfloat16)
    how = Preparation(norm=True, k_weight=torch.randn(1, 12), interleaved=True, rotates_last=True)
    inputs = QkvInputs(
        q=torch.randn(3, heads, 12),
        k=torch.randn(3, 1, 12),
        v=None,
        k_cache=pair[0],
        v_cache=None,
        slots=torch.tensor([6, -1, 1]),
        tables=(torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()),
        preparation=how,
    )
    return inputs, replace(inputs, k_cache=pair[1])


@settings(max_examples=num_examples(daily=20, exhaustive=100))
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
        prepare_qkv(QkvInputs(q=k[:, :0], k=k, v=v, slots=slots, **caches.arguments))
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
        prepare_qkv(QkvInputs(q=k, v=k, v_cache=v_cache, slots=slots))
    apart = torch.randn(3, 2, 8)[..., :4]
    with pytest.raises(ValueError, match="follow each other in memory"):
        prepare_qkv(QkvInputs(q=apart, k=apart, v=apart, k_cache=k_cache, v_cache=v_cache, slots=slots))


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
    ("name", "sizes", "dtype"),
    matrix(list(PREPARATIONS), [(20, 0), (20, 6), (20, 20), (64, 64), (96, 34)], DTYPES, strength=1),
)
def test_every_step(name, sizes, dtype):
    """With weights in float32."""
    compare(PREPARATIONS[name], *sizes, dtype=dtype, weight_dtype=torch.float32, scaled=name != "interleaved")


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


def small_case() -> None:
    for name in ("everything", "interleaved"):
        compare(PREPARATIONS[name], 40, 22, dtype=torch.bfloat16, weight_dtype=torch.float32)
    for name in FORMATS_BY_NAME if ALL_TESTS else ("int4",):
        compare(Preparation(norm=True, hadamard=True), 22, 0, dtype=torch.bfloat16, kv_format=name)
