"""A sharded vocabulary gives the same tokens as a whole one, and the same bits of log-probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.thread_ranks import ThreadComm, on_ranks
from tests.worker.sampling.test_sampler import KINDS
from transom_core.contract import SamplingParams
from transom_kernels.launch import prefer
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.sampling.logprobs import token_logprobs
from transom_worker.sampling.sampler import Sampler, SamplerOutput
from transom_worker.sampling.sharded import ShardedSampler

EOS = 3
STEPS = 3
GREEDY, NOISY = SamplingParams(temperature=0.0), SamplingParams()
ALL_KINDS = [
    *KINDS.values(),
    GREEDY,
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, min_tokens=2, stop_token_ids=(5,)),
]


def random_cuts(rng: np.random.Generator, vocab_size: int, size: int) -> list[int]:
    """Where slices of at least one id begin and end."""
    inner = rng.choice(np.arange(1, vocab_size), size - 1, replace=False)
    return [0, *sorted(inner.tolist()), vocab_size]


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Some rows coarse, so that there are ties, and some with much forbidden."""
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    coarse, forbidden = rng.random(num_rows) < 0.3, rng.random(num_rows) < 0.2
    logits[coarse] = np.round(logits[coarse] / 4)
    logits[forbidden[:, None] & (rng.random(logits.shape) < 0.9)] = -np.inf
    return torch.from_numpy(logits)


def run(
    sampler: Sampler, kinds: list[SamplingParams], steps: list[torch.Tensor], masks: list[bytes | None]
) -> list[SamplerOutput]:
    for seq_id, params in enumerate(kinds):
        sampler.add(seq_id, token_ids=[1, 2, 1], num_prompt_tokens=2, params=params, seed=seq_id * 7, choice_index=1)
    results = []
    for logits, mask in zip(steps, masks, strict=True):
        results.append(sampler.sample(logits, range(len(kinds)), mask))
        for seq_id, token_id in enumerate(results[-1].token_ids):
            sampler.append([seq_id], [token_id])
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@settings(deadline=None, max_examples=num_examples(daily=10, exhaustive=100))
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([11, 64, 200, 1000]), num_rows=st.integers(1, 12))
def test_any_rows_over_any_slices(size: int, seed: int, vocab_size: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [ALL_KINDS[kind] for kind in rng.integers(0, len(ALL_KINDS), num_rows)]
    steps = [random_logits(rng, num_rows, vocab_size) for _ in range(STEPS)]
    masks = [rng.bytes(num_rows * -(-vocab_size // 8)) if rng.random() < 0.2 else None for _ in range(STEPS)]
    cuts = random_cuts(rng, vocab_size, size)

    def one_rank(parallel: Parallel) -> list[SamplerOutput]:
        first, end = cuts[parallel.rank : parallel.rank + 2]
        sampler = ShardedSampler(parallel, first_id=first, eos_token_ids=(EOS,))
        return run(sampler, kinds, [logits[:, first:end] for logits in steps], masks)

    expected = run(Sampler(eos_token_ids=(EOS,)), kinds, steps, masks)
    found = on_ranks(size, one_rank)
    assert repr(found[0]) == repr(expected)  # log-probabilities may be nan where everything is forbidden
    for other in found[1:]:
        assert [step.token_ids for step in other] == [step.token_ids for step in expected]
        assert all(step.logprobs == [] for step in other)


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_that_stay_on_the_device_are_the_same(size: int) -> None:
    """Local and gathered rows in any order, with grammar masks; the host reads no token."""
    rng, vocab_size = np.random.default_rng(5), 200
    kinds = [params for params in ALL_KINDS if params.logprobs is None]
    logits = random_logits(rng, len(kinds), vocab_size)
    for mask in (None, rng.bytes(len(kinds) * -(-vocab_size // 8))):
        cuts = random_cuts(rng, vocab_size, size)

        def one_rank(parallel: Parallel, cuts: list[int] = cuts, mask: bytes | None = mask) -> list[int]:
            first, end = cuts[parallel.rank : parallel.rank + 2]
            sampler = ShardedSampler(parallel, first_id=first, eos_token_ids=(EOS,))
            for seq_id, params in enumerate(kinds):
                sampler.add(
                    seq_id, token_ids=[1, 2, 1], num_prompt_tokens=2, params=params, seed=seq_id * 7, choice_index=1
                )
            launched = sampler.launch(logits[:, first:end].clone(), range(len(kinds)), mask)
            assert launched is not None
            return launched.tolist()

        with prefer("reference"):
            expected = run(Sampler(eos_token_ids=(EOS,)), kinds, [logits.clone()], [mask])[0].token_ids
            assert on_ranks(size, one_rank) == [expected] * size


def share(parallel: Parallel, num_ids: int) -> slice:
    """A rank's slice of the vocabulary."""
    return slice(parallel.rank * num_ids // parallel.size, (parallel.rank + 1) * num_ids // parallel.size)


@pytest.mark.parametrize(
    ("kinds", "size", "exchanged"),
    [
        (
            [GREEDY, NOISY, SamplingParams(top_k=5), SamplingParams(temperature=0.5), KINDS["penalised"]],
            2,
            (2 * 500, 3),
        ),
        ([GREEDY, NOISY], 3, (0, 1)),  # a step of local rows is one all-reduce
    ],
    ids=["gathered", "local"],
)
def test_only_rows_that_need_it_are_gathered(
    kinds: list[SamplingParams], size: int, exchanged: tuple[int, int]
) -> None:
    """`exchanged` are the elements that each rank gathers, and the collectives of the step."""

    def one_rank(parallel: Parallel) -> tuple[int, int]:
        own = share(parallel, 1000)
        run(ShardedSampler(parallel, first_id=own.start), kinds, [torch.zeros(len(kinds), 1000)[:, own]], [None])
        assert isinstance(parallel.comm, ThreadComm)
        return parallel.comm.gathered_elements, parallel.comm.num_operations

    assert on_ranks(size, one_rank) == [exchanged] * size


@pytest.mark.parametrize("size", [1, 3])
def test_log_probabilities_of_prompts(size: int) -> None:
    logits = torch.randn(150, 500, generator=torch.Generator().manual_seed(1))
    chosen = [row % 500 for row in range(150)]

    def one_rank(parallel: Parallel) -> list:
        own = share(parallel, 500)
        return list(ShardedSampler(parallel, first_id=own.start).logprob_table(logits[:, own], chosen, 3))

    expected = on_ranks(1, one_rank)[0]
    assert expected == token_logprobs(logits, chosen, [3] * 150)
    assert on_ranks(size, one_rank) == [expected, *[[]] * (size - 1)]
