"""Policy attention against its reference, over random compact block tables in a cache that is NaN everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.paged_case import TOLERANCE, Sequence, Shape, make_case
from tests.kernels.quantised_case import FORMATS_BY_NAME, quantised
from transom_kernels.policy_attention import PolicyBatch, PolicyInputs
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference


@dataclass(kw_only=True)
class PolicySequence:
    """`count` queries at positions from `start`; `dropped` are logical blocks that have left the table."""

    start: int
    count: int = 1
    window: int = 0
    sinks: int = 0
    dropped: tuple[int, ...] = ()


@dataclass
class PolicyCase:
    q: torch.Tensor
    sink_q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PolicyBatch

    def inputs(self, *, scale: float = 0.3, **options: Any) -> PolicyInputs:
        """What implementations are given; `options` may have caches instead of the case's."""
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        return PolicyInputs(q=self.q, batch=self.batch, scale=scale, **{**caches, **options})


def make_policy_case(sequences: list[PolicySequence], shape: Shape, seed: int = 0) -> PolicyCase:
    """An ordinary case whose dropped blocks leave the tables and become NaN."""
    paged = make_case([Sequence(start=s.start, count=s.count) for s in sequences], shape, seed)
    kept = [
        [block for block in range(-(-(s.start + s.count) // shape.block_size)) if block not in s.dropped]
        for s in sequences
    ]
    tables = torch.full((len(sequences), max(map(len, kept)) + 1), -1, dtype=torch.int32)
    key_blocks = torch.zeros_like(tables)
    for b, (s, blocks) in enumerate(zip(sequences, kept, strict=True)):
        own = paged.batch.block_table[b].long()
        tables[b, : len(blocks)], key_blocks[b, : len(blocks)] = own[blocks].int(), torch.tensor(blocks)
        for cache in (paged.k_cache, paged.v_cache):
            cache[own[list(s.dropped)]] = float("nan")
    batch = PolicyBatch(
        block_size=shape.block_size,
        block_table=tables,
        key_blocks=key_blocks,
        num_columns=torch.tensor([len(blocks) for blocks in kept], dtype=torch.int32),
        window=torch.tensor([s.window for s in sequences], dtype=torch.int32),
        sinks=torch.tensor([s.sinks for s in sequences], dtype=torch.int32),
        start=paged.batch.start,
        query_offset=paged.batch.query_offset,
        count_host=paged.batch.count_host,
    )
    sink_q = torch.randn(paged.q.shape, generator=torch.Generator().manual_seed(seed + 1)).to(shape.dtype)
    return PolicyCase(paged.q, sink_q, paged.k_cache, paged.v_cache, batch)


def check_policy(
    attend: Callable[[PolicyInputs], torch.Tensor],
    add_mass: Callable[[torch.Tensor, PolicyInputs], None],
    case: PolicyCase,
    *,
    kv_format: str = "",
    with_sink_query: bool = False,
    rounding: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and mass of an implementation, compared with the reference's, over caches of `kv_format` if one is given.

    `rounding` is the least difference that is accepted.
    """
    options["sink_q"] = case.sink_q if with_sink_query else None
    if kv_format:
        options |= quantised(case, FORMATS_BY_NAME[kv_format]).arguments
    found, expected = (
        case.inputs(**options, statistics=torch.full((*case.q.shape[:2], 2), float("nan"))) for _ in range(2)
    )
    out, right = attend(found), policy_attention_reference(expected)
    limit = max(TOLERANCE[case.q.dtype], rounding)
    torch.testing.assert_close(out.float(), right.float(), atol=limit, rtol=limit)
    mass, right_mass = (torch.full(case.batch.block_table.shape, 0.5) for _ in range(2))
    add_mass(mass, found)
    add_block_mass_reference(right_mass, expected)
    rows = (case.batch.query_offset[1:] - case.batch.query_offset[:-1]).clamp(min=1).float()[:, None]
    torch.testing.assert_close(mass / rows, right_mass / rows, atol=2 * limit, rtol=limit)
    if options.get("sink_logits") is None:
        whole = torch.tensor(case.batch.count_host).float() * case.q.shape[1]
        torch.testing.assert_close((mass - 0.5).sum(dim=1), whole, atol=2 * limit * float(rows.max()), rtol=limit)
    return out, mass
