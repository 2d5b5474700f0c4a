"""A device that lags the host computes the next step before the host has this one's tokens, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.device_ahead import AheadExecutor
from tests.engine_driver import Whole, make_request, run
from tests.worker.conftest import Start
from transom_core.contract import HeavyPolicy, OutputEvent, Request, WindowPolicy

PROMPTS = [[(29 * i + 13 * j) % 900 + 50 for j in range(5 + 11 * i)] for i in range(5)]
TOKENS = 20


def answers(start: Start, requests: list[Request], **settings: Any) -> tuple[list[Whole], AheadExecutor | None]:
    engine = start(block_size=8, max_model_len=256, **settings)
    got = run(engine, requests)
    return got, engine.executor if isinstance(engine.executor, AheadExecutor) else None


def requests(**params: Any) -> list[Request]:
    return [make_request(str(i), prompt, max_tokens=TOKENS, **params) for i, prompt in enumerate(PROMPTS)]


def test_nothing_waits_between_the_launches_of_plain_steps(start: Start) -> None:
    """The device has the next step before the host waits for this one, but for the last step, after which nothing is left."""
    want, _ = answers(start, requests(), steps_in_flight=1)
    got, executor = answers(start, requests(), steps_in_flight=2, executor=AheadExecutor)
    assert got == want
    assert executor is not None
    log = executor.queue.log
    assert log[:2] == ["launched", "launched"]
    assert log[1:] == ["launched", "waited"] * (len(log) // 2 - 1) + ["waited"]


def test_the_device_has_the_next_step_before_the_events_of_this_one_are_made(start: Start) -> None:
    """One message a step, with the tokens that end requests, too; nothing is held back when nothing is left to compute."""
    engine = start(steps_in_flight=2, executor=AheadExecutor)
    assert isinstance(engine.executor, AheadExecutor)
    log, tokens = engine.executor.queue.log, dict.fromkeys("01234", 0)

    def deliver(events: list[OutputEvent]) -> None:
        log.append("delivered")
        for event in events:
            tokens[event.request_id] += len(event.token_ids)

    for i, prompt in enumerate(PROMPTS):
        engine.add(make_request(str(i), prompt, max_tokens=3 + 2 * i))
    while engine.has_work:
        for event in engine.step(deliver):
            tokens[event.request_id] += len(event.token_ids)
    assert list(tokens.values()) == [3, 5, 7, 9, 11]
    assert log == [
        "launched",
        *["launched", "waited"] * 1,
        *["launched", "delivered", "waited"] * 9,
        "delivered",
        "waited",
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3},  # needs the tokens on the host
        {"logprobs": 3},
        {"temperature": 1.0, "min_tokens": 5, "ignore_eos": False},
        {"logit_bias": {77: 3.0, 99: -100.0}},
        {"prompt_logprobs": 2},
    ],
    ids=lambda params: "-".join(params),
)
def test_parameters_keep_their_meaning(start: Start, params: dict[str, Any]) -> None:
    """Beside plain rows, so that one step has both."""
    mixed = [one for pair in zip(requests(**params), requests(), strict=True) for one in pair]
    mixed = [replace(request, request_id=str(i)) for i, request in enumerate(mixed)]
    want, _ = answers(start, mixed, steps_in_flight=1)
    got, _ = answers(start, mixed, steps_in_flight=2, executor=AheadExecutor)
    assert got == want


def test_a_stop_costs_one_token_of_the_device_and_no_wrong_one(start: Start) -> None:
    plain, _ = answers(start, requests(), steps_in_flight=1)
    stops = [whole.token_ids[3 + 2 * i] for i, whole in enumerate(plain)]
    stopping = [
        make_request(str(i), prompt, max_tokens=TOKENS, stop_token_ids=(stop,))
        for i, (prompt, stop) in enumerate(zip(PROMPTS, stops, strict=True))
    ]
    want, _ = answers(start, stopping, steps_in_flight=1)
    got, _ = answers(start, stopping, steps_in_flight=2, executor=AheadExecutor)
    assert got == want
    assert any(len(whole.token_ids) < TOKENS for whole in got)


def test_kv_policies_wait_for_their_tokens(start: Start) -> None:
    policies = (WindowPolicy(window=16), HeavyPolicy(budget=64), None, None, None)
    mixed = [replace(one, kv_policy=policy) for one, policy in zip(requests(), policies, strict=True)]
    want, _ = answers(start, mixed, steps_in_flight=1)
    got, _ = answers(start, mixed, steps_in_flight=2, executor=AheadExecutor)
    assert got == want


def test_a_step_that_runs_out_of_memory_costs_one_request(start: Start) -> None:
    """What was launched before it counts, what was planned after it is planned anew."""
    want, _ = answers(start, requests(), steps_in_flight=1)
    engine = start(steps_in_flight=2, executor=AheadExecutor)
    assert isinstance(engine.executor, AheadExecutor)
    runner = engine.executor._runner
    assert runner is not None
    launch, numbers = runner._launch, iter(range(1000))

    def fail_once(plan: Any) -> Any:
        if next(numbers) == 3:
            raise MemoryError("Unable to allocate 2.00 GiB for an array")
        return launch(plan)

    runner._launch = fail_once  # type: ignore[method-assign]
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    failed: list[str] = []
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            failed += [event.request_id] if event.error is not None else []
    assert len(failed) == 1
    for i, whole in enumerate(want):
        got = tokens[str(i)]
        assert got == whole.token_ids[: len(got) if str(i) in failed else None]
