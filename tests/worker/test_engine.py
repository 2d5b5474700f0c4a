"""The engine's door and its ends: what it refuses, what it says, and that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine_driver import make_engine, make_request, run
from transom_worker.engine import Engine
from transom_worker.errors import ConfigError, EngineDead, Overloaded, PromptTooLong, RequestError, RequestTooLarge


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), max_waiting=2, max_num_seqs=2)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "at least one token"),
        ([1, 2048], {}, "prompt", "Token id 2048 is outside the vocabulary"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias", "5000"),
        ([1], {"stop_token_ids": (4000,)}, "stop_token_ids", "4000"),
    ],
)
def test_wrong_requests_are_refused_at_the_door(
    engine: Engine, prompt: list[int], params: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(make_request("r", prompt, **params))
    assert caught.value.param == param
    assert not engine.has_work


def test_a_prompt_beyond_the_model_gives_both_lengths(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"3000 tokens.* 2048"):
        engine.add(make_request("r", [7] * 3000))


def test_what_never_fits_the_pool_is_refused_with_the_numbers(tiny_model: Path) -> None:
    """Window layers let the pool hold any prompt, full layers do not: the length limit follows the pool."""
    engine = make_engine(str(tiny_model), kv_cache_memory_bytes="512KiB")
    assert engine.info.max_model_len < 2048
    with pytest.raises((PromptTooLong, RequestTooLarge), match=str(engine.info.max_model_len)):
        engine.add(make_request("r", [7] * 1000))
    engine.shutdown()


def test_a_length_that_the_pool_cannot_hold_is_refused_at_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV pool holds \d+ tokens .* 2000"):
        make_engine(str(tiny_model), kv_cache_memory_bytes="512KiB", max_model_len=2000)


def test_a_full_queue_refuses_and_recovers(engine: Engine) -> None:
    requests = [make_request(f"r{i}", [5, 6, 7]) for i in range(10)]
    for request in requests[:4]:  # two may run, two may wait
        engine.add(request)
    with pytest.raises(Overloaded, match="limit is 2"):
        engine.add(requests[4])
    while engine.has_work:
        engine.step()
    run(engine, requests[:4])


def test_a_duplicate_id_is_refused(engine: Engine) -> None:
    engine.add(make_request("same", [5]))
    with pytest.raises(RequestError, match="same"):
        engine.add(make_request("same", [5]))


def test_another_contract_version_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="version 99"):
        engine.add(replace(make_request("r", [5]), version=99))


def test_a_deadline_ends_a_request_with_an_error(engine: Engine) -> None:
    engine.add(replace(make_request("late", [5, 6], max_tokens=500), deadline_s=1.0))
    engine.add(make_request("other", [5, 6], max_tokens=3))
    events = [event for _ in range(10) for event in engine.step()]
    (late,) = [event for event in events if event.request_id == "late"]
    assert late.error is not None
    assert late.error.kind == "RequestTimeout"
    assert [event.finish_reason for event in events if event.request_id == "other"][-1] == "length"
    assert not engine.has_work


def test_abort_frees_blocks_before_the_next_step(engine: Engine) -> None:
    engine.add(make_request("r", list(range(5, 45)), max_tokens=100))
    engine.step()
    assert sum(group.active_blocks for group in engine.stats().groups) > 0
    assert engine.abort("r")
    assert not engine.abort("r")
    while engine.has_work:
        assert engine.step() == []
    assert sum(group.active_blocks for group in engine.stats().groups) == 0


def test_a_failing_step_answers_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no memory left on device")

    for i in range(3):
        engine.add(make_request(f"r{i}", [5, 6, 7]))
    monkeypatch.setattr(engine._executor, "receive", fail)
    events = engine.step()
    assert {event.request_id for event in events} == {"r0", "r1", "r2"}
    assert all(event.error and "no memory left" in event.error.message for event in events)
    assert not engine.has_work
    with pytest.raises(EngineDead, match="no memory left"):
        engine.add(make_request("late", [5]))


def test_kv_events_tell_what_is_findable(engine: Engine) -> None:
    run(engine, [make_request("r", list(range(5, 45)), max_tokens=8)])
    events = engine.take_kv_events()
    assert [event.version for event in events] == list(range(1, len(events) + 1))
    assert [(event.action, event.block_index) for event in events] == [("added", 0), ("added", 1)]
    assert engine.take_kv_events() == []
