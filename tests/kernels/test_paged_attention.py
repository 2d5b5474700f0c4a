"""`paged_attention` on CPUs: torch against attention written out key by key, and the CPU kernels against torch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.kernels.paged_case import MASK_OPTIONS, TOLERANCE, Case, Sequence, Shape, make_case
from tests.matrices import matrix
from transom_kernels.launch import prefer
from transom_kernels.paged_attention import paged_attention, reference
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference


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


def check(case: Case, *, brute: bool = True, **options) -> None:
    inputs = case.inputs(**options)
    expected, limit = paged_attention_reference(inputs), TOLERANCE[case.q.dtype]
    if brute:
        torch.testing.assert_close(expected.double(), brute_force(case, inputs), atol=limit / 2, rtol=limit / 2)
    for _ in range(2):  # the second call reuses what the first one left in scratch
        torch.testing.assert_close(attend(case, **options), expected, atol=limit, rtol=limit)


MIXED = [
    Sequence(start=0, count=1),
    Sequence(start=9, count=1),
    Sequence(start=0, count=7),
    Sequence(start=6, count=15),
]
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


@pytest.mark.parametrize("mask", [{"window": 8}, {"chunk": 8}, {"window": 8, "num_sink_tokens": 3}], ids=str)
def test_edges_of_window_and_chunk(mask):
    sequences = []
    for length in (1, 2, 6, 7, 8, 9, 15, 16, 17):
        sequences.append(Sequence(start=length - 1, count=1))
        sequences.append(Sequence(start=0, count=length))
        sequences.append(Sequence(start=length, count=3))
    check(make_case(sequences, Shape(heads=3, kv_heads=1)), **mask)


@pytest.mark.parametrize("mask", [{}, {"window": 6}, {"window": 6, "num_sink_tokens": 2}], ids=str)
def test_attend_from_hides_keys_and_blinds_rows(mask):
    sequences = [Sequence(start=3, count=1)]
    for attend_from in (0, 3, 4, 5, 9, 10, 11, 12, 14):
        sequences += [Sequence(start=10, count=count, attend_from=attend_from) for count in (1, 4, 11)]
    check(make_case(sequences, Shape(heads=3, kv_heads=1)), **mask)


@pytest.mark.parametrize("sinks", [0, 3, 4, 5])
def test_window_group_whose_old_blocks_are_gone(sinks):
    """Keys before the window are NaN or not in the table at all; sink blocks hold the sinks."""
    sequences = [
        Sequence(start=30, count=1, first_key=30 - 6),
        Sequence(start=17, count=16, first_key=17 - 6),
        Sequence(start=2, count=3),
    ]
    shape = Shape(num_sink_blocks=-(-sinks // 4))
    check(make_case(sequences, shape), window=7, num_sink_tokens=sinks)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_missing_block_is_an_error(kernels):
    case = make_case([Sequence(start=30, count=1, first_key=24)], Shape())
    with prefer(kernels), pytest.raises(IndexError, match="reads logical blocks"):
        attend(case)


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


@settings(max_examples=num_examples(daily=15, exhaustive=300), deadline=None)
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
    check(make_case(sequences, shape, draw(st.integers(0, 99))), brute=False, sink_logits=sinks, **mask)


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
