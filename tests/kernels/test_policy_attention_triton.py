"""The Triton kernels of `policy_attention` against their references, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.paged_case import Shape
from tests.kernels.policy_case import PolicyCase, PolicySequence, make_policy_case
from transom_kernels.policy_attention.gpu import add_block_mass_triton, policy_attention_triton
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPE = Shape(heads=6, kv_heads=2, size=24, block_size=8)
SEQUENCES = [
    PolicySequence(start=90, window=30, sinks=10, dropped=tuple(range(2, 7))),
    PolicySequence(start=90, count=25, window=30, sinks=10, dropped=tuple(range(2, 7))),
    PolicySequence(start=0),
    PolicySequence(start=63, count=0),
    PolicySequence(start=71, dropped=(1, 4)),
    PolicySequence(start=40, count=3, sinks=12, dropped=(3,)),
]


def check(
    case: PolicyCase, *, with_sink_query: bool = False, sink_logits: torch.Tensor | None = None, **options: Any
) -> None:
    inputs = (case.q, case.k_cache, case.v_cache, case.batch)
    asked = {"scale": 0.3, "sink_q": case.sink_q if with_sink_query else None, **options}
    found, expected = (torch.full((*case.q.shape[:2], 2), float("nan")) for _ in range(2))
    out = policy_attention_triton(*inputs, **asked, sink_logits=sink_logits, statistics=found)
    right = policy_attention_reference(*inputs, **asked, sink_logits=sink_logits, statistics=expected)
    limit = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.float(), right.float(), atol=limit, rtol=limit)
    plain = policy_attention_triton(*inputs, **asked, sink_logits=sink_logits)
    assert torch.equal(plain, out)
    mass, right_mass = (torch.full(case.batch.block_table.shape, 0.5) for _ in range(2))
    add_block_mass_triton(mass, case.q, case.k_cache, case.batch, found, **asked)
    add_block_mass_reference(right_mass, case.q, case.k_cache, case.batch, expected, **asked)
    torch.testing.assert_close(mass, right_mass, atol=10 * limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tables_with_gaps_windows_and_sinks(dtype: torch.dtype) -> None:
    check(make_policy_case(SEQUENCES, replace(SHAPE, dtype=dtype)), with_sink_query=dtype is torch.float32)


def test_soft_cap_sink_logits_and_odd_sizes() -> None:
    shape = Shape(heads=3, kv_heads=1, size=33, v_size=7, block_size=5)
    sink_logits = torch.tensor([40.0, float("-inf"), 1.0])
    check(make_policy_case(SEQUENCES[1:5], shape), soft_cap=3.0, sink_logits=sink_logits)
