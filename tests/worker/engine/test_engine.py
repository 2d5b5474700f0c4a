"""The engine's admission and its ends (what it refuses, its messages, and that no block stays in use), and the load that it
reports."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine_driver import drain, make_request, run
from tests.worker.conftest import Start
from transom_core.clock import steady_time_s
from transom_core.contract import OutputEvent, WorkerLoad
from transom_core.errors import ConfigError, RequestError
from transom_worker.engine.engine import Engine
from transom_worker.engine.running_request import RunningRequest
from transom_worker.engine.state_report import LEAST_FETCHED_BYTES, MAX_PLACES, StepRates
from transom_worker.scheduling.outputs import SequenceOutput

HOUR_S = 3600.0


@pytest.fixture
def engine(start: Start) -> Engine:
    return start(max_waiting=2, max_num_seqs=2)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
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


def test_a_length_that_the_pool_cannot_hold_is_refused_at_start(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"KV pool holds \d+ tokens .* 2000"):
        start(kv_cache_memory_bytes="512KiB", max_model_len=2000)


@pytest.mark.parametrize("skew_s", [-24 * HOUR_S, 0.0, 24 * HOUR_S])
def test_deadlines_and_measurements_do_not_depend_on_the_hosts_clock(start: Start, skew_s: float) -> None:
    """Hosts' clocks may differ by any amount: a worker measures, and ends requests, by durations alone."""
    engine = start(clock=lambda: steady_time_s() + skew_s)
    run(engine, [make_request("cold", [5, 6, 7], max_tokens=2)])
    for name, waited_s in (("a", 0.0), ("b", HOUR_S)):  # what it waited in its router is not this worker's
        in_time = replace(make_request(name, [5, 6, 7], max_tokens=3), time_left_s=HOUR_S, waited_s=waited_s)
        [output] = run(engine, [in_time])
        assert output.finish_reason == "length"
    assert 0 < engine.load().first_token_s < HOUR_S / 2
    engine.add(replace(make_request("late", [5, 6], max_tokens=500), time_left_s=0.0))
    engine.add(make_request("other", [5, 6], max_tokens=3))
    events = drain(engine)
    (late,) = [event for event in events if event.request_id == "late"]
    assert late.error is not None
    assert late.error.kind == "RequestTimeout"
    assert [event.finish_reason for event in events if event.request_id == "other"][-1] == "length"


@pytest.mark.parametrize("num_steps", [0, 2])
def test_many_aborts_publish_the_state_once(start: Start, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Statistics of the whole cache are not computed for every request that leaves, and the last state is published."""
    engine = start()
    for i in range(12):
        engine.add(make_request(f"r{i}", [5, 6, i], max_tokens=100))
    for _ in range(num_steps):
        engine.step()
    states = []
    monkeypatch.setattr(engine.events, "published", states.append)
    for i in range(12):
        engine.abort(f"r{i}")
    assert drain(engine) == []
    assert len(states) == 1
    assert (states[0].load.num_running, states[0].load.num_waiting) == (0, 0)


def test_no_event_follows_an_abort(start: Start) -> None:
    """Not even one that waits for the next plan, of a request that has ended with it."""
    engine, delivered = start(steps_in_flight=2), list[list[OutputEvent]]()
    for name, max_tokens in (("ended", 1), ("goes on", 9)):
        engine.add(make_request(name, [5, 6, 7], max_tokens=max_tokens))
    assert engine.step(delivered.append) == []
    assert not engine.abort("ended")
    assert engine.abort("goes on")
    assert drain(engine) + delivered == []


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


def test_a_deadline_is_its_own_requests_alone(start: Start) -> None:
    """An id that is used again after its first request has ended does not inherit that one's deadline."""
    now_s = 1000.0
    engine = start(clock=lambda: now_s)
    engine.add(replace(make_request("again", [5], max_tokens=1), time_left_s=60.0))
    drain(engine)
    engine.add(make_request("again", [5], max_tokens=5))
    now_s += 3600
    events = [event for _ in range(5) for event in engine.step()]
    assert [event.error for event in events] == [None] * 5


def test_a_report_counts_what_is_left_to_compute_and_what_is_held(start: Start) -> None:
    engine = start(max_num_seqs=2, max_num_batched_tokens=64)
    idle = engine.load()
    assert idle == WorkerLoad(max_num_seqs=2)
    for at in range(3):
        engine.add(make_request(f"r{at}", list(range(at * 100, at * 100 + 100)), max_tokens=6))
    waiting = engine.load()
    assert (waiting.num_running, waiting.num_waiting, waiting.waiting_tokens) == (0, 3, 300)
    assert waiting.used_share == 0
    reports = []
    while engine.has_work:
        engine.step()
        reports.append(engine.load())
    first = reports[0]
    assert (first.num_running, first.num_waiting) == (1, 2)
    assert 300 - 64 - 1 <= first.waiting_tokens <= 300 - 64
    assert 0 < first.used_share < 1
    assert {report.num_running + report.num_waiting for report in reports} == {3, 2, 1, 0}
    assert [report.waiting_tokens for report in reports] == sorted((r.waiting_tokens for r in reports), reverse=True)
    last = reports[-1]
    assert (last.num_running, last.num_waiting, last.waiting_tokens, last.used_share) == (0, 0, 0, 0)
    assert last.prefill_tokens_per_s > 0
    assert last.decode_step_s > 0
    assert last.first_token_s == 0  # all came before the first step, which compiles
    run(engine, [make_request("warm", [5, 6, 7])])
    assert engine.load().first_token_s > 0


def test_preempted_tokens_count_as_waiting(start: Start) -> None:
    engine = start(max_num_seqs=4)
    for at in range(2):
        engine.add(make_request(f"r{at}", list(range(at * 100, at * 100 + 50)), max_tokens=40))
    while engine.load().waiting_tokens:
        engine.step()
    assert engine.load().used_share > 0
    assert engine.abort("r0")
    assert engine.load().num_running == 1
    engine.scheduler.admission.preempt_all()
    assert engine.load().num_waiting == 1
    assert engine.load().waiting_tokens > 50
    assert engine.load().used_share == 0


def test_rates_forget_the_cold_start_and_weigh_steps_by_their_length() -> None:
    rates = StepRates()
    rates.stepped(2000, 1, 10.0, now_s=10.0)  # compiling
    assert rates.prefill_tokens_per_s == 0
    rates.stepped(1000, 2, 0.1, now_s=11.0)
    assert rates.prefill_tokens_per_s == pytest.approx(10_000)
    rates.stepped(30, 1, 0.01, now_s=12.0)  # a short prompt, slow by its fixed part: hardly counts
    assert 9_000 < rates.prefill_tokens_per_s < 10_000
    rates.stepped(8, 8, 0.02, now_s=13.0)
    rates.stepped(10, 2, 5.0, now_s=18.0)  # too few prompt tokens for a rate, too many for a decode step
    assert rates.decode_step_s == 0.02
    for _ in range(40):
        rates.stepped(1000, 2, 0.2, now_s=20.0)
    assert rates.prefill_tokens_per_s == pytest.approx(5_000, rel=0.01)


def test_fetches_are_measured_by_place_and_the_last_places_are_kept() -> None:
    rates = StepRates()
    rates.fetched("near/device", LEAST_FETCHED_BYTES, 0.001)
    rates.fetched("far/host", LEAST_FETCHED_BYTES, 0.1)
    rates.fetched("far/host", LEAST_FETCHED_BYTES - 1, 10.0)  # too small
    found = rates.fetch_rates
    assert found["near/device"] == pytest.approx(100 * found["far/host"])
    assert found["far/host"] < found[""] < found["near/device"]
    for number in range(2 * MAX_PLACES):
        rates.fetched(f"{number}/device", LEAST_FETCHED_BYTES, 0.1)
    assert len(rates.fetch_rates) == MAX_PLACES
    assert {"", f"{2 * MAX_PLACES - 1}/device"} <= rates.fetch_rates.keys()


def test_the_first_token_time_leaves_out_the_cold_start_and_begins_at_nothing() -> None:
    rates = StepRates()
    rates.stepped(2000, 1, 20.0, now_s=120.0)
    for arrival_s in (100.0, 105.0, 119.0):  # they waited for the first step
        rates.first_token(arrival_s, 130.0)
    assert rates.first_token_s == 0
    rates.first_token(130.0, 140.0)  # one slow request does not count whole
    assert rates.first_token_s == pytest.approx(2.0)
    for _ in range(40):
        rates.first_token(150.0, 151.0)
    assert rates.first_token_s == pytest.approx(1.0, rel=0.01)
