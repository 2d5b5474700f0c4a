"""The sampling kernel against its reference and the worker's own sampler, in the interpreter (or on a GPU)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_kernels.sample.gpu import sample_triton
from transom_kernels.sample.op import SampleParams, sample
from transom_kernels.sample.reference import gumbel, sample_reference
from transom_worker.contract import SamplingParams
from transom_worker.sampling import noise
from transom_worker.sampling.sampler import Sampler


def params_of(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_key: int = 7,
    **changes: torch.Tensor,
) -> SampleParams:
    return SampleParams(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        keys=torch.arange(first_key, first_key + rows) * 0x123456789ABCDEF,
        **changes,
    )


def check(logits: torch.Tensor, params: SampleParams) -> None:
    wanted = sample_reference(logits.clone(), params)
    assert sample_triton(logits.clone(), params).tolist() == wanted.tolist()


def test_noise_is_the_samplers_own() -> None:
    keys, ids = torch.tensor([-5, 3, 2**62]), torch.arange(130)
    wanted = noise.gumbel(keys[:, None], ids[None, :])
    got = torch.tensor([[gumbel(int(key), int(token)) for token in ids] for key in keys], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_greedy_and_noise_alone(vocabulary: int, temperature: float) -> None:
    check(torch.randn(3, vocabulary) * 3, params_of(3, temperature=temperature))


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 5}, {"top_k": 400}, {"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.2},
                {"top_k": 20, "top_p": 0.5, "min_p": 0.05, "temperature": 1.5}], ids=str,
)  # fmt: skip
def test_filters(filters: dict[str, float]) -> None:
    for first_key in range(0, 40, 4):
        check(torch.randn(4, 200) * 2, params_of(4, first_key=first_key, **filters))  # type: ignore[arg-type]


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -0.0, 0.0]] * 30)
    for filters in ({"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.95}):
        check(logits, params_of(30, **filters))
    drawn = sample_triton(logits.clone(), params_of(30, top_k=2))
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def test_of_equal_scores_the_lowest_id() -> None:
    assert sample_triton(torch.zeros(1, 5000), params_of(1, temperature=0.0)).tolist() == [0]


def test_changes_come_first() -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.25, 0.0]])
    changes = {
        "change_row": torch.tensor([0, 0, 1]), "change_id": torch.tensor([1, 2, 0]),
        "change_factor": torch.tensor([4.0, 2.0, 1.0]), "change_minus": torch.tensor([0.0, 1.0, 0.4]),
    }  # fmt: skip
    mine, theirs = logits.clone(), logits.clone()
    params = params_of(2, temperature=0.0, **changes)
    assert sample_triton(mine, params).tolist() == sample_reference(theirs, params).tolist() == [0, 1]
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(mine, torch.tensor([[1.0, 0.5, -7.0], [0.1, 0.25, 0.0]]))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 150), st.sampled_from([0, 1, 3, 50]), st.sampled_from([1.0, 0.3, 0.9]), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_as_the_workers_sampler(
    vocabulary: int, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    sampler, keys = Sampler(), []
    for row in range(2):
        wanted = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sampler.add(row, token_ids=(0,), num_prompt_tokens=1, params=wanted, seed=seed + row)
        keys.append(noise.noise_key(seed + row, 0, 0))
    params = SampleParams(
        temperature=torch.full((2,), temperature), top_k=torch.full((2,), top_k, dtype=torch.int32),
        top_p=torch.full((2,), top_p), min_p=torch.full((2,), min_p), keys=torch.tensor(keys),
    )  # fmt: skip
    assert sample_triton(logits.clone(), params).tolist() == sampler.sample(logits, [0, 1]).token_ids


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="in float32"):
        sample(torch.zeros(2, 4).half(), params_of(2))
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(torch.zeros(3, 4), params_of(2))
