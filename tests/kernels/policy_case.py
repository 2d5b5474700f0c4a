"""Policy attention against its reference, over random compact block tables in a cache that is NaN everywhere else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.paged_case import TOLERANCE, Shape, empty_caches
from tests.kernels.quantised_case import FORMATS_BY_NAME, quantised
from transom_kernels.policy_attention import PolicyBatch
from transom_kernels.policy_attention.inputs import PolicyInputs
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference


@dataclass(kw_only=True)
class PolicySequence:
    """`count` queries at positions from `start`; `dropped` are logical blocks that have left the table."""

    start: int
    count: int = 1
    window: int = 0
    sinks: int = 0
    dropped: tuple[int, ...] = ()


@dataclass(kw_only=True)
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
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(shape.dtype)

    size = shape.block_size
    kept = [[block for block in range(-(-(s.start + s.count) // size)) if block not in s.dropped] for s in sequences]
    free = list(range(sum(map(len, kept)) + 3))
    rng.shuffle(free)
    k_cache, v_cache = empty_caches(shape, len(free))
    width = max(map(len, kept)) + 1
    tables = torch.full((len(sequences), width), -1, dtype=torch.int32)
    key_blocks = torch.zeros_like(tables)
    for b, (s, blocks) in enumerate(zip(sequences, kept, strict=True)):
        for column, logical in enumerate(blocks):
            block = free.pop()
            tables[b, column], key_blocks[b, column] = block, logical
            filled = min(size, s.start + s.count - logical * size)
            k_cache[block, :filled] = normal(filled, shape.kv_heads, shape.size)
            v_cache[block, :filled] = normal(filled, shape.kv_heads, shape.v_size or shape.size)
    counts = [s.count for s in sequences]
    batch = PolicyBatch(
        block_size=size,
        block_table=tables,
        key_blocks=key_blocks,
        num_columns=torch.tensor([len(blocks) for blocks in kept], dtype=torch.int32),
        window=torch.tensor([s.window for s in sequences], dtype=torch.int32),
        sinks=torch.tensor([s.sinks for s in sequences], dtype=torch.int32),
        start=torch.tensor([s.start for s in sequences], dtype=torch.int32),
        query_offset=torch.tensor([0, *counts]).cumsum(0).int(),
        count_host=counts,
    )
    queries = [normal(sum(counts), shape.heads, shape.size) for _ in range(2)]
    return PolicyCase(q=queries[0], sink_q=queries[1], k_cache=k_cache, v_cache=v_cache, batch=batch)


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
