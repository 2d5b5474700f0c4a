"""`paged_attention` on CPUs: torch against attention written out key by key, and the CPU kernels against torch; long contexts,
quantised caches, odd widths, equal bits in any batch, recorded steps."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.cpu_threads import kernel_threads
from tests.how_many import ALL_TESTS, num_examples
from tests.kernels.paged_case import MASK_OPTIONS, TOLERANCE, Case, Sequence, Shape, make_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, quantised
from tests.matrices import matrix, some_daily
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.kv_write import Preparation, QkvInputs, prepare_qkv
from transom_kernels.launch import prefer, uses_cpu_kernels
from transom_kernels.paged_attention import paged_attention, reference
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu
from transom_kernels.paged_attention.cpu.layout import KEY_TILE, UNIT_KEYS
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPE = Shape(block_size=16)
LONG_MASKS: list[dict[str, Any]] = [{}, {"window": 300}, {"chunk": 320}, {"window": 270, "num_sink_tokens": 30}]
FORMATS = ["", *FORMATS_BY_NAME]  # of caches; "": the dtype of the queries
MODELS = [("", F32), ("", BF16), ("fp8", F32)]  # kinds that tests of the tiny model compile as well, in heads of 16

# a kernel is compiled for each
every_kind = pytest.mark.parametrize(
    ("kv_format", "dtype"),
    some_daily(
        product(FORMATS, (F32, BF16, F16)),
        daily=[("", F32), ("", BF16), ("", F16), ("fp8", F32), ("int8", BF16), ("int4", F16)],
    ),
)


def brute_force(case: Case, inputs: PagedInputs) -> torch.Tensor:
    """One query and one head at a time, over those of its dense keys that the rule names."""
    rows, rule, group, soft_cap = [], inputs.rule, inputs.group, inputs.soft_cap
    for b, count in enumerate(case.batch.count_host):
        keys, values = case.keys[b].double(), case.values[b].double()
        for i in range(count):
            p = case.batch.start_host[b] + i
            seen = []
            for k in range(p + 1):
                in_window = rule.window is None or p - k < rule.window
                in_chunk = rule.chunk is None or k // rule.chunk == p // rule.chunk
                if k < rule.num_sink_tokens or (in_window and in_chunk and k >= case.batch.attend_from_host[b]):
                    seen.append(k)
            heads = []
            for h in range(case.q.shape[1]):
                scores = keys[seen, h // group] @ case.q[len(rows), h].double() * inputs.scale
                weights = torch.exp(soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores)
                sink = 0.0 if inputs.sink_logits is None else math.exp(float(inputs.sink_logits[h]))
                heads.append(weights / (weights.sum() + sink) @ values[seen, h // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def attend(case: Case, **options) -> torch.Tensor:
    return paged_attention(case.inputs(**options))


def check(case: Case, **options) -> None:
    inputs = case.inputs(**options)
    expected, limit = paged_attention_reference(inputs), TOLERANCE[case.q.dtype]
    torch.testing.assert_close(expected.double(), brute_force(case, inputs), atol=limit / 2, rtol=limit / 2)
    for _ in range(2):  # the second call reuses what the first one left in scratch
        torch.testing.assert_close(attend(case, **options), expected, atol=limit, rtol=limit)


MIXED = [Sequence(start=start, count=count) for start, count in ((0, 1), (9, 1), (0, 7), (6, 15))]
MASKS = [
    {}, {"window": 1}, {"window": 5}, {"chunk": 4}, {"chunk": 5}, {"window": 3, "num_sink_tokens": 2},
    {"window": 4, "num_sink_tokens": 5}, {"chunk": 6, "window": 4, "num_sink_tokens": 1},
]  # fmt: skip
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft_cap": {"soft_cap": 1.5},
    "sinks": {"sink_logits": torch.tensor([0.3, -1.0, 2.0, 0, 9, -9])},
}


@pytest.mark.parametrize(("mask", "extra"), matrix(MASKS, list(EXTRAS), strength=1))
def test_agrees_with_attention_written_out(mask, extra):
    shape = Shape(heads=4, size=16) if extra == "soft_cap" else Shape()  # tests of models compile this kernel as well
    check(make_case(MIXED, shape), **EXTRAS[extra], **mask)


@pytest.mark.parametrize("mask", [{}, {"window": 3, "num_sink_tokens": 2}], ids=str)
def test_a_sink_of_minus_infinity_is_none(mask):
    """Of some heads or of all; a query that sees no key still gets zeros, not NaN."""
    none = torch.full((6,), -torch.inf)
    case = make_case([*MIXED, Sequence(start=3, count=1, attend_from=4)], Shape())
    check(case, sink_logits=torch.tensor([-torch.inf, 0.5, -torch.inf, 60.0, 0.0, 1.0]), **mask)
    torch.testing.assert_close(attend(case, sink_logits=none, **mask), attend(case, **mask))


@pytest.mark.parametrize("sinks", [0, 3, 4, 5])
def test_window_group_whose_old_blocks_are_gone(sinks):
    """Keys before the window are NaN or not in the table at all; sink blocks hold the sinks."""
    sequences = [
        Sequence(start=30, count=1, first_key=30 - 6),
        Sequence(start=17, count=16, first_key=17 - 6),
        Sequence(start=2, count=3),
    ]
    check(make_case(sequences, Shape(num_sink_blocks=-(-sinks // 4))), window=7, num_sink_tokens=sinks)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_missing_block_is_an_error(kernels):
    with prefer(kernels), pytest.raises(IndexError, match="reads logical blocks"):
        attend(make_case([Sequence(start=30, count=1, first_key=24)], Shape()))


@pytest.mark.parametrize("max_scores", [1, 300])
def test_torch_computes_long_prompts_in_tiles_of_query_tokens(max_scores, monkeypatch):
    case = make_case([*MIXED, Sequence(start=20, count=40)], Shape())
    options: dict[str, Any] = {"window": 9, "num_sink_tokens": 2, "sink_logits": torch.randn(6)}
    whole = paged_attention_reference(case.inputs(**options))
    monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
    torch.testing.assert_close(paged_attention_reference(case.inputs(**options)), whole)


def test_heads_of_queries_that_are_not_adjacent():
    case = make_case(MIXED, Shape())
    wide = torch.randn(case.q.shape[0], 11, 24)
    wide[:, 2:8] = case.q
    case.q = wide[:, 2:8]
    check(case, window=3)


@settings(max_examples=num_examples(daily=15, exhaustive=300))
@given(st.data())
def test_random_shapes(data):
    """Of one head size and group, since kernels are compiled for them."""
    draw = data.draw
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 20) | st.just(1))
        attend_from = draw(st.just(0) | st.integers(0, start + count))
        sequences.append(Sequence(start=start, count=count, attend_from=attend_from))
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        heads=3 * kv_heads,
        kv_heads=kv_heads,
        block_size=draw(st.sampled_from([1, 2, 3, 16])),
        head_major=draw(st.booleans()),
    )
    numbers = st.none() | st.integers(1, 30)
    mask = dict(zip(MASK_OPTIONS, (draw(numbers), draw(st.just(0) | st.integers(0, 12)), draw(numbers)), strict=True))
    sinks = torch.randn(shape.heads) if draw(st.booleans()) else None
    check(make_case(sequences, shape, draw(st.integers(0, 99))), sink_logits=sinks, **mask)


def test_wrong_arguments_name_what_does_not_fit():
    case = make_case(MIXED, Shape())
    with pytest.raises(ValueError, match="float64"):
        attend(replace(case, q=case.q.double()))
    with pytest.raises(ValueError, match="multiple of KV heads"):
        attend(replace(case, q=case.q[:, :3]))
    for options, words in (
        ({"window": 0}, "window is 0"),
        ({"num_sink_tokens": -1}, "num_sink_tokens is -1"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(case, **options)
    case.batch.block_size = 5
    with pytest.raises(ValueError, match="batch says 5"):
        attend(case)


OF_SEQUENCES = ("block_table", "first_block", "attend_from", "start")
ON_THE_HOST = (*(f"{name}_host" for name in OF_SEQUENCES), "count_host")


def shape_of(kv_format: str, dtype: torch.dtype) -> Shape:
    return replace(SHAPE, dtype=dtype, size=16 if (kv_format, dtype) in MODELS else SHAPE.size)


def caches_of(case: Case, kv_format: str, *, head_major: bool = True) -> dict[str, Any]:
    return quantised(case, FORMATS_BY_NAME[kv_format], head_major=head_major).arguments if kv_format else {}


def attend_cpu(inputs: PagedInputs) -> torch.Tensor:
    inputs.batch.scratch.clear()
    assert fits_cpu_kernel(inputs)
    return paged_attention_cpu(inputs)


def check_cpu(inputs: PagedInputs) -> torch.Tensor:
    """Stored numbers are exact in all products; where a processor multiplies 8-bit integers, queries and weights have 16 bits."""
    out, expected = attend_cpu(inputs), paged_attention_reference(inputs)
    assert bool(expected.isfinite().all())
    limit = max(TOLERANCE[inputs.q.dtype], 0.0 if inputs.k_scale is None else 3e-4)
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)
    return out


@every_kind
def test_contexts_around_the_edges_of_units_and_key_tiles(kv_format: str, dtype: torch.dtype) -> None:
    ends = [edge + step for edge in (KEY_TILE, UNIT_KEYS, 3 * UNIT_KEYS) for step in (-1, 0, 1)]
    decoding = [Sequence(start=end - 1, count=1) for end in ends]
    prompts = [Sequence(start=end - 40, count=40) for end in ends[2::3]]
    shape = replace(shape_of(kv_format, dtype), head_major=dtype is not BF16)
    case = make_case([*decoding, *prompts, Sequence(start=250, count=3), Sequence(start=0, count=0)], shape)
    caches = caches_of(case, kv_format)
    for mask in LONG_MASKS:
        check_cpu(case.inputs(**caches, **mask))


@every_kind
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(kv_format: str, dtype: torch.dtype) -> None:
    """For any number of threads, and of slots that share a row."""
    sequences = [Sequence(start=900, count=1), Sequence(start=20, count=200), Sequence(start=700, count=2)]
    case = make_case(sequences, shape_of(kv_format, dtype))
    caches, mask = caches_of(case, kv_format), LONG_MASKS[3 if dtype is F32 else 0]
    expected = check_cpu(case.inputs(**caches, **mask))
    for num_threads in (1, 3, 40):
        with kernel_threads(num_threads):
            assert torch.equal(attend_cpu(case.inputs(**caches, **mask)), expected)
    batch, row = case.batch, 0
    for b, sequence in enumerate(sequences):
        own = {name: getattr(batch, name)[b : b + 1] for name in (*OF_SEQUENCES, *ON_THE_HOST)}
        offset = torch.tensor([0, sequence.count], dtype=torch.int32)
        rows = slice(row, row + sequence.count)
        alone = replace(case, q=case.q[rows], batch=replace(batch, **own, query_offset=offset, scratch={}))
        assert torch.equal(attend_cpu(alone.inputs(**caches, **mask)), expected[rows])
        row += sequence.count


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(dtype: torch.dtype) -> None:
    """Rows see the same key tiles, whichever rows are beside them."""
    case = make_case([Sequence(start=0, count=300)], shape_of("", dtype))
    expected = attend_cpu(case.inputs())
    for start, end in ((0, 50), (50, 300), (0, 129), (129, 300), (0, 160), (160, 300)):
        batch = replace(
            case.batch,
            start=torch.tensor([start], dtype=torch.int32),
            start_host=[start],
            query_offset=torch.tensor([0, end - start], dtype=torch.int32),
            count_host=[end - start],
            scratch={},
        )
        assert torch.equal(attend_cpu(replace(case, q=case.q[start:end], batch=batch).inputs()), expected[start:end])


def test_a_batch_without_host_lists_decodes_every_row() -> None:
    """As recorded steps do; also with more rows than are decoded otherwise, and with a sequence that has no row."""
    sequences = [Sequence(start=600, count=1), Sequence(start=30, count=1), Sequence(start=5, count=20)]
    case = make_case(sequences, shape_of("", F32))
    expected = check_cpu(case.inputs())
    batch = case.batch
    batch.query_offset = torch.tensor([0, 1, 2, 22, 22], dtype=torch.int32)
    for name in OF_SEQUENCES:
        values = getattr(batch, name)
        setattr(batch, name, torch.cat([values, values[:1]]))
    for name in ON_THE_HOST:
        setattr(batch, name, [])
    torch.testing.assert_close(attend_cpu(case.inputs()), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_format", FORMATS_BY_NAME)
def test_outliers_and_rows_of_very_different_sizes(kv_format: str) -> None:
    """Scales differ by token: one token's large key or value costs the others nothing."""
    dtype = {"fp8": F32, "int8": BF16, "int4": F16}[kv_format]
    case = make_case([Sequence(start=300, count=1), Sequence(start=5, count=30)], shape_of(kv_format, dtype))
    sizes = torch.logspace(-3, 1, case.v_cache.shape[0])[:, None, None, None]
    case.v_cache.mul_(sizes)
    case.k_cache.mul_(sizes.flip(0).clamp(max=1.0))
    caches = caches_of(case, kv_format)
    caches["v_scale"][0] = 0.0  # rows of zeros
    check_cpu(case.inputs(**caches))


SIZES = [(11, 1, 40, 96, 5), (2, 2, 33, 7, 5), (1, 1, 16, 16, 4), (2, 2, 34, 6, 1), (3, 1, 130, 70, 16)]


@pytest.mark.parametrize(
    ("kv_format", "sizes"),
    some_daily(
        [(kv_format, sizes) for kv_format in FORMATS for sizes in SIZES if sizes[2] % 2 == 0 or not kv_format],
        daily=[("", SIZES[0]), ("", SIZES[1]), ("int8", SIZES[0]), ("int4", SIZES[4])],
    ),
)
def test_soft_caps_sinks_groups_widths_and_block_sizes(kv_format: str, sizes: tuple[int, ...]) -> None:
    heads, kv_heads, size, v_size, block_size = sizes
    # float16 is never multiplied in pairs, and values of an int4 cache are, on all processors
    dtype = F32 if v_size == 96 else F16 if kv_format == "int4" else BF16
    shape = Shape(heads=heads, kv_heads=kv_heads, size=size, v_size=v_size, block_size=block_size, dtype=dtype)
    sequences = [Sequence(start=40, count=1), Sequence(start=3, count=21), Sequence(start=35, count=2, attend_from=34)]
    case = make_case(sequences, shape)
    caches = caches_of(case, kv_format, head_major=size != 40)
    check_cpu(case.inputs(**caches, soft_cap=3.0, sink_logits=torch.linspace(-2, 2, heads)))


def test_elements_that_are_not_adjacent_are_left_to_torch() -> None:
    case = make_case([Sequence(start=9, count=2)], SHAPE)
    shape = case.k_cache.shape
    apart = torch.empty(*shape[:3], 2 * shape[3])[..., ::2].copy_(case.k_cache)
    assert not fits_cpu_kernel(case.inputs(k_cache=apart))
    assert not fits_cpu_kernel(replace(case, q=torch.empty(2, 6, 48)[..., ::2]).inputs())


@torch.inference_mode()
def test_a_recorded_step_calls_nothing_but_kernels() -> None:
    case = make_case([Sequence(start=70, count=1), Sequence(start=9, count=1)], replace(SHAPE, dtype=BF16))
    caches, slots = caches_of(case, "int8"), case.batch.slots
    k, v = torch.randn(2, 2, 24).bfloat16(), torch.randn(2, 2, 24).bfloat16()

    def step() -> torch.Tensor:
        q = prepare_qkv(QkvInputs(q=case.q, k=k, v=v, slots=slots, preparation=Preparation(hadamard=True), **caches))
        return paged_attention(replace(case, q=q).inputs(**caches))

    program, result = record_program(step, ReplayMemory())
    assert program.num_calls == 0
    k.normal_()
    v.normal_()
    expected = step()
    result.fill_(float("nan"))
    program.replay()
    assert torch.equal(result, expected)


def small_case() -> None:
    sequences = [Sequence(start=600, count=1), Sequence(start=0, count=1), Sequence(start=30, count=50)]
    for kv_format in FORMATS if ALL_TESTS else ("", "int4"):
        for dtype in (F32, BF16) if ALL_TESTS else (BF16,):
            case = make_case(sequences, replace(SHAPE, size=22 if kv_format else 23, dtype=dtype))
            assert uses_cpu_kernels(case.q)
            check_cpu(case.inputs(**caches_of(case, kv_format), window=400, num_sink_tokens=3))
