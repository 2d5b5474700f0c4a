"""Plans written by hand against a decoder without pages: chunks, batches, steps in flight, resume, repair, copies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from tests.worker.execution.toy_decoder import VOCABULARY, ToyDecoder, layer, load_toy
from transom_core.contract import SamplingParams
from transom_core.errors import RankLost, StepFailed
from transom_worker.execution.runner import ModelRunner
from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS

LAYERS = {
    "full": [layer(), layer()],
    "window": [layer(window=7), layer(window=7)],
    "hybrid": [layer(window=6), layer(), layer(window=6)],
    "sinks": [layer(), layer(window=5, sinks=3)],
    "three": [layer(window=9, sinks=6), layer(window=4), layer()],
}


def make(kind: str, **settings: object) -> tuple[ModelRunner, HandScheduler, ToyDecoder]:
    loaded = load_toy(LAYERS[kind], eos=(2,))
    runner = make_runner(engine_config(**settings), loaded)  # type: ignore[arg-type]
    assert isinstance(loaded.model, ToyDecoder)
    return runner, HandScheduler(runner.info.layout), loaded.model


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def decode(runner: ModelRunner, hand: HandScheduler, chunks: dict[int, list[int]], steps: int) -> dict[int, list[int]]:
    """Prefill each sequence by its chunks (a sequence whose prompt is done decodes), until all have `steps` tokens."""
    found: dict[int, list[int]] = {seq_id: [] for seq_id in chunks}
    left = {seq_id: list(sizes) for seq_id, sizes in chunks.items()}
    while any(len(tokens) < steps for tokens in found.values()):
        counts = {seq_id: left[seq_id].pop(0) if left[seq_id] else 1 for seq_id in chunks if len(found[seq_id]) < steps}
        plan = hand.plan(counts)
        for seq_id, token in hand.received(plan, runner.execute(plan)).items():
            found[seq_id].append(token)
    return found


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("chunks", [[23], [1] * 23, [5, 4, 1, 13], [16, 7]])
def test_any_chunking_equals_the_reference(kind: str, chunks: list[int]) -> None:
    runner, hand, model = make(kind)
    tokens = prompt(23)
    hand.add(0, tokens)
    assert decode(runner, hand, {0: chunks}, 12)[0] == model.continue_greedily(tokens, 12)


def test_logits_of_a_long_chunk_are_computed_in_slices() -> None:
    """Prompt log-probabilities of a whole chunk take the memory of one slice's logits."""
    runner, hand, model = make("hybrid")
    tokens = prompt(150)
    hand.add(0, prompt(5, seed=9))
    hand.add(1, tokens, params=SamplingParams(temperature=0.0, prompt_logprobs=1))
    model.most_logit_rows = 0
    plan = hand.plan({0: 5, 1: 150})
    (logprobs,) = runner.execute(plan).prompt_logprobs.values()
    assert model.most_logit_rows == MAX_ROWS_PER_PASS
    expected = model.reference(tokens).log_softmax(-1)
    assert [entry.chosen.token_id for entry in logprobs] == tokens[1:]
    for position, entry in enumerate(logprobs):
        assert entry.chosen.logprob == pytest.approx(expected[position, tokens[position + 1]].item(), abs=1e-4)


def test_window_repair_by_hand() -> None:
    """The window group lost every block below 24.

    The plan computes again from s without writing to the full group, then continues as a cold run does.
    """
    runner, hand, model = make("hybrid")
    tokens = prompt(30)
    hand.add(0, tokens[:24])
    runner.execute(hand.plan({0: 24}))
    full_blocks = dict(hand.sequences[0].blocks[0])
    before = _block_bytes(runner, full_blocks)
    # Window layers 0 and 2 with W = 6: the live range at n = 24 starts in the block of 19, which starts at 16.
    # Layer 2 needs layer 0 exact from 16 - 5 on, and what layer 0 writes is exact from s on: s = 16 - 5 = 11.
    plan = hand.repair(1, tokens, full_blocks, s=11, n=24)
    result = runner.execute(plan)
    assert result.sampled_ids == []
    assert _block_bytes(runner, full_blocks) == before
    assert decode(runner, hand, {1: [6]}, 10)[1] == model.continue_greedily(tokens, 10)


def _block_bytes(runner: ModelRunner, blocks: dict[int, int]) -> list[bytes]:
    stride = runner.info.layout.groups[0].stride_bytes
    return [
        runner.tiers.device.slab[block * stride : (block + 1) * stride].numpy().tobytes() for block in blocks.values()
    ]


@pytest.mark.parametrize("kind", ["hybrid", "sinks"])
def test_compaction_moves_blocks_under_a_running_sequence(kind: str) -> None:
    """Blocks swap places through a free block, window blocks among them; the sequence's tokens stay as they are."""
    runner, hand, model = make(kind)
    tokens = prompt(18)
    hand.add(0, tokens)
    plan = hand.plan({0: 18})
    found = list(hand.received(plan, runner.execute(plan)).values())
    spare = [hand.pool.take(group, 1)[0] for group in range(2)]
    while len(found) < 12:
        plan = hand.plan({0: 1})
        for group in range(2):
            hand.swap_blocks(plan, hand.sequences[0], group, spare[group])
        found += hand.received(plan, runner.execute(plan)).values()
    assert found == model.continue_greedily(tokens, 12)


def test_wrong_plans_are_refused() -> None:
    runner, hand, _ = make("full")
    plan = hand.plan({})
    plan.version = 99
    with pytest.raises(StepFailed, match="version 99"):
        runner.execute(plan)
    hand.add(0, prompt(3))
    plan = hand.plan({0: 3})
    plan.delta_blocks, plan.delta_offset = [], [0, 0]
    with pytest.raises(ValueError, match="has no block"):
        runner.execute(plan)
    plan = hand.plan({})
    plan.copy_group, plan.copy_source, plan.copy_target = [0], [0], [1]
    plan.copy_source_tier, plan.copy_target_tier = [0], [1]
    plan.copy_ticket = [0]
    with pytest.raises(StepFailed, match="tier 1 does not exist"):
        runner.execute(plan)
    plan = hand.plan({})
    plan.seq_ids = [12]
    plan.input_row, plan.input_id, plan.start, plan.count = [-1], [7], [0], [1]
    with pytest.raises(ValueError, match="sequence 12, which was never given"):
        runner.execute(plan)


def test_a_result_after_an_aborted_collective_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that waited for a rank that hangs goes on with whatever its memory holds."""

    def check(self: object) -> None:
        raise RankLost("the other ranks are late")

    runner, hand, _ = make("full")
    hand.add(0, prompt(5))
    step = runner.launch(hand.plan({0: 5}))
    monkeypatch.setattr(type(runner._parallel.comm), "check", check)
    with pytest.raises(RankLost, match="late"):
        runner.finish(step)
