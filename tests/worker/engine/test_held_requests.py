"""Requests that are held while their prefix comes from another worker, and requests of which only the first token is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine_driver import drain, make_request, num_active, run
from tests.worker.conftest import Start
from transom_worker.engine.engine import Engine
from transom_worker.kvcache.tiers.transfer.transfer_report import FetchReport

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
