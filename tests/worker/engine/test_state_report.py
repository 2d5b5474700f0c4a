"""A worker's reported load is the work that it has to do."""

from __future__ import annotations

import pytest

from tests.engine_driver import make_request, run
from tests.worker.conftest import Start
from transom_core.contract import WorkerLoad
from transom_worker.engine.state_report import StepRates


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
