"""Paged attention on CPUs: torch and the CPU kernels against the reference, and the reference against attention key by key."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from transom_kernels.launch import prefer
from transom_kernels.paged_attention import dense, paged_attention
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule


@pytest.fixture(params=["products", "flash", "kernels"], autouse=True)
def implementation(request, monkeypatch):
    """Both ways in which torch decodes, whichever this CPU would take, and the CPU kernels."""
    monkeypatch.setattr(dense, "flash_is_faster_for_decoding", lambda dtype: request.param == "flash")
    with prefer("auto" if request.param == "kernels" else "reference"):
        yield request.param


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def brute_force(case: Case, rule: MaskRule, scale, soft_cap=None, sink_logits=None) -> torch.Tensor:
    """One query and one head at a time, over those of its dense keys that the rule names."""
    rows = []
    group = case.q.shape[1] // case.k_cache.shape[2]
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
                scores = keys[seen, h // group] @ case.q[len(rows), h].double() * scale
                weights = torch.exp(soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores)
                sink = 0.0 if sink_logits is None else math.exp(float(sink_logits[h]))
                heads.append(weights / (weights.sum() + sink) @ values[seen, h // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def check(case: Case, *, brute: bool = False, soft_cap=None, sink_logits=None, **mask) -> None:
    scale, rule = case.q.shape[-1] ** -0.5, MaskRule(**mask)
    expected = paged_attention_reference(
        case.q,
        case.k_cache,
        case.v_cache,
        case.batch,
        scale=scale,
        rule=rule,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
    )
    if brute:
        torch.testing.assert_close(
            expected.double(), brute_force(case, rule, scale, soft_cap, sink_logits), atol=1e-5, rtol=1e-5
        )
    for _ in range(2):  # the second call reuses what the first one left in scratch
        out = paged_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            case.batch,
            scale=scale,
            soft_cap=soft_cap,
            sink_logits=sink_logits,
            **mask,
        )
        limit = TOLERANCE[case.q.dtype]
        torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


MIXED = [Sequence(start=0, count=1), Sequence(start=9, count=1), Sequence(start=0, count=7), Sequence(start=6, count=5)]
MASKS = [
    {},
    {"window": 1},
    {"window": 5},
    {"chunk": 4},
    {"chunk": 5},
    {"window": 3, "num_sink_tokens": 2},
    {"window": 4, "num_sink_tokens": 5},
    {"chunk": 6, "window": 4, "num_sink_tokens": 1},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("extra", ["plain", "soft_cap", "sinks"])
def test_agrees_with_attention_written_out(mask, extra):
    sink_logits = torch.tensor([0.3, -1.0, 2.0, 0.0]) if extra == "sinks" else None
    soft_cap = 1.5 if extra == "soft_cap" else None
    check(make_case(MIXED, Shape()), brute=True, soft_cap=soft_cap, sink_logits=sink_logits, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sink_of_minus_infinity_is_none(mask):
    """Of some heads or of all; a query that sees no key still gets zeros, not NaN."""
    none = torch.full((4,), -torch.inf)
    keyless = Sequence(start=3, count=1, attend_from=4)
    case = make_case([*MIXED, keyless], Shape())
    check(case, brute=True, sink_logits=torch.tensor([-torch.inf, 0.5, -torch.inf, 60.0]), **mask)
    seen = [
        paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=0.3, sink_logits=sinks, **mask)
        for sinks in (none, None)
    ]
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("mask", [{"window": 8}, {"chunk": 8}, {"window": 8, "num_sink_tokens": 3}], ids=str)
def test_edges_of_window_and_chunk(length, mask):
    sequences = [Sequence(start=length - 1, count=1), Sequence(start=0, count=length), Sequence(start=length, count=3)]
    check(make_case(sequences, Shape(heads=2, kv_heads=1)), brute=True, **mask)


@pytest.mark.parametrize("attend_from", [0, 3, 4, 5, 9, 10, 11, 12, 14])
@pytest.mark.parametrize("mask", [{}, {"window": 6}, {"window": 6, "num_sink_tokens": 2}], ids=str)
def test_attend_from_hides_keys_and_blinds_rows(attend_from, mask):
    sequences = [
        Sequence(start=10, count=4, attend_from=attend_from),
        Sequence(start=10, count=1, attend_from=attend_from),
        Sequence(start=3, count=1),
    ]
    check(make_case(sequences, Shape()), brute=True, **mask)


@pytest.mark.parametrize("sinks", [0, 3, 4, 5])
def test_window_group_whose_old_blocks_are_gone(sinks):
    """Keys before the window are NaN or not in the table at all; sink blocks hold the sinks."""
    sequences = [
        Sequence(start=30, count=1, first_key=30 - 6),
        Sequence(start=17, count=6, first_key=17 - 6),
        Sequence(start=2, count=3),
    ]
    shape = Shape(num_sink_blocks=-(-sinks // 4))
    check(make_case(sequences, shape), brute=True, window=7, num_sink_tokens=sinks)


def test_missing_block_is_an_error():
    case = make_case([Sequence(start=30, count=1, first_key=24)], Shape())
    with pytest.raises(IndexError, match="reads logical blocks"):
        paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("mask", [{}, {"window": 100}], ids=str)
def test_larger_sizes_in_every_dtype_and_layout(dtype, head_major, mask):
    sequences = [
        Sequence(start=0, count=300),
        Sequence(start=200, count=130),
        Sequence(start=511, count=1),
        Sequence(start=515, count=1),
        Sequence(start=16, count=1),
    ]
    shape = Shape(heads=9, kv_heads=3, size=64, block_size=16, dtype=dtype, head_major=head_major)
    check(make_case(sequences, shape), **mask)


def test_values_narrower_than_keys():
    check(make_case(MIXED, Shape(size=12, v_size=8)), brute=True)


def test_non_contiguous_queries():
    case = make_case(MIXED, Shape())
    wide = torch.randn(case.q.shape[0], 9, 8)
    wide[:, 2:6] = case.q
    case.q = wide[:, 2:6]
    check(case)
    check(case, window=3)


def test_no_hybrid_cache_keeps_more_than_the_mask_reads():
    case = make_case([Sequence(start=20, count=1), Sequence(start=8, count=9)], Shape())
    check(case, brute=True, window=5)
    check(case, brute=True)


@settings(
    max_examples=num_examples(daily=30, exhaustive=300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_random_shapes(implementation, data):
    draw = data.draw
    sizes = [10] if implementation == "kernels" else [2, 8, 10]  # a kernel is compiled for each size
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 20) | st.just(1))
        sequences.append(
            Sequence(start=start, count=count, attend_from=draw(st.just(0) | st.integers(0, start + count)))
        )
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        size=draw(st.sampled_from(sizes)),
        block_size=draw(st.sampled_from([1, 2, 3, 16])),
        head_major=draw(st.booleans()),
    )
    mask = {
        "window": draw(st.none() | st.integers(1, 30)),
        "chunk": draw(st.none() | st.integers(1, 30)),
        "num_sink_tokens": draw(st.just(0) | st.integers(0, 12)),
    }
    sinks = torch.randn(shape.heads) if draw(st.booleans()) else None
    check(make_case(sequences, shape, draw(st.integers(0, 99))), sink_logits=sinks, **mask)


def test_wrong_arguments_name_what_does_not_fit():
    case = make_case(MIXED, Shape())
    arguments = (case.k_cache, case.v_cache, case.batch)
    with pytest.raises(ValueError, match="float64"):
        paged_attention(case.q.double(), *arguments, scale=1.0)
    with pytest.raises(ValueError, match="multiple of KV heads"):
        paged_attention(case.q[:, :3], *arguments, scale=1.0)
    with pytest.raises(ValueError, match="window is 0"):
        paged_attention(case.q, *arguments, scale=1.0, window=0)
    with pytest.raises(ValueError, match="sink_logits has shape"):
        paged_attention(case.q, *arguments, scale=1.0, sink_logits=torch.zeros(3))
    case.batch.block_size = 5
    with pytest.raises(ValueError, match="batch says 5"):
        paged_attention(case.q, *arguments, scale=1.0)
