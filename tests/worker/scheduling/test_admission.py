"""Validation at admission: what is refused, with which numbers and field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.contract import CONTRACT_VERSION, Request
from transom_core.errors import Overloaded, PromptTooLong, RequestError, RequestTooLarge, WorkerLost
from transom_worker.scheduling.request_validation import check_tokens


def driver(num_pages: int = 100, **config: Any) -> Driver:
    return Driver(layout(["full", "window"], num_pages=num_pages), **config)


def test_a_request_of_another_version_goes_to_another_worker() -> None:
    with pytest.raises(WorkerLost, match=f"version {CONTRACT_VERSION - 1}; this worker speaks {CONTRACT_VERSION}"):
        check_tokens(replace(request("old", range(3)), version=CONTRACT_VERSION - 1), vocab_size=100)


def test_a_prompt_needs_room_for_one_more_token() -> None:
    driver().add(request("fits", range(95)))
    with pytest.raises(PromptTooLong, match=r"has 96 tokens.*length is 96") as caught:
        driver().add(request("long", range(96)))
    assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLong, match="and 2 resumed output tokens"):
        driver().add(request("long", range(94), resumed=(1, 2)))


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    small = driver(num_pages=6)
    capacity = small.scheduler.cache.capacity.longest_tokens(small.scheduler.max_model_len)
    assert 20 < capacity < 95
    small.add(request("fits", range(20), capacity - 20))
    with pytest.raises(
        RequestTooLarge, match=rf"20 prompt, up to {capacity - 19} output.*enough for {capacity}"
    ) as caught:
        small.add(request("large", range(20), capacity - 19))
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestTooLarge) as caught:
        small.add(request("large", range(capacity), 5))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestTooLarge):
        small.add(request("open", range(20), None))  # unset max_tokens may grow to the model's length
    small.run()
    assert small.finished == ["fits"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (request("r", []), "prompt"),
        (request("r", [1], 2, resumed=(3, 4)), "resumed_output_ids"),
        (replace(request("r", [1]), client="x" * 65), "client"),
        (replace(request("r", [1]), client_weight=0.0), "client_weight"),
        (replace(request("r", [1]), client_weight=float("nan")), "client_weight"),
        (replace(request("r", [1]), client_weight=float("inf")), "client_weight"),
    ],
)
def test_requests_that_make_no_sense_are_refused(item: Request, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        driver().add(item)
    assert caught.value.param == param


def test_the_queue_is_bounded_beyond_the_free_running_slots() -> None:
    full = driver(max_num_seqs=2, max_waiting=3)
    for i in range(5):
        full.add(request(str(i), [i + 1]))
    with pytest.raises(Overloaded, match="limit is 3") as caught:
        full.add(request("6", [1]))
    assert caught.value.retry_after_s > 0
    full.run()
    assert len(full.finished) == 5


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    scheduler = driver()
    scheduler.add(request("r", [1]))
    with pytest.raises(RequestError, match="already"):
        scheduler.add(request("r", [1]))
    scheduler.run()
    scheduler.add(request("r", [1]))


def test_a_client_that_leaves_while_blocked_is_forgotten() -> None:
    busy = driver(num_pages=8)
    for name, first in (("one", 0), ("other", 100)):
        busy.add(request(name, range(first, first + 80), 15, client=name))
    blocked = busy.scheduler.admission.blocked
    while busy.schedule() and not blocked:
        busy.receive()
    (client,) = blocked
    busy.abort(client.name)
    assert not blocked
    busy.run()
