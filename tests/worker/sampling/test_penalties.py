"""Penalties against transformers' logits processor and the OpenAI definitions."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from transom_worker.sampling.penalties import TokenCounts, apply_changes, penalty_changes

VOCABULARY = 300
IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=200)


@settings(deadline=None)
@given(prompt=IDS.filter(bool), output=IDS, penalty=st.sampled_from([0.5, 1.1, 1.3, 2.0]))
def test_repetition_equals_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(len(prompt)))
    expected = logits.clone()
    expected[1:] = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[1:].clone())
    counts = TokenCounts(prompt + output, len(prompt))
    apply_changes(logits, penalty_changes([1], [counts], [penalty], [0.0], [0.0], logits.device))
    torch.testing.assert_close(logits, expected)


@settings(deadline=None)
@given(prompt=IDS, output=IDS)
def test_presence_and_frequency_count_output_alone(prompt: list[int], output: list[int]) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[0, token] -= 0.7 + 0.3 * count
    counts = TokenCounts(prompt + output, len(prompt))
    apply_changes(logits, penalty_changes([0], [counts], [1.0], [0.7], [0.3], logits.device))
    torch.testing.assert_close(logits, expected)


@settings(deadline=None)
@given(tokens=IDS, num_prompt_tokens=st.integers(0, 200))
def test_counting_one_by_one_equals_counting_at_once(tokens: list[int], num_prompt_tokens: int) -> None:
    num_prompt_tokens = min(num_prompt_tokens, len(tokens))
    grown = TokenCounts(tokens[:num_prompt_tokens], num_prompt_tokens)
    for token in tokens[num_prompt_tokens:]:
        grown.append(token)
    whole = TokenCounts(tokens, num_prompt_tokens)
    assert grown.token_ids.tolist() == whole.token_ids.tolist()
    assert grown.output_counts.tolist() == whole.output_counts.tolist()
