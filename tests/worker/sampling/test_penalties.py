"""Penalties against transformers' logits processor and the OpenAI definitions."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from transom_core.contract import SamplingParams
from transom_kernels.sample.reference import SampleParams, apply_changes
from transom_worker.sampling.penalties import TokenCounts
from transom_worker.sampling.token_table import TokenTable
from transom_worker.uploads import SharedMemory

VOCABULARY = 300
IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=200)


def penalise(logits: torch.Tensor, prompt: list[int], output: list[int], *, row: int, **penalties: float) -> None:
    params = SamplingParams(**penalties)  # type: ignore[arg-type]
    counts = TokenCounts(prompt + output, len(prompt), params)
    changes = TokenTable().gather([row], [counts], [params.repetition_penalty], SharedMemory())
    if changes is not None:
        columns = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "keys"), torch.empty(0))
        apply_changes(
            logits,
            SampleParams(
                **columns,
                change_row=changes.row,
                change_id=changes.token,
                change_factor=changes.row_value,
                change_minus=changes.value,
            ),
        )


@settings(deadline=None)
@given(prompt=IDS.filter(bool), output=IDS, penalty=st.sampled_from([0.5, 1.1, 1.3, 2.0]))
def test_repetition_equals_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    expected = logits.clone()
    expected[1:] = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[1:].clone())
    penalise(logits, prompt, output, row=1, repetition_penalty=penalty)
    torch.testing.assert_close(logits, expected)


@settings(deadline=None)
@given(prompt=IDS, output=IDS)
def test_presence_and_frequency_count_output_alone(prompt: list[int], output: list[int]) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[0, token] -= 0.7 + 0.3 * count
    penalise(logits, prompt, output, row=0, presence_penalty=0.7, frequency_penalty=0.3)
    torch.testing.assert_close(logits, expected)


@settings(deadline=None)
@given(tokens=IDS, num_prompt_tokens=st.integers(0, 200))
def test_counting_one_by_one_equals_counting_at_once(tokens: list[int], num_prompt_tokens: int) -> None:
    num_prompt_tokens = min(num_prompt_tokens, len(tokens))
    params = SamplingParams(repetition_penalty=1.2)
    grown = TokenCounts(tokens[:num_prompt_tokens], num_prompt_tokens, params)
    for token in tokens[num_prompt_tokens:]:
        grown.append(token)
    whole = TokenCounts(tokens, num_prompt_tokens, params)
    assert len(grown) == len(whole) == grown.arrays[2]
    for some, others in zip(grown.arrays[:2], whole.arrays[:2], strict=True):
        assert some[: len(grown)].tolist() == others[: len(whole)].tolist()
