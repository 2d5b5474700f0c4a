"""The sampler by the CPU kernel chooses what it chooses by torch's operators, for hundreds of random parameters."""

import random
from typing import Any

import pytest
import torch

from tests.matrices import some_daily
from tests.worker.sampling.test_sampler import VOCABULARY, add
from transom_core.contract import SamplingParams
from transom_kernels.launch import prefer
from transom_worker.sampling.sampler import Sampler

NUM_ROWS, NUM_STEPS = 24, 3


def random_params(generator: random.Random) -> SamplingParams:
    """Any mix of what changes a sample; each part is present in a third of the mixes."""

    def sometimes(**values: Any) -> dict[str, Any]:
        return values if generator.random() < 0.34 else {}

    token = generator.randrange(VOCABULARY)
    return SamplingParams(
        temperature=generator.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        max_tokens=100,
        **sometimes(top_k=generator.randrange(1, 2 * VOCABULARY)),
        **sometimes(top_p=generator.uniform(0.01, 1.0)),
        **sometimes(min_p=generator.uniform(0.0, 0.4)),
        **sometimes(repetition_penalty=generator.uniform(0.5, 2.0)),
        **sometimes(presence_penalty=generator.uniform(-2.0, 2.0)),
        **sometimes(frequency_penalty=generator.uniform(-2.0, 2.0)),
        **sometimes(logit_bias={token: 3.0, 10**6: 1.0, (token + 1) % VOCABULARY: -3.0}),
        **sometimes(min_tokens=generator.randrange(4), stop_token_ids=(token,)),
    )


def texts(seed: int) -> list[list[int]]:
    """The tokens of a few steps of a batch; sequences come and go, and some steps have a grammar's mask."""
    generator = random.Random(seed)
    sampler = Sampler(eos_token_ids=(3,))
    for seq_id in range(NUM_ROWS):
        prompt = [generator.randrange(VOCABULARY) for _ in range(generator.choice([1, 5, 90]))]
        add(sampler, seq_id, prompt, len(prompt), random_params(generator))
    found = []
    for step in range(NUM_STEPS):
        seq_ids = generator.sample(range(NUM_ROWS), NUM_ROWS - step % 2)
        mask = generator.randbytes(len(seq_ids) * -(-VOCABULARY // 8)) if step == 2 else None
        logits = torch.randn(len(seq_ids), VOCABULARY, generator=torch.Generator().manual_seed(seed + step)) * 3
        kept = logits.clone()
        found.append(sampler.sample(logits, seq_ids, mask).token_ids)
        assert torch.equal(logits, kept)
        for seq_id, token in zip(seq_ids, found[-1], strict=True):
            sampler.append([seq_id], [token])
        sampler.remove(step)
        add(sampler, step, [1, 2], 1, random_params(generator))
    return found


@pytest.mark.parametrize("group", some_daily(range(5), daily=range(2)))
def test_hundreds_of_random_parameters_draw_the_same(group: int) -> None:
    for seed in range(10 * group, 10 * group + 10):
        with prefer("reference"):
            wanted = texts(seed)
        assert texts(seed) == wanted


def test_a_sequence_that_is_replaced_has_its_new_parameters() -> None:
    sampler, logits = Sampler(), torch.zeros(1, VOCABULARY)
    logits[0, 9] = 0.1
    add(sampler, 0, [1], 1, SamplingParams(temperature=0.0, logit_bias={5: 1.0}))
    assert sampler.sample(logits, [0]).token_ids == [5]
    add(sampler, 0, [1], 1, SamplingParams(temperature=0.0))
    assert sampler.sample(logits, [0]).token_ids == [9]
