"""The sampler: end tokens, temperatures, masks, log-probabilities; and that everything comes by pinned memory.

A sharded vocabulary gives the same tokens as a whole one, and the same bits of log-probabilities.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.late_uploads import PromptUploads
from tests.present import present
from tests.thread_ranks import ThreadComm, on_ranks
from transom_core.contract import SamplingParams
from transom_kernels.launch import prefer
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.sampling.logprobs import token_logprobs
from transom_worker.sampling.sampler import UPLOADS_PER_STEP, Sampler, SamplerOutput
from transom_worker.sampling.sharded import ShardedSampler

VOCABULARY = 211
EOS = 3

KINDS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.3, logprobs=0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8, temperature=1.4, logprobs=5),
    "min_p": SamplingParams(min_p=0.1),
    "penalised": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=1),
    "greedy_penalised": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "biased": SamplingParams(logit_bias={7: 5.0, 9: -100.0, 10**6: 1.0}),
    "patient": SamplingParams(min_tokens=8, stop_token_ids=(5,), top_p=0.9),
}
STEPS = 3
GREEDY, NOISY = SamplingParams(temperature=0.0), SamplingParams()
GATHERED = [GREEDY, NOISY, SamplingParams(top_k=5), SamplingParams(temperature=0.5), KINDS["penalised"]]
ALL_KINDS = [
    *KINDS.values(),
    GREEDY,
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, min_tokens=2, stop_token_ids=(5,)),
]


def logits_after(tokens: list[int]) -> torch.Tensor:
    """A "model": logits that depend on the last two tokens alone."""
    seed = tokens[-1] * 1009 + (tokens[-2] if len(tokens) > 1 else 0)
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32))


def add(sampler: Sampler, seq_id: int, tokens: list[int], num_prompt_tokens: int, params: SamplingParams) -> None:
    sampler.add(
        seq_id, token_ids=tokens, num_prompt_tokens=num_prompt_tokens, params=params, seed=seq_id * 31, choice_index=1
    )


def test_min_tokens_bans_end_tokens_until_reached() -> None:
    sampler = Sampler(eos_token_ids=(EOS,))
    add(sampler, 0, [1], 1, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5,)))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [EOS, 5, 9]] = torch.tensor([9.0, 8.0, 7.0])
    chosen = []
    for _ in range(3):
        chosen += sampler.sample(logits, [0]).token_ids
        sampler.append([0], [chosen[-1]])
    assert chosen == [9, 9, EOS]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": -1}])
@pytest.mark.parametrize("temperature", [1e-40, 1e-20, 1e-5])
def test_tiny_temperatures_take_the_most_likely(temperature: float, filters: dict[str, float]) -> None:
    sampler = Sampler()
    add(sampler, 0, [1], 1, SamplingParams(temperature=temperature, **filters))  # type: ignore[arg-type]
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 10
    assert sampler.sample(logits, [0]).token_ids == [int(logits.argmax())]


def test_a_grammar_mask_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="grammar mask has 3 bytes for 3 rows"):
        make(list(KINDS)[:3]).sample(torch.randn(3, VOCABULARY), [0, 1, 2], b"abc")


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampler = Sampler()
    params = SamplingParams(temperature=0.0, logit_bias={20: 100.0}, repetition_penalty=2.0, logprobs=4)
    add(sampler, 0, [1, 2], 2, params)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5))
    before = logits.clone()
    entry = present(sampler.sample(logits, [0]).logprobs[0])
    assert torch.equal(logits, before)
    expected = logits[0].log_softmax(-1)
    assert entry.chosen.token_id == 20
    assert entry.chosen.logprob == pytest.approx(expected[20].item(), abs=1e-6)
    assert entry.chosen.rank == int((logits[0] > logits[0, 20]).sum()) + 1
    best = expected.sort(descending=True)
    assert [top.token_id for top in entry.top] == best.indices[:4].tolist()
    assert [top.rank for top in entry.top] == [1, 2, 3, 4]


NUM_BYTES = -(-VOCABULARY // 8)


def make(kinds: list[str]) -> Sampler:
    sampler = Sampler(eos_token_ids=(EOS,))
    for row, kind in enumerate(kinds):
        add(sampler, row, [1, 2, 3, 4], 2, KINDS[kind])
    return sampler


def grammar(num_rows: int, held: list[int]) -> bytes:
    """Some rows may choose odd tokens alone, the others every token."""
    bits = np.full((num_rows, NUM_BYTES), 0xFF, dtype=np.uint8)
    bits[held] = 0b1010_1010
    return bits.tobytes()


@pytest.mark.parametrize("held", [[], [3], [0, 4, 9], list(range(len(KINDS)))])
def test_all_numbers_come_by_pinned_memory(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of rows, step after step; a grammar holds some of them."""
    uploads, generator = PromptUploads(per_step=UPLOADS_PER_STEP), torch.Generator().manual_seed(2)
    on_device, on_host = make(list(KINDS)), make(list(KINDS))
    on_device._uploads = uploads
    mask, rows = grammar(len(KINDS), held), list(range(len(KINDS)))
    with prefer("reference"):
        for _ in range(6):
            logits = torch.randn(len(KINDS), VOCABULARY, generator=generator) * 3
            kept, wanted = logits.clone(), on_host.sample(logits, rows, mask).token_ids
            before = len(uploads.copied)
            with monkeypatch.context() as watched:
                for name in ("from_numpy", "tensor", "as_tensor"):
                    watched.setattr(torch, name, lambda *_, **__: pytest.fail("a number goes another way"))
                got: list[int] = on_device._token_ids(logits, on_device._rows_of(rows), mask).tolist()
            assert got == wanted
            assert all(got[row] % 2 for row in held)
            assert torch.equal(logits, kept)
            assert 1 < len(uploads.copied) - before <= UPLOADS_PER_STEP
            for sampler in (on_device, on_host):
                for row, token in zip(rows, wanted, strict=True):
                    sampler.append([row], [token])


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


def run_rows(
    sampler: Sampler, kinds: list[SamplingParams], steps: list[torch.Tensor], masks: list[bytes | None]
) -> list[SamplerOutput]:
    for seq_id, params in enumerate(kinds):
        add(sampler, seq_id, [1, 2, 1], 2, params)
    results = []
    for logits, mask in zip(steps, masks, strict=True):
        results.append(sampler.sample(logits, range(len(kinds)), mask))
        for seq_id, token_id in enumerate(results[-1].token_ids):
            sampler.append([seq_id], [token_id])
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@settings(max_examples=num_examples(daily=10, exhaustive=100))
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
        return run_rows(sampler, kinds, [logits[:, first:end] for logits in steps], masks)

    expected = run_rows(Sampler(eos_token_ids=(EOS,)), kinds, steps, masks)
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
                add(sampler, seq_id, [1, 2, 1], 2, params)
            return present(sampler.launch(logits[:, first:end].clone(), range(len(kinds)), mask)).tolist()

        with prefer("reference"):
            expected = run_rows(Sampler(eos_token_ids=(EOS,)), kinds, [logits.clone()], [mask])[0].token_ids
            assert on_ranks(size, one_rank) == [expected] * size


def share(parallel: Parallel, num_ids: int) -> slice:
    """A rank's slice of the vocabulary."""
    return slice(parallel.rank * num_ids // parallel.size, (parallel.rank + 1) * num_ids // parallel.size)


@pytest.mark.parametrize(
    ("kinds", "size", "exchanged"),
    [(GATHERED, 2, (2 * 500, 3)), ([GREEDY, NOISY], 3, (0, 1))],  # a step of local rows is one all-reduce
    ids=["gathered", "local"],
)
def test_only_rows_that_need_it_are_gathered(
    kinds: list[SamplingParams], size: int, exchanged: tuple[int, int]
) -> None:
    """`exchanged` are the elements that each rank gathers, and the collectives of the step."""

    def one_rank(parallel: Parallel) -> tuple[int, int]:
        own = share(parallel, 1000)
        run_rows(ShardedSampler(parallel, first_id=own.start), kinds, [torch.zeros(len(kinds), 1000)[:, own]], [None])
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
