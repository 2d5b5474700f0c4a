"""A warm-up tries every kind of step before the first request, and leaves nothing behind."""

from __future__ import annotations

import pytest
from hand_scheduler import HandScheduler, engine_config
from toy_decoder import ToyDecoder, layer, load_toy

from transom_worker.execution import dummy_run
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.dummy_run import warm_up, worst_case_start
from transom_worker.execution.runner import ModelRunner
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.layers.forward_batch import ForwardBatch
from transom_worker.scheduling.step import StepPlan


def make(max_position: int) -> tuple[ModelRunner, ToyDecoder]:
    loaded = load_toy([layer(), layer(window=6), layer(window=5, sinks=3)], eos=(2,), max_position=max_position)
    assert isinstance(loaded.model, ToyDecoder)
    runner = ModelRunner(engine_config(), loaded=loaded)
    runner.allocate(runner.pool_bytes())
    return runner, loaded.model


@pytest.mark.parametrize("max_model_len", [1, 3, 4, 100])
def test_steps_stay_within_the_limits(max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = make(100)
    monkeypatch.setattr(dummy_run, "MORE_TOKENS", (20, 60, 500))
    seen: list[tuple[int, int]] = []
    plain = dummy_run.dummy_run

    def watched(*args: object, start: int = 0) -> object:
        counts = args[3]
        assert isinstance(counts, list)
        seen.append((start, counts[0]))
        return plain(*args, start=start)  # type: ignore[arg-type]

    monkeypatch.setattr(dummy_run, "dummy_run", watched)
    logits = warm_up(model, runner._builder, runner._groups, most_tokens=64, max_model_len=max_model_len, compiles=True)
    assert logits.shape[0] == 1
    assert all(start + count <= max_model_len and count <= 64 for start, count in seen)
    if max_model_len == 100:
        assert seen == [(0, 16), (0, 20), (0, 60), (97, 3), (97, 1), (0, 1)]


def test_nothing_is_left_behind() -> None:
    runner, model = make(100)
    warm_up(model, runner._builder, runner._groups, most_tokens=64, max_model_len=100, compiles=True)
    hand = HandScheduler(runner.info.layout)
    prompt = list(range(3, 20))
    hand.add(0, prompt)
    found = []
    for count in (9, 8, 1, 1):
        plan = hand.plan({0: count})
        found += hand.received(plan, runner.execute(plan)).values()
    assert found == model.continue_greedily(prompt, 3)


def test_the_step_that_needs_most_memory_stands_behind_a_whole_sequence_where_entries_are_listed() -> None:
    plain = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=16)
    entries = GroupSpec(name="indexer_4", kind=GroupKind.INDEXER, layers=(0,), block_size=16, ratio=4)
    assert worst_case_start([plain], 50, 100) == 0
    assert worst_case_start([plain, entries], 50, 100) == 50


def test_only_the_first_sequence_of_a_dry_run_has_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = make(100)
    plans: list[StepPlan] = []
    build = runner._builder.build

    def watched(plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        plans.append(plan)
        return build(plan, store)

    monkeypatch.setattr(runner._builder, "build", watched)
    logits = dummy_run.dummy_run(model, runner._builder, runner._groups, [5, 1], start=90)
    assert (plans[0].start, plans[0].count, plans[0].logits_from, len(logits)) == ([90, 0], [5, 1], [94, 0], 2)
