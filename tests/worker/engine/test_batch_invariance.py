"""Outputs equal those of requests that ran alone with the same seed: under memory pressure, and where a device lags the host, which
computes the next step before the host has this one's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device_ahead import AheadExecutor
from tests.engine_driver import Whole, are_close, make_engine, make_request, run
from tests.tiny_checkpoints import reference_logits
from tests.worker.conftest import Start
from transom_core.contract import HeavyPolicy, LogprobTable, OutputEvent, Request, WindowPolicy
from transom_worker.engine.engine import Engine

TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 300 << 10, "block_size": 8, "max_model_len": 256, "max_num_seqs": 8}
PROMPTS = [[(131 * i + 17 * j) % 1900 + 40 for j in range(n)] for i, n in enumerate((1, 16, 17, 40, 63, 100, 150, 200))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.8, "logit_bias": {50: 6.0, 60: -100.0}},
    {"temperature": 1.0, "top_k": -1, "stop": ("e", "the"), "min_tokens": 6},
    {"temperature": 1.0, "stop_token_ids": tuple(range(40, 400)), "min_tokens": 3, "logprobs": 20},
]


def requests() -> list[Request]:
    pairs = zip(PROMPTS, itertools.cycle(KINDS), strict=False)
    seeded = [make_request(f"r{i}", prompt, max_tokens=30, **params) for i, (prompt, params) in enumerate(pairs)]
    choices = [replace(one, request_id=f"{one.request_id}-second", choice_index=1) for one in seeded[::3]]
    return [replace(one, seed=one.seed + 2**63 + i) for i, one in enumerate(seeded)] + choices


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Iterator[list[Whole]]:
    engine = make_engine(str(tiny_model), enable_prefix_caching=False)
    yield [run(engine, [request])[0] for request in requests()]
    engine.shutdown()


@pytest.mark.parametrize(("chunk", "steps_in_flight"), [(16, 2), (1024, 1)])
def test_sampled_outputs_do_not_depend_on_the_batch(
    start: Start, alone: list[Whole], chunk: int, steps_in_flight: int
) -> None:
    engine = start(max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight, **TIGHT)
    for got, expected in zip(run(engine, requests()), alone, strict=True):
        assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
        assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert are_close(got.logprobs, expected.logprobs)
    assert engine.scheduler.work.num_preemptions > 0


def prompt_logprobs(engine: Engine, asked: list[Request]) -> dict[str, LogprobTable]:
    """Run requests together; each must get its prompt's log-probabilities exactly once, with its first event."""
    found: dict[str, LogprobTable] = {}
    seen: set[str] = set()
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert (event.prompt_logprobs is not None) == (event.request_id not in seen)
            seen.add(event.request_id)
            if event.prompt_logprobs is not None:
                found[event.request_id] = event.prompt_logprobs
    return found


@pytest.mark.parametrize(
    ("chunk", "steps_in_flight", "num_resumed"), [(16, 1, 0), (16, 2, 9), (1024, 1, 9), (1024, 2, 0)]
)
def test_prompt_logprobs_under_pressure(tiny_model: Path, chunk: int, steps_in_flight: int, num_resumed: int) -> None:
    """Chunks, preemptions, cached prefixes and resumed output change nothing about them."""
    engine = make_engine(str(tiny_model), max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight, **TIGHT)
    run(engine, [make_request("before", PROMPTS[3], max_tokens=4)])
    asked = [
        make_request(f"r{i}", prompt, resumed=[50 + j for j in range(num_resumed)], max_tokens=30, prompt_logprobs=2)
        for i, prompt in enumerate(PROMPTS)
    ]
    found = prompt_logprobs(engine, asked)
    assert engine.scheduler.work.num_preemptions > 0
    for request in asked:
        prompt, table = list(request.prompt_token_ids), found[request.request_id]
        expected = reference_logits(tiny_model, prompt).log_softmax(-1)
        assert [entry.chosen.token_id for entry in table] == prompt[1:]
        got = torch.tensor([entry.chosen.logprob for entry in table])
        torch.testing.assert_close(got, expected[range(len(prompt) - 1), prompt[1:]], rtol=0, atol=1e-3)
        assert all(len(entry.top) == 2 for entry in table)
    engine.shutdown()


SHORT_PROMPTS = [[(29 * i + 13 * j) % 900 + 50 for j in range(5 + 11 * i)] for i in range(5)]
TOKENS = 20


def answers(start: Start, requests: list[Request], **settings: Any) -> tuple[list[Whole], AheadExecutor | None]:
    engine = start(block_size=8, max_model_len=256, **settings)
    got = run(engine, requests)
    return got, engine.executor if isinstance(engine.executor, AheadExecutor) else None


def plain_requests(**params: Any) -> list[Request]:
    return [make_request(str(i), prompt, max_tokens=TOKENS, **params) for i, prompt in enumerate(SHORT_PROMPTS)]


def test_the_device_has_the_next_step_before_the_events_of_this_one_are_made(start: Start) -> None:
    """One message a step, with the tokens that end requests, too; nothing is held back when nothing is left to compute."""
    engine = start(steps_in_flight=2, executor=AheadExecutor)
    assert isinstance(engine.executor, AheadExecutor)
    log, tokens = engine.executor.queue.log, dict.fromkeys("01234", 0)

    def deliver(events: list[OutputEvent]) -> None:
        log.append("delivered")
        for event in events:
            tokens[event.request_id] += len(event.token_ids)

    for i, prompt in enumerate(SHORT_PROMPTS):
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
    mixed = [one for pair in zip(plain_requests(**params), plain_requests(), strict=True) for one in pair]
    mixed = [replace(request, request_id=str(i)) for i, request in enumerate(mixed)]
    want, _ = answers(start, mixed, steps_in_flight=1)
    got, _ = answers(start, mixed, steps_in_flight=2, executor=AheadExecutor)
    assert got == want


def test_a_stop_costs_one_token_of_the_device_and_no_wrong_one(start: Start) -> None:
    plain, _ = answers(start, plain_requests(), steps_in_flight=1)
    stops = [whole.token_ids[3 + 2 * i] for i, whole in enumerate(plain)]
    stopping = [
        make_request(str(i), prompt, max_tokens=TOKENS, stop_token_ids=(stop,))
        for i, (prompt, stop) in enumerate(zip(SHORT_PROMPTS, stops, strict=True))
    ]
    want, _ = answers(start, stopping, steps_in_flight=1)
    got, _ = answers(start, stopping, steps_in_flight=2, executor=AheadExecutor)
    assert got == want
    assert any(len(whole.token_ids) < TOKENS for whole in got)


def test_kv_policies_wait_for_their_tokens(start: Start) -> None:
    policies = (WindowPolicy(window=16), HeavyPolicy(budget=64), None, None, None)
    mixed = [replace(one, kv_policy=policy) for one, policy in zip(plain_requests(), policies, strict=True)]
    want, _ = answers(start, mixed, steps_in_flight=1)
    got, _ = answers(start, mixed, steps_in_flight=2, executor=AheadExecutor)
    assert got == want


def test_a_step_that_runs_out_of_memory_costs_one_request(start: Start) -> None:
    """What was launched before it counts, what was planned after it is planned anew."""
    want, _ = answers(start, plain_requests(), steps_in_flight=1)
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
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(SHORT_PROMPTS))}
    failed: list[str] = []
    for request in plain_requests():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            failed += [event.request_id] if event.error is not None else []
    assert len(failed) == 1
    for i, whole in enumerate(want):
        got = tokens[str(i)]
        assert got == whole.token_ids[: len(got) if str(i) in failed else None]
