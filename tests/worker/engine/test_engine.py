"""The engine's admission and its ends: what it refuses, its messages, and that no block stays in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import make_engine, make_hooked_engine, make_request
from transom_core.contract import OutputEvent
from transom_core.errors import (
    ConfigError,
    EngineDead,
    PromptTooLong,
    RequestError,
)
from transom_worker.engine.engine import Engine
from transom_worker.engine.running_request import RunningRequest
from transom_worker.scheduling.outputs import SequenceOutput


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
        ([1], {"resumed": [3, -7]}, "resumed_output_ids", "-7"),
    ],
)
def test_wrong_requests_are_refused_at_admission(
    engine: Engine, prompt: list[int], params: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(make_request("r", prompt, **params))
    assert caught.value.param == param
    assert not engine.has_work


def test_a_prompt_beyond_the_model_gives_both_lengths(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"3000 tokens.* 2048"):
        engine.add(make_request("r", [7] * 3000))


def test_a_length_that_the_pool_cannot_hold_is_refused_at_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV pool holds \d+ tokens .* 2000"):
        make_engine(str(tiny_model), kv_cache_memory_bytes="512KiB", max_model_len=2000)


def test_a_deadline_ends_a_request_with_an_error(engine: Engine) -> None:
    engine.add(replace(make_request("late", [5, 6], max_tokens=500), time_left_s=0.0))
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
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) > 0
    assert engine.abort("r")
    assert not engine.abort("r")
    while engine.has_work:
        assert engine.step() == []
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) == 0


@pytest.mark.parametrize("num_steps", [0, 2])
def test_many_aborts_publish_the_state_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Statistics of the whole cache are not computed for every request that leaves, and the last state is published."""
    engine = make_engine(str(tiny_model))
    for i in range(12):
        engine.add(make_request(f"r{i}", [5, 6, i], max_tokens=100))
    for _ in range(num_steps):
        engine.step()
    states = []
    monkeypatch.setattr(engine.events, "published", states.append)
    for i in range(12):
        engine.abort(f"r{i}")
    while engine.has_work:
        assert engine.step() == []
    assert len(states) == 1
    assert (states[0].load.num_running, states[0].load.num_waiting) == (0, 0)


def test_a_failing_step_ends_every_request_with_an_error(tiny_model: Path) -> None:
    engine, executor = make_hooked_engine(str(tiny_model), max_num_seqs=2)

    def fail() -> None:
        raise RuntimeError("an illegal instruction")

    for i in range(3):
        engine.add(make_request(f"r{i}", [5, 6, 7]))
    executor.before_step = fail
    events = engine.step()
    assert {event.request_id for event in events} == {"r0", "r1", "r2"}
    assert all(event.error and "illegal" in event.error.message for event in events)
    assert not engine.has_work
    with pytest.raises(EngineDead, match="illegal"):
        engine.add(make_request("late", [5]))
    engine.shutdown()


def test_a_failure_in_one_requests_text_loses_no_other_requests_event(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests end in one step; the second one's text fails. The first one's last event still goes out."""
    token_event = RunningRequest.token_event

    def fail(running: RunningRequest, output: SequenceOutput) -> OutputEvent:
        if output.request_id == "r1":
            raise UnicodeError("no such text")
        return token_event(running, output)

    for i in range(2):
        engine.add(make_request(f"r{i}", [5, 6, 7], max_tokens=1))
    monkeypatch.setattr(RunningRequest, "token_event", fail)
    events = {event.request_id: event for event in engine.step()}
    assert events["r0"].finish_reason == "length"
    assert events["r1"].error is not None
    assert not engine.has_work
    assert engine.step() == []


def test_a_deadline_is_its_own_requests_alone(tiny_model: Path) -> None:
    """An id that is used again after its first request has ended does not inherit that one's deadline."""
    now_s = 1000.0
    engine = make_engine(str(tiny_model), clock=lambda: now_s)
    engine.add(replace(make_request("again", [5], max_tokens=1), time_left_s=60.0))
    while engine.has_work:
        engine.step()
    engine.add(make_request("again", [5], max_tokens=5))
    now_s += 3600
    events = [event for _ in range(5) for event in engine.step()]
    assert [event.error for event in events] == [None] * 5
    engine.shutdown()
