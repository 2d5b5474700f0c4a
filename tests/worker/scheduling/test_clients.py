"""Clients share one scheduler by their weights; `test_starvation` has hostile ones."""

import pytest

from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_core.errors import Overloaded
from transom_worker.scheduling.dividing import divide
from transom_worker.scheduling.fair_preemption import RETRY_STEPS, SLICE_STEPS


def several(*counts: int, weights: tuple[float, ...] = (1.0, 1.0), max_tokens: int = 60, **config: object) -> Driver:
    """Clients "0", "1" ... with this many equal requests, which come in this order; memory is no matter."""
    driver = Driver(layout(["full"], num_pages=400), **config)  # type: ignore[arg-type]
    for client, count in enumerate(counts):
        for number in range(count):
            prompt = [client, number, *range(6)]
            name, weight = f"{client}-{number}", weights[client]
            driver.add(request(name, prompt, max_tokens, client=str(client), client_weight=weight))
    return driver


def running(driver: Driver) -> list[int]:
    clients = {client.name: len(client.running) for client in driver.scheduler.admission.clients}
    return [clients[name] for name in sorted(clients)]


def test_a_client_alone_has_all_slots_and_a_second_one_gets_its_share() -> None:
    driver = several(20, max_num_seqs=8)
    for _ in range(5):
        driver.step()
    assert running(driver) == [8]
    for number in range(5):
        driver.add(request(f"1-{number}", [1, number], 60, client="1"))
    for _ in range(2):
        driver.step()
    assert running(driver) == [7, 1]  # at once
    for _ in range(SLICE_STEPS):
        driver.step()
    assert running(driver) == [4, 4]
    driver.run()
    assert len(driver.finished) == 25


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_clients_get_tokens_in_the_ratio_of_their_weights(max_num_seqs: int) -> None:
    driver = several(80, 80, weights=(1.0, 3.0), max_tokens=20, max_num_seqs=max_num_seqs)
    for _ in range(600 // max_num_seqs):
        driver.step()
    tokens = [sum(len(ids) for name, ids in driver.tokens.items() if name[0] == client) for client in "01"]
    assert tokens[1] / tokens[0] == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_clients_whose_requests_do_not_fit_side_by_side_wait_for_a_slice(steps_in_flight: int) -> None:
    """A decoding sequence frees nothing without a window, so no news of free blocks comes when its slice is over."""
    sizes = {"max_model_len": 1000, "max_num_batched_tokens": 64, "steps_in_flight": steps_in_flight}
    driver = Driver(layout(["full"], num_pages=60), **sizes)  # type: ignore[arg-type]
    driver.add(request("long", range(500), 400, client="a"))
    while not driver.tokens["long"]:
        driver.step()
    driver.add(request("large", range(1000, 1600), 4, client="b"))
    num_steps = 0
    while "large" not in driver.finished:
        driver.step()
        num_steps += 1
    assert num_steps < SLICE_STEPS + 600 // 64 + 4 + RETRY_STEPS
    driver.run()
    assert len(driver.tokens["long"]) == 400


def test_a_prompt_that_fills_steps_leaves_another_client_its_share_of_each() -> None:
    driver = Driver(layout(["full"], num_pages=400), max_model_len=400, max_num_batched_tokens=16)
    driver.add(request("long", range(300), 4, client="a"))
    driver.step()
    driver.add(request("short", range(500, 530), 4, client="b"))
    for _ in range(2):
        assert driver.next_plan().count == [8, 8]
        driver.receive()
    driver.run()
    assert driver.finished == ["short", "long"]


def test_divide() -> None:
    assert divide(100, [10, 500, 500], [1.0, 1.0, 2.0]) == [10, 30, 60]
    assert divide(100, [500, 10], [1.0, 1.0]) == [90, 10]
    assert divide(1, [5, 5], [1.0, 1.0]) == [1, 1]


def test_one_client_cannot_take_all_waiting_places_from_another() -> None:
    driver = several(12, max_num_seqs=4, max_waiting=8)
    admission = driver.scheduler.admission
    assert admission.waiting.num_before(driver.scheduler.by_request["0-11"]) == 11
    with pytest.raises(Overloaded):
        driver.add(request("more", [1], 4, client="0"))
    for number in range(6):  # half of 12 places
        driver.add(request(f"1-{number}", [1, number], 4, client="1"))
    assert admission.waiting.num_before(driver.scheduler.by_request["1-3"]) == 3  # those of "0" are not before it
    for client in "01":
        with pytest.raises(Overloaded):
            driver.add(request("more", [1], 4, client=client))
    driver.run()
    assert len(driver.finished) == 18


def test_one_client_cannot_take_all_waiting_tokens_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transom_worker.scheduling.scheduler.MAX_TOKENS", 40)
    driver = several(4, max_num_seqs=1)  # of client "0"
    num_tokens = driver.scheduler.admission.clients.num_tokens
    driver.add(request("fills", range(40), 4, client="0"))
    with pytest.raises(Overloaded, match=rf"{num_tokens + 40} tokens"):
        driver.add(request("more", [1], 4, client="0"))
    driver.add(request("other", range(15), 4, client="1"))
    with pytest.raises(Overloaded):
        driver.add(request("more", range(15), 4, client="1"))  # more than half of the tokens
    driver.run()
    assert driver.scheduler.admission.clients.num_tokens == 0


def test_a_request_larger_than_its_share_is_served_beside_small_ones() -> None:
    """Neither starves: the large one has the pool for a slice at a time, and the small ones have it then."""
    driver = Driver(layout(["full"], num_pages=20), max_model_len=80, max_num_batched_tokens=16)
    pages = driver.scheduler.cache.arena.num_pages
    longest = driver.scheduler.cache.capacity.longest_tokens(80)
    assert pages == 20
    num_small = 0
    driver.add(request("small-0", range(30), longest - 31, client="b"))
    driver.add(request("large", range(100, 110), longest - 11, client="a"))
    for _ in range(2000):
        if not any(name.startswith("small") for name in driver.scheduler.by_request):
            num_small += 1
            driver.add(request(f"small-{num_small}", range(30), longest - 31, client="b"))
        driver.step()
        if "large" in driver.finished:
            break
    assert "large" in driver.finished
    assert num_small < 6


def test_a_prefix_that_another_client_computes_is_awaited_for_a_bounded_time() -> None:
    driver = Driver(
        layout(["full"], num_pages=400), max_model_len=600, max_num_batched_tokens=2, min_shared_tokens=BLOCK
    )
    driver.add(request("first", range(400), 4, client="a"))
    driver.step()
    driver.add(request("second", [*range(400), 7], 4, client="b"))
    waited = 0
    for _ in range(100):
        driver.step()
        waited += driver.scheduler.by_request["second"].blocks is None
    assert 20 <= waited <= 40
    driver.run()


def test_a_client_that_comes_back_has_no_claims_for_its_pause_and_keeps_its_debt() -> None:
    driver = several(1, 6, max_tokens=10, max_num_seqs=1)
    for _ in range(11):
        driver.step()
    assert driver.finished == ["0-0"]
    driver.add(request("0-1", [9], 10, client="0"))  # it has had 17 tokens, and "1" none
    while "0-1" not in driver.finished:
        driver.step()
    assert driver.finished == ["0-0", "1-0", "1-1", "0-1"]
    driver.run()
