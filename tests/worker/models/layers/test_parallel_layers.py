"""Layers on several ranks against the same layer on one."""

from __future__ import annotations

import pytest
import torch

from tests.thread_ranks import RankThreads
from transom_core.model_config.sharding import width_share
from transom_worker.models.layers.embedding import Embedding, make_embedding
from transom_worker.models.layers.linear import make_linear
from transom_worker.models.layers.norm import AllHeadsQkNorm, ShardedAllHeadsQkNorm
from transom_worker.models.layers.parallel_linear import make_row_parallel
from transom_worker.models.parallel import SINGLE_RANK, Parallel


def part(total: int, parallel: Parallel) -> slice:
    return width_share(total, parallel.rank, parallel.size)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_row_parallel_adds_bias_and_residual_once(size: int) -> None:
    torch.manual_seed(0)
    weight, bias, residual, x = torch.randn(11, 50), torch.randn(11), torch.randn(4, 11), torch.randn(4, 50)
    whole = make_linear(weight, bias)

    def on_rank(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        own = part(50, parallel)
        linear = make_row_parallel(weight[:, own], bias if parallel.is_first else None, comm=parallel.comm)
        return linear(x[:, own]), linear.add_to(residual, x[:, own])

    threads = RankThreads(size)
    before = residual.clone()
    for plain, added in threads.on_each(on_rank):
        torch.testing.assert_close(plain, whole(x))
        torch.testing.assert_close(added, whole.add_to(residual, x))
    assert torch.equal(residual, before)
    threads.close()


def test_one_rank_has_plain_layers() -> None:
    weight = torch.randn(4, 4)
    assert type(make_row_parallel(weight, comm=SINGLE_RANK)) is type(make_linear(weight))
    assert type(make_embedding(torch.randn(4, 4), first_id=0, comm=SINGLE_RANK)) is Embedding


@pytest.mark.parametrize("size", [2, 5])
def test_every_token_is_looked_up_once(size: int) -> None:
    table, ids = torch.randn(13, 6).bfloat16(), torch.tensor([0, 12, 5, 5, 7, 1])

    def on_rank(parallel: Parallel) -> torch.Tensor:
        rows = part(13, parallel)
        return make_embedding(table[rows], first_id=rows.start, comm=parallel.comm, scale=2.5)(ids)

    threads = RankThreads(size)
    wanted = Embedding(table, scale=2.5)(ids)
    assert all(torch.equal(got, wanted) for got in threads.on_each(on_rank))
    assert ids.tolist() == [0, 12, 5, 5, 7, 1]
    threads.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_over_heads_that_ranks_share(dtype: torch.dtype) -> None:
    """Four query heads and one key head, which all ranks hold and one counts."""
    torch.manual_seed(1)
    x = torch.randn(9, 5, 8).to(dtype)
    query, key = torch.rand(32) + 0.5, torch.rand(8) + 0.5
    wanted = x.clone()
    AllHeadsQkNorm(query, key, 1e-5)(wanted)

    def on_rank(parallel: Parallel) -> torch.Tensor:
        heads = part(4, parallel)
        norm = ShardedAllHeadsQkNorm(
            query[heads.start * 8 : heads.stop * 8],
            key,
            1e-5,
            widths=(32, 8),
            counts_keys=parallel.is_first,
            comm=parallel.comm,
        )
        own = torch.cat([x[:, heads], x[:, 4:]], dim=1)
        norm(own)
        return own

    threads = RankThreads(3)
    parts = threads.on_each(on_rank)
    got = torch.cat([*(own[:, :-1] for own in parts), parts[0][:, -1:]], dim=1)
    torch.testing.assert_close(got, wanted)
    assert all(torch.equal(own[:, -1], parts[0][:, -1]) for own in parts)
    threads.close()
