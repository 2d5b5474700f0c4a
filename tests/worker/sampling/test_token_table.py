"""What sequences change in logits stays on the device: a step uploads what is new, with the result of uploading everything."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tests.how_many import num_examples
from tests.worker.sampling.test_sampler import EOS, KINDS, add, logits_after
from transom_core.contract import SamplingParams
from transom_kernels.launch import prefer
from transom_kernels.sample.reference import SampleParams, apply_changes
from transom_worker.sampling.sampler import Sampler
from transom_worker.sampling.token_table import LEAST_CAPACITY, TokenCounts, TokenTable
from transom_worker.uploads import SharedMemory

VOCABULARY = 4_096
PENALISED = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0)


class Uploads:
    """Counts the bytes of everything that becomes a tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        for name in ("from_numpy", "tensor", "as_tensor"):
            monkeypatch.setattr(torch, name, self._counting(getattr(torch, name)))

    def _counting(self, make: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> torch.Tensor:
            made: torch.Tensor = make(*arguments, **options)
            self.num_bytes += made.nbytes
            return made

        return counted


@pytest.mark.parametrize("kernels", ["reference", "interpreted"])
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("penalties", PENALISED),
        ("bias", SamplingParams(logit_bias={i: 0.5 for i in range(0, 2_048, 2)})),
        ("bans", SamplingParams(min_tokens=1_000, max_tokens=2_000, stop_token_ids=tuple(range(0, 2_048, 2)))),
    ],
    ids=["penalties", "bias", "bans"],
)
def test_a_step_uploads_what_is_new(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, kind: str, params: SamplingParams
) -> None:
    """However long the prompt is and however many tokens have a bias."""
    sampler, uploads = Sampler(eos_token_ids=(EOS,)), Uploads(monkeypatch)
    add(sampler, 0, list(range(3_000)), 2_900, params)
    add(sampler, 1, [1, 2, 3], 2, PENALISED)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    uploaded = []
    with prefer(kernels):
        for rows in ([0, 1], [0, 1], [1, 0], [0], [0, 1]):  # the batch changes, too
            before = uploads.num_bytes
            token_ids = sampler.sample(logits[: len(rows)], rows).token_ids
            uploaded.append(uploads.num_bytes - before)
            for seq_id, token_id in zip(rows, token_ids, strict=True):
                sampler.append([seq_id], [token_id])
    assert uploaded[0] > 1_024 * 12, "all pairs at first"
    assert max(uploaded[1:]) <= 2 * 150, "then a few numbers for each row"


@pytest.mark.parametrize(
    ("kernels", "steps"),
    [("auto", 10), ("reference", 10), pytest.param("interpreted", 3, marks=pytest.mark.exhaustive)],
)
def test_sequences_that_are_preempted_and_come_back_sample_the_same(kernels: Any, steps: int) -> None:
    """All kinds of rows. Every few steps some sequences leave and come back under new ids, and the batch's order changes."""
    with prefer(kernels):
        calm, disturbed = generate(steps=steps, is_disturbed=False), generate(steps=steps, is_disturbed=True)
    assert calm == disturbed


def generate(*, steps: int, is_disturbed: bool) -> dict[str, list[int]]:
    sampler, rng = Sampler(eos_token_ids=(EOS,)), random.Random(5)
    tokens = {kind: [1, 2, 3] for kind in KINDS}
    ids = {kind: number for number, kind in enumerate(KINDS)}
    noise = dict(ids)  # a sequence's noise depends on its seed, which it keeps

    def enter(kind: str) -> None:
        sampler.add(
            ids[kind], token_ids=tokens[kind], num_prompt_tokens=3, params=KINDS[kind], seed=noise[kind], choice_index=0
        )

    for kind in KINDS:
        enter(kind)
    for step in range(steps):
        kinds = list(KINDS)
        if is_disturbed:
            rng.shuffle(kinds)
            for kind in kinds[: 1 + step % 3]:
                sampler.remove(ids[kind])
                ids[kind] = max(ids.values()) + 1
                enter(kind)
        sampled = sampler.sample(torch.stack([logits_after(tokens[k]) for k in kinds]), [ids[k] for k in kinds])
        for kind, token_id in zip(kinds, sampled.token_ids, strict=True):
            tokens[kind].append(token_id)
            sampler.append([ids[kind]], [token_id])
    return tokens


def expected(tokens: list[int], num_prompt_tokens: int, params: SamplingParams) -> dict[int, float]:
    """What is subtracted from which logit."""
    counts = Counter(tokens[num_prompt_tokens:])
    penalised = tokens if params.repetition_penalty != 1.0 else counts
    return {t: params.presence_penalty * (counts[t] > 0) + params.frequency_penalty * counts[t] for t in penalised}


@settings(max_examples=num_examples(daily=8, exhaustive=2_000))
@given(seed=st.integers(0, 2**32))
def test_the_table_has_what_its_sequences_have(seed: int) -> None:
    """Sequences come, grow beyond their segments, are sampled in any batch or not, and leave; segments are used again."""
    rng, table = random.Random(seed), TokenTable()
    sequences: dict[int, tuple[TokenCounts, list[int], int, SamplingParams]] = {}
    for number in range(40):
        if rng.random() < 0.4:
            tokens = [rng.randrange(1_000) for _ in range(rng.choice([0, 3, LEAST_CAPACITY, 200]))]
            prompt = rng.randint(0, len(tokens))
            params = PENALISED if rng.random() < 0.5 else SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
            sequences[number] = TokenCounts(tokens, prompt, params), tokens, prompt, params
        for counts, tokens, *_ in sequences.values():
            for _ in range(rng.choice([0, 1, 1, 40])):
                tokens.append(rng.randrange(1_000))
                counts.append(tokens[-1])
        if sequences and rng.random() < 0.2:
            table.remove(sequences.pop(rng.choice(list(sequences)))[0])
        batch = rng.sample(list(sequences.values()), rng.randint(0, len(sequences)))
        if not batch:
            continue
        rows = rng.sample(range(20), len(batch)) if len(batch) <= 20 else list(range(len(batch)))
        got = table.gather(
            rows, [one[0] for one in batch], [one[3].repetition_penalty for one in batch], SharedMemory()
        )
        want = {
            (row, token): (value, params.repetition_penalty)
            for row, (_, tokens, prompt, params) in zip(rows, batch, strict=True)
            for token, value in expected(tokens, prompt, params).items()
        }
        if got is None:
            assert not want
            continue
        pairs = list(zip(got.row.tolist(), got.token.tolist(), strict=True))
        assert len(pairs) == len(set(pairs))
        found = dict(zip(pairs, zip(got.value.tolist(), got.row_value.tolist(), strict=True), strict=True))
        assert found.keys() == want.keys()
        assert all(found[pair] == pytest.approx(want[pair]) for pair in want)


PENALISED_IDS = 300
IDS = st.lists(st.integers(0, PENALISED_IDS - 1), max_size=200)


def penalise(logits: torch.Tensor, prompt: list[int], output: list[int], *, row: int, **penalties: float) -> None:
    params = SamplingParams(**penalties)  # type: ignore[arg-type]
    counts = TokenCounts(prompt + output, len(prompt), params)
    changes = TokenTable().gather([row], [counts], [params.repetition_penalty], SharedMemory())
    if changes is not None:
        columns = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "keys"), torch.empty(0))
        columns |= {"change_row": changes.row, "change_id": changes.token, "change_factor": changes.row_value}
        apply_changes(logits, SampleParams(**columns, change_minus=changes.value))


@given(prompt=IDS.filter(bool), output=IDS, penalty=st.sampled_from([0.5, 1.1, 1.3, 2.0]))
def test_repetition_equals_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = torch.randn(2, PENALISED_IDS, generator=torch.Generator().manual_seed(len(prompt)))
    expected = logits.clone()
    expected[1:] = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[1:].clone())
    penalise(logits, prompt, output, row=1, repetition_penalty=penalty)
    torch.testing.assert_close(logits, expected)
