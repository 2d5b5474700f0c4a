"""A warm-up tries every kind of step before the first request, and leaves nothing behind."""

from __future__ import annotations

import pytest
from hand_scheduler import HandScheduler, engine_config
from toy_decoder import ToyDecoder, layer, load_toy

from transom_worker.execution import dry_run
from transom_worker.execution.dry_run import warm_up
from transom_worker.execution.runner import ModelRunner


def make(max_position: int) -> tuple[ModelRunner, ToyDecoder]:
    loaded = load_toy([layer(), layer(window=6), layer(window=5, sinks=3)], eos=(2,), max_position=max_position)
    assert isinstance(loaded.model, ToyDecoder)
    runner = ModelRunner(engine_config(), loaded=loaded)
    runner.allocate(runner.pool_bytes())
    return runner, loaded.model


@pytest.mark.parametrize("max_model_len", [1, 3, 4, 100])
def test_steps_stay_within_the_limits(max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, model = make(100)
    monkeypatch.setattr(dry_run, "MORE_TOKENS", (20, 60, 500))
    seen: list[tuple[int, int]] = []
    plain = dry_run.dry_run

    def watched(*args: object, start: int = 0) -> object:
        counts = args[3]
        assert isinstance(counts, list)
        seen.append((start, counts[0]))
        return plain(*args, start=start)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run, "dry_run", watched)
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
