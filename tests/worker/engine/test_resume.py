"""Outputs equal those of requests that ran alone with the same seed: under memory pressure, and where a device lags the host, which
computes the next step before the host has this one's tokens.

Every stateful stage can be rebuilt from the contract: runs are cut at every output position and resumed elsewhere. Requests are
held while their prefix comes from another worker, and of some only the first token is computed.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.grammar.vocabularies import json_grammar
from tests.device_ahead import AheadExecutor
from tests.engine_driver import Whole, are_close, drain, make_engine, make_request, num_active, prompt_logprobs, run
from tests.matrices import matrix
from tests.tiny_checkpoints import reference_logits
from tests.worker.conftest import Start
from transom_core.config import EngineConfig
from transom_core.contract import HeavyPolicy, OutputEvent, Request, WindowPolicy
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import Executor
from transom_worker.execution.executor_factory import create_executor
from transom_worker.telemetry.transfer_report import FetchReport

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
NUM_TOKENS = 20

LIST = json_grammar({"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2, "maxItems": 4})
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "logprobs": 0},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {7: 3.0, 9: -5.0},
        "logprobs": 2,
    },
    "grammar": {"temperature": 1.0, "top_p": 0.95, "grammar": LIST, "ignore_eos": False, "logprobs": 2},
    "greedy grammar": {"grammar": LIST, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
    "min tokens": {"temperature": 1.0, "min_tokens": 6, "ignore_eos": False, "logprobs": 1},
}


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


@pytest.mark.parametrize(
    ("chunk", "steps_in_flight", "num_resumed"), [(16, 1, 0), (16, 2, 9), (1024, 1, 9), (1024, 2, 0)]
)
def test_prompt_logprobs_under_pressure(tiny_model: Path, chunk: int, steps_in_flight: int, num_resumed: int) -> None:
    """Chunks, preemptions, cached prefixes and resumed output change nothing about them."""
    executor = AheadExecutor if steps_in_flight == 2 else create_executor
    sizes: dict[str, Any] = {"max_num_batched_tokens": chunk, "steps_in_flight": steps_in_flight, **TIGHT}
    engine = make_engine(str(tiny_model), executor=executor, **sizes)
    run(engine, [make_request("before", PROMPTS[3], max_tokens=4)])
    resumed = [50 + j for j in range(num_resumed)]
    tables = prompt_logprobs(engine, PROMPTS, resumed=resumed, max_tokens=30, prompt_logprobs=2)
    assert engine.scheduler.work.num_preemptions > 0
    for prompt, table in zip(PROMPTS, tables, strict=True):
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
    assert log == ["launched", "launched", "waited", *["launched", "delivered", "waited"] * 9, "delivered", "waited"]


def test_kv_policies_wait_for_their_tokens(start: Start) -> None:
    policies = (WindowPolicy(window=16), HeavyPolicy(budget=64), None, None, None)
    plain = [make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(SHORT_PROMPTS)]
    mixed = [replace(one, kv_policy=policy) for one, policy in zip(plain, policies, strict=True)]
    want = answers(start, mixed, steps_in_flight=1)
    assert answers(start, mixed, steps_in_flight=2, executor=AheadExecutor) == want


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two workers: one begins a stream, and the other continues it. Only one caches prefixes."""
    pair = make_engine(str(tiny_model)), make_engine(str(tiny_model), enable_prefix_caching=False, block_size=8)
    yield pair
    for engine in pair:
        engine.shutdown()


@pytest.mark.parametrize(("name", "num_prompt"), matrix(list(CASES), [5, 33], strength=1))
def test_cut_at_every_position(engines: tuple[Engine, Engine], name: str, num_prompt: int) -> None:
    """All cuts of an answer are resumed together on the other worker; of a complete one only its end is left."""
    prompt = [(37 * i + 11) % 2000 + 20 for i in range(num_prompt)]
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, **CASES[name]}
    (whole,) = run(engines[0], [make_request("whole", prompt, **params)])
    cuts = range(len(whole.token_ids) + 1)
    requests = [make_request(f"cut{n}", prompt, resumed=whole.token_ids[:n], **params) for n in cuts]
    for n, rest in zip(cuts, run(engines[1], requests), strict=True):
        assert rest.token_ids == whole.token_ids[n:]
        assert whole.text.endswith(rest.text)
        assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert are_close(rest.logprobs, whole.logprobs[n:])
    assert rest.text == ""


def test_an_answer_with_all_its_tokens_ends_as_its_grammar_says(engines: tuple[Engine, Engine]) -> None:
    """A grammar that the last of `max_tokens` tokens completes ends the answer, not its length."""
    params: dict[str, Any] = {"grammar": LIST, "temperature": 1.0}
    (whole,) = run(engines[0], [make_request("whole", [7, 8, 9], max_tokens=100, **params)])
    for cut, reason in ((whole.token_ids, "stop"), (whole.token_ids[:-1], "length")):
        params["max_tokens"] = len(cut)
        (alone,) = run(engines[0], [make_request("alone", [7, 8, 9], **params)])
        (rest,) = run(engines[1], [make_request("rest", [7, 8, 9], resumed=cut, **params)])
        assert (alone.finish_reason, rest.finish_reason, rest.token_ids, rest.text) == (reason, reason, [], "")


PROMPT = list(range(5, 90))
FETCHED = FetchReport(source="a", outcome="timeout")


@pytest.fixture
def engine(start: Start) -> Engine:
    return start(max_num_seqs=4)


def test_a_held_request_makes_no_work_and_lets_others_run(engine: Engine) -> None:
    alone = run(engine, [make_request("alone", PROMPT)])[0]
    engine.add(make_request("held", PROMPT[::-1]), is_held=True)
    assert not engine.has_work
    assert (engine.scheduler.num_waiting, engine.load().waiting_tokens) == (1, len(PROMPT))
    engine.add(make_request("other", PROMPT))
    events = drain(engine)
    assert {event.request_id for event in events} == {"other"}
    assert tuple(alone.token_ids) == tuple(token for event in events for token in event.token_ids)
    engine.stop_holding("held", FETCHED)
    assert {event.request_id for event in drain(engine)} == {"held"}
    told = [event for event in engine.timelines.events_of("held") if event["what"] == "prefix_fetched"]
    assert [(one["source"], one["outcome"]) for one in told] == [("a", "timeout")]


def test_a_held_request_keeps_its_place(engine: Engine) -> None:
    engine.add(make_request("first", PROMPT), is_held=True)
    engine.add(make_request("second", PROMPT[::-1]))
    engine.stop_holding("first", FETCHED)
    assert [one.request.request_id for one in engine.scheduler.admission.waiting] == ["first", "second"]
    drain(engine)


def test_a_held_request_can_end(engine: Engine) -> None:
    for name in ("aborted", "failed"):
        engine.add(make_request(name, PROMPT), is_held=True)
    assert engine.abort("aborted")
    engine.stop_holding("aborted", FETCHED)
    engine.stop_holding("unknown", FETCHED)
    assert len(engine.scheduler.admission.waiting.held) == 1
    assert [event.request_id for event in engine.fail(RuntimeError("lost"))] == ["failed"]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "logprobs": 2}, {"stop": ("zzzz",)}], ids=str)
def test_the_first_token_is_handed_over_and_the_rest_follows_elsewhere(engine: Engine, params: dict[str, Any]) -> None:
    whole = run(engine, [make_request("whole", PROMPT, **params)])[0]
    engine.add(replace(make_request("first", PROMPT, **params), prefill_only=True))
    (event,) = drain(engine)
    assert event.is_handover
    assert event.finish_reason is None
    assert list(event.token_ids) == whole.token_ids[:1]
    assert not engine.requests
    assert not num_active(engine)
    engine.add(make_request("rest", PROMPT, resumed=list(event.token_ids), **params))
    rest = drain(engine)
    assert [token for one in rest for token in one.token_ids] == whole.token_ids[1:]
    assert event.text + "".join(one.text for one in rest) == whole.text
    assert not any(one.is_handover for one in rest)
    assert 'finish_reason="handover"' in engine.metrics.text().decode()


def test_an_output_that_ends_with_its_first_token_is_not_handed_over(engine: Engine) -> None:
    engine.add(replace(make_request("one", PROMPT, max_tokens=1), prefill_only=True))
    (event,) = drain(engine)
    assert (event.finish_reason, event.is_handover) == ("length", False)
