"""Graphs of mixed steps, in which prompt chunks are computed beside decodes or alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.checkpoints import make_checkpoint
from tests.graph_recorder import RecordedGraph, RecorderDevice
from tests.matrices import some_daily
from tests.tiny_checkpoints import tiny_llama
from tests.worker.execution.hand_scheduler import GREEDY, HandScheduler
from tests.worker.execution.replay.test_decode_graphs import SIZE, BakedGraph, runner_of
from tests.worker.execution.replay.test_graphs_on_ranks import logits_of, random_steps
from tests.worker.models.test_moe_families import CASES
from transom_core.contract import SamplingParams
from transom_kernels.launch import INTERPRETED
from transom_worker.execution.replay import decode_sizes
from transom_worker.execution.replay.decode_graphs import DecodeGraphs
from transom_worker.execution.replay.graph_warm_up import _RandomSteps
from transom_worker.execution.runner import ModelRunner
from transom_worker.models import expanded_prompts

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
MAX_SEQS = 3
LENGTHS: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "max_model_len": 24, "max_num_batched_tokens": 12}
NUM_LEVELS = 2
MOST_TOKENS = 10  # a tile has 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("graphed"), **SIZE)


@pytest.fixture(scope="module", params=some_daily(["10", "5 and 10"], daily=["10"]))
def recorded(checkpoint: Path, plain: ModelRunner, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """All graphs have room for three sequences, and those of mixed steps for one or two numbers of tokens.

    It comes after `plain` and ends before it, so that both undo their changes in the reverse order.
    """
    tokens = (5, MOST_TOKENS) if request.param == "5 and 10" else (MOST_TOKENS,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_sizes, "_buckets", lambda most: (most,))
        with runner_of(checkpoint, RecorderDevice(), mixed_tokens=tokens, **LENGTHS) as runner:
            assert runner.info.num_graphs == NUM_LEVELS * (1 + len(tokens))
            yield runner


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[ModelRunner]:
    with runner_of(checkpoint, None, **LENGTHS) as runner:
        yield runner


def logits(runner: ModelRunner, steps: Sequence[Callable[[HandScheduler], dict[int, int]]]) -> list[torch.Tensor]:
    hand = HandScheduler(runner.info.layout)
    found = [logits_of(runner, hand, step(hand)) for step in steps]
    for seq_id in list(hand.sequences):
        hand.finish(seq_id)
    runner._apply(hand.plan({}))
    return found


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-5, rtol=2e-5)


def num_mixed(runner: ModelRunner) -> int:
    return runner.usage.num_graph_steps - runner.usage.num_graph_decodes


@pytest.mark.parametrize("seed", some_daily(range(12), daily=[0]))
def test_replayed_mixed_steps_are_the_launched_ones(recorded: ModelRunner, plain: ModelRunner, seed: int) -> None:
    before = num_mixed(recorded)
    steps = random_steps(seed, 9, MAX_SEQS, most_new=9)
    assert_equal(logits(recorded, steps), logits(plain, steps))
    assert num_mixed(recorded) > before


def test_steps_at_the_edges_of_a_size(recorded: ModelRunner, plain: ModelRunner) -> None:
    """As many tokens as the size has, and one more; chunks that sample nothing; log-probabilities of a prompt."""

    def first(hand: HandScheduler) -> dict[int, int]:
        hand.add(0, list(range(3, 21)))
        return {0: MOST_TOKENS - 1}

    def more(hand: HandScheduler) -> dict[int, int]:
        hand.add(1, [7] * MOST_TOKENS)
        return {0: 1, 1: MOST_TOKENS - 1}

    def too_many(hand: HandScheduler) -> dict[int, int]:
        hand.add(2, [9] * (MOST_TOKENS - 1))
        return {0: 1, 1: 1, 2: MOST_TOKENS - 1}

    def of_a_prompt(hand: HandScheduler) -> dict[int, int]:
        hand.finish(2)
        hand.add(3, [5, 6, 7, 8], params=SamplingParams(temperature=0.0, prompt_logprobs=0))
        return {1: 1, 3: 3}

    assert GREEDY.prompt_logprobs is None
    steps, before, numbers = [first, more, too_many, of_a_prompt], num_mixed(recorded), []

    def counted(hand: HandScheduler, step: Callable[[HandScheduler], dict[int, int]]) -> dict[int, int]:
        numbers.append(num_mixed(recorded) - before)
        return step(hand)

    assert_equal(logits(recorded, [partial(counted, step=step) for step in steps]), logits(plain, steps))
    assert [*numbers, num_mixed(recorded) - before] == [0, 1, 2, 2, 2]


@torch.inference_mode()
def test_padding_rows_are_computed_too(recorded: ModelRunner) -> None:
    """A replay poisons its memory before, and a layer's rows that were not written would differ from the forward pass."""
    graphs = recorded._forward._replay
    assert isinstance(graphs, DecodeGraphs)
    size = next(size for size in graphs.sizes.mixed if size.mixed_tokens == MOST_TOKENS)
    steps = _RandomSteps(graphs.builder.layout, vocab_size=500, max_seqs=MAX_SEQS)
    first, second = (steps.step(graphs.builder, size, graphs.sizes, seed=seed) for seed in (1, 2))
    assert len(second.token_ids) < size.num_tokens
    inputs, sums = graphs.warm_up(size, first), graphs.layer_sums(size)
    assert graphs.first_wrong_layer(inputs, graphs.record(inputs, sums), sums, second) is None


def test_a_prompt_whose_latent_rows_are_expanded_has_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would depend on whether the step beside it is small enough for one."""
    monkeypatch.setattr(expanded_prompts, "LEAST_TOKENS", 6)
    case = CASES["kimi_k2"]
    make_checkpoint(tmp_path, case.family, **case.config | {"num_hidden_layers": 2, "first_k_dense_replace": 2})
    lengths: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 12, "max_num_batched_tokens": 10}
    with runner_of(tmp_path, RecorderDevice(), mixed_tokens=(10,), **lengths) as runner:
        hand = HandScheduler(runner.info.layout)
        for seq_id, (count, replayed) in enumerate(((5, 1), (6, 0), (10, 0))):
            before = num_mixed(runner)
            hand.add(seq_id, list(range(3, 3 + count + 1)))
            logits_of(runner, hand, {seq_id: count})
            hand.finish(seq_id)
            assert num_mixed(runner) - before == replayed


class MixedDevice(RecorderDevice):
    """Captures the graphs of decode steps; `mixed` captures those after the first one."""

    def __init__(self, mixed: Callable[[Callable[[], None]], RecordedGraph]) -> None:
        super().__init__()
        self._mixed = mixed

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        return self._mixed(run) if self.graphs else super().capture(run)


def fails(run: Callable[[], None]) -> RecordedGraph:
    raise torch.OutOfMemoryError("Tried to allocate 20 MiB")


@pytest.mark.parametrize(
    ("mixed", "num_wrong", "message"),
    [
        (
            fails,
            0,
            "Mixed steps run without CUDA graphs: capturing 1 sequences and 4 tokens with prompts at level 0 failed",
        ),
        (BakedGraph, 1, "Mixed steps of 1 sequences and 4 tokens with prompts at level 0 run without CUDA graphs"),
    ],
    ids=["fails", "wrong"],
)
def test_decode_steps_keep_their_graphs_without_mixed_ones(
    checkpoint: Path, mixed: Any, num_wrong: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    lengths: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 8}
    with (
        caplog.at_level(logging.WARNING),
        runner_of(checkpoint, MixedDevice(mixed), mixed_tokens=(4,), **lengths) as runner,
    ):
        assert message in caplog.text
        hand = HandScheduler(runner.info.layout)
        hand.add(0, [5, 6])
        hand.run(runner, {0: 2}, {0: 1})
        usage = runner.usage
        assert (usage.num_eager_steps, usage.num_graph_steps, usage.num_graph_decodes) == (1, 1, 1)
        assert (runner.info.num_graphs, usage.num_wrong_graphs) == (1, num_wrong)
