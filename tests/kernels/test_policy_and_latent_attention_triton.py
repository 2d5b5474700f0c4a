"""The Triton kernels of `policy_attention` and of latent attention against their references, in the interpreter (or on a GPU where
there is one)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.how_many import ALL_TESTS
from tests.kernels.paged_case import Shape
from tests.kernels.test_latent_attention import filled_cache, latent_inputs, random_slots, rows_case
from tests.kernels.test_policy_attention import PolicyCase, PolicySequence, check_policy, make_policy_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, quantised
from tests.matrices import matrix
from transom_kernels.latent_attention import gpu, select_rows
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.reference import (
    latent_attention_reference,
    pool_rows_reference,
    select_entries_reference,
)
from transom_kernels.launch import prefer
from transom_kernels.policy_attention import add_block_mass, policy_attention
from transom_kernels.policy_attention.triton.launcher import add_block_mass_triton, policy_attention_triton

SHAPE = Shape(block_size=8)
ONE_HEAD = replace(SHAPE, heads=3, kv_heads=1)  # the interpreter takes twice as long for two
SEQUENCES = [
    PolicySequence(start=90, window=30, sinks=10, dropped=tuple(range(2, 7))),
    PolicySequence(start=90, count=25, window=30, sinks=10, dropped=tuple(range(2, 7))),
    PolicySequence(start=0),
    PolicySequence(start=63, count=0),
    PolicySequence(start=71, dropped=(1, 4)),
    PolicySequence(start=40, count=3, sinks=12, dropped=(3,)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tables_with_gaps_windows_and_sinks(dtype: torch.dtype) -> None:
    """The other formats have a part of the sequences every day: which keys are read does not depend on the format."""
    is_whole = ALL_TESTS or dtype is torch.float32
    shape, sequences = (ONE_HEAD, SEQUENCES) if is_whole else (SHAPE, SEQUENCES[2:])
    check(make_policy_case(sequences, replace(shape, dtype=dtype)), with_sink_query=dtype is torch.float32)


def test_soft_cap_sink_logits_and_odd_sizes() -> None:
    shape = Shape(heads=3, kv_heads=1, size=33, v_size=7, block_size=5)
    sink_logits = torch.tensor([40.0, float("-inf"), 1.0])
    sequences = [PolicySequence(start=30, count=9, window=12, sinks=6, dropped=(2, 3)), *SEQUENCES[2:5]]
    check(make_policy_case(sequences, shape), soft_cap=3.0, sink_logits=sink_logits)


def check(case: PolicyCase, **how: Any) -> None:
    out, _ = check_policy(policy_attention_triton, add_block_mass_triton, case, **how)
    assert bool(out.isfinite().all())


def at_block_edges(window: int, sinks: int, *, size: int) -> list[PolicySequence]:
    """Rows whose positions lie on both sides of a block's edge, alone and in chunks; blocks that none sees have left the table."""
    found = []
    for start, count in ((5 * size - 1, 1), (5 * size, 1), (4 * size + 3, size + 1)):
        first_seen = max(0, start - window + 1) if window else 0
        dropped = tuple(range(-(-sinks // size), first_seen // size))
        found.append(PolicySequence(start=start, count=count, window=window, sinks=sinks, dropped=dropped))
    return found


@pytest.mark.parametrize(
    ("kv_format", "widths", "sinks", "window", "dtype"),
    matrix(
        list(FORMATS_BY_NAME),
        [(16, 16), (80, 48), (128, 128)],
        [0, 3, 8, 11],
        [0, 1, 7, 8, 9, 25],
        [torch.float32, torch.bfloat16, torch.float16],
        strength=1,
    ),
)
def test_quantised_caches(kv_format: str, widths: tuple[int, int], sinks: int, window: int, dtype: torch.dtype) -> None:
    """With a second query, as beyond the trained length, and with slots that must not be read poisoned."""
    shape = Shape(heads=3, kv_heads=1, size=widths[0], v_size=widths[1], block_size=8, dtype=dtype)
    case = make_policy_case(at_block_edges(window, sinks, size=8), shape)
    options: dict[str, Any] = {"soft_cap": 3.0, "sink_logits": torch.tensor([40.0, float("-inf"), 1.0])}
    check(case, kv_format=kv_format, with_sink_query=sinks > 3, **(options if window > 7 else {}))


@pytest.mark.parametrize("kv_format", FORMATS_BY_NAME)
def test_the_operators_give_quantised_caches_to_triton(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, which gathers every table, is not asked."""
    for name in ("policy_attention_reference", "add_block_mass_reference"):
        monkeypatch.delattr(f"transom_kernels.policy_attention.op.{name}")
    case = make_policy_case(SEQUENCES[:1], SHAPE)
    caches, statistics = quantised(case, FORMATS_BY_NAME[kv_format]), torch.empty(1, SHAPE.heads, 2)
    with prefer("interpreted"):
        inputs = case.inputs(statistics=statistics, **caches.arguments)
        policy_attention(inputs)
        mass = torch.zeros(case.batch.block_table.shape)
        add_block_mass(mass, inputs)
    assert float(mass.sum()) == pytest.approx(SHAPE.heads, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "sizes", "counts", "split"),
    matrix(
        [torch.float32, torch.bfloat16],
        [(1, 1, 1, 0), (5, 4, 7, 3), (3, 20, 36, 36)],
        ["one each", "one sequence", "both"],
        [1, 16, 128],
        strength=1,
    ),
)
def test_latent_attention(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], counts: str, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program, and by several that share the rows of a sequence's only query."""
    monkeypatch.setattr(gpu, "SPLIT_ROWS", split)
    num_queries, heads, window, entries = sizes
    inputs = latent_inputs(num_queries, window, entries, heads=heads, width=20, dtype=dtype)
    of_sequences = {"one each": [], "one sequence": [num_queries], "both": [1, 0, num_queries - 1]}
    inputs = replace(inputs, counts=of_sequences[counts])
    out, wanted = latent_attention_triton(inputs), latent_attention_reference(inputs)
    limit = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(out.float(), wanted.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("has_entries", [True, False])
def test_neither_neighbours_nor_wider_tables_change_a_querys_bits(
    has_entries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of entries, or of rows where there are no entries, is as wide as the longest sequence of a step wants."""
    monkeypatch.setattr(gpu, "SPLIT_ROWS", 8)
    inputs = replace(latent_inputs(6, 20, 9), counts=[1, 1, 3, 1])
    if not has_entries:
        inputs = replace(inputs, entry_cache=None, entry_slots=None)
    together = latent_attention_triton(inputs)
    for rows, count in ((slice(0, 1), 1), (slice(1, 2), 1), (slice(2, 5), 3), (slice(5, 6), 1)):
        alone = replace(inputs, q=inputs.q[rows], window_slots=inputs.window_slots[rows], counts=[count])
        if inputs.entry_slots is None:
            alone = replace(alone, window_slots=F.pad(alone.window_slots, (0, 29), value=-1))
        else:
            alone = replace(alone, entry_slots=F.pad(inputs.entry_slots[rows], (0, 29), value=-1))
        assert latent_attention_triton(alone).equal(together[rows])


@pytest.mark.parametrize("counts", [[], [3]], ids=["split", "whole"])
def test_sinks_of_any_size_and_queries_that_see_nothing(counts: list[int]) -> None:
    inputs = replace(latent_inputs(3, 9, 5), sink_logits=torch.tensor([float("-inf"), -60.0, 60.0, 0.0, 1.0, 2.0]))
    inputs = replace(inputs, counts=counts)
    out = latent_attention_triton(inputs)
    torch.testing.assert_close(out[1:], latent_attention_reference(inputs)[1:], atol=1e-5, rtol=1e-5)
    assert out[0].eq(0).all()


@pytest.mark.parametrize(("heads", "num_entries", "top_k"), [(1, 1, 1), (16, 9, 4), (20, 70, 9)])
def test_select_entries(heads: int, num_entries: int, top_k: int) -> None:
    slots = torch.stack([torch.randperm(72)[:num_entries] for _ in range(2)])
    sequence, visible = torch.tensor([0, 1, 1]), torch.tensor([num_entries, num_entries // 2, 0])
    inputs = (torch.randn(3, heads, 24), torch.randn(3, heads), filled_cache(slots, 24), slots, sequence, visible)
    wanted = select_entries_reference(*inputs, top_k=top_k, scale=0.2)
    assert select_entries_triton(*inputs, top_k=top_k, scale=0.2).sort().values.equal(wanted.sort().values)


@pytest.mark.parametrize(("score_bytes", "rounds"), [(1, 1), (3 * 4 * 150, 1), (2**20, 2), (2**20, 8)])
def test_entries_are_the_same_however_scores_are_cut(
    score_bytes: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = torch.stack([torch.randperm(150) for _ in range(2)])
    cache, visible = filled_cache(slots, 16), torch.tensor([150, 1, 0, 64, 149, 65, 128])
    inputs = (torch.randn(7, 4, 16), torch.rand(7, 4), cache, slots, torch.tensor([0, 1, 0, 1, 1, 0, 0]), visible)
    wanted = select_entries_triton(*inputs, top_k=20, scale=0.2)
    monkeypatch.setattr(gpu, "SCORE_BYTES", score_bytes)
    monkeypatch.setattr("transom_kernels.latent_attention.gpu.score_rounds", lambda _: rounds)
    largest, empty = [], torch.empty

    def noted(size: Any, **kinds: Any) -> torch.Tensor:
        largest.append(size)
        return empty(size, **kinds)

    monkeypatch.setattr(torch, "empty", noted)
    assert select_entries_triton(*inputs, top_k=20, scale=0.2).equal(wanted)
    assert largest == [(min(7, max(1, score_bytes // 600)), 150)]


@pytest.mark.parametrize("top_k", [5, 29, 40])
def test_select_rows(top_k: int) -> None:
    case = rows_case([(0, 4), (0, 0), (28, 2)], 3)
    inputs = (case.q, torch.randn(6, 9), case.k_cache, case.batch)
    with prefer("reference"):
        wanted = select_rows(*inputs, top_k=top_k)
    assert select_rows(*inputs, top_k=top_k).equal(wanted)


@pytest.mark.parametrize(("groups", "ratio", "width"), [(1, 1, 5), (1, 6, 10), (2, 4, 150), (1, 36, 7)])
def test_pool_rows(groups: int, ratio: int, width: int) -> None:
    slots = random_slots(4, groups * ratio, fewest=1)
    first, second = (filled_cache(slots, groups * width) for _ in range(2))
    bias = torch.randn(ratio, groups * width)
    torch.testing.assert_close(
        pool_rows_triton(first, second, slots, bias), pool_rows_reference(first, second, slots, bias)
    )
