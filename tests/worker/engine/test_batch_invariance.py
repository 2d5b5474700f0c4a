"""Outputs equal those of requests that ran alone with the same seed: under memory pressure, and where a device lags the host, which
computes the next step before the host has this one's tokens."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device_ahead import AheadExecutor
from tests.engine_driver import Whole, are_close, make_engine, make_request, run
from tests.tiny_checkpoints import reference_logits
from tests.worker.conftest import Start
from transom_core.config import EngineConfig
from transom_core.contract import HeavyPolicy, LogprobTable, OutputEvent, Request, WindowPolicy
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import Executor
from transom_worker.execution.executor_factory import create_executor

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


@pytest.mark.parametrize(
    ("chunk", "steps_in_flight", "executor"),
    [(16, 2, create_executor), (1024, 1, create_executor), (64, 2, AheadExecutor)],
)
def test_sampled_outputs_do_not_depend_on_the_batch(
    start: Start, alone: list[Whole], chunk: int, steps_in_flight: int, executor: Callable[[EngineConfig], Executor]
) -> None:
    """A stop costs the device one token, and sends no wrong one; penalties wait for the tokens that the host has."""
    engine = start(max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight, executor=executor, **TIGHT)
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
    executor = AheadExecutor if steps_in_flight == 2 else create_executor
    sizes: dict[str, Any] = {"max_num_batched_tokens": chunk, "steps_in_flight": steps_in_flight, **TIGHT}
    engine = make_engine(str(tiny_model), executor=executor, **sizes)
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


def answers(start: Start, requests: list[Request], **settings: Any) -> list[Whole]:
    return run(start(block_size=8, max_model_len=256, **settings), requests)


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


def test_kv_policies_wait_for_their_tokens(start: Start) -> None:
    policies = (WindowPolicy(window=16), HeavyPolicy(budget=64), None, None, None)
    plain = [make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(SHORT_PROMPTS)]
    mixed = [replace(one, kv_policy=policy) for one, policy in zip(plain, policies, strict=True)]
    want = answers(start, mixed, steps_in_flight=1)
    assert answers(start, mixed, steps_in_flight=2, executor=AheadExecutor) == want
