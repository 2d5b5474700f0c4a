"""Clients share one scheduler: a hostile one delays the others by a bound that does not depend on what it sends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_core.errors import Overloaded
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.fair_preemption import SLICE_STEPS
from transom_worker.scheduling.prompt_pace import PromptPace, divide

MAX_MODEL_LEN = 320
NUM_SLOTS, STEP_TOKENS = 6, 24
VICTIM_PROMPT, VICTIM_OUTPUT = 20, 6
# The hostile client's first sequence may fill the pool for a slice, after the steps in which it computes again what it lost, with
# half of each step's tokens.
MAX_WAIT = SLICE_STEPS + MAX_MODEL_LEN // (STEP_TOKENS // 2)


@dataclass(frozen=True, slots=True)
class Attack:
    """What a hostile client does before one step: it sends requests of (prompt, output) tokens, and leaves some of its others."""

    requests: list[tuple[int, int]] = field(default_factory=list)
    priority: int = 0
    shares: bool = False  # the prompts begin with the victims'
    num_left: int = 0


ATTACKS = st.lists(
    st.builds(
        Attack,
        requests=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 100)), min_size=1, max_size=12),
        priority=st.integers(-3, 0),
        shares=st.booleans(),
        num_left=st.sampled_from([0, 0, 1, 5, 50]),
    ),
    min_size=1,
    max_size=6,
)


class Tenants:
    """Victims who send one small request after the other, beside a client that never stops."""

    def __init__(self, attacks: list[Attack], *, num_victims: int, **config: object) -> None:
        least = KvCache(layout(["full", "window"], num_pages=1000), block_size=BLOCK).capacity.worst_case_pages(
            MAX_MODEL_LEN
        )
        self.driver = Driver(
            layout(["full", "window"], num_pages=least + 2),
            max_model_len=MAX_MODEL_LEN,
            min_shared_tokens=BLOCK,
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=STEP_TOKENS,
            max_waiting=32,
            **config,  # type: ignore[arg-type]
        )
        self.attacks, self.num_victims = attacks, num_victims
        self.num_steps, self.num_sent = 0, 0
        self.sent_at: dict[str, int] = {}
        self.waits: list[int] = []  # of the victims' requests for their first token, in steps
        self.gaps: list[int] = []  # between their tokens

    def run(self, num_steps: int) -> None:
        driver = self.driver
        seen: dict[str, tuple[int, int]] = {}  # a victim's request -> (tokens, step of the last one)
        for _ in range(num_steps):
            self.num_steps += 1
            self.attack(self.attacks[self.num_steps % len(self.attacks)])
            for victim in range(self.num_victims):
                self.keep_busy(victim, seen)
            driver.step()
            for name, (count, last) in seen.items():
                if len(driver.outputs[name]) > count:
                    (self.gaps if count else self.waits).append(self.num_steps - last)
                    seen[name] = (len(driver.outputs[name]), self.num_steps)
                assert name in driver.finished or self.num_steps - seen[name][1] <= MAX_WAIT, f"{name} starves"

    def keep_busy(self, victim: int, seen: dict[str, tuple[int, int]]) -> None:
        """A victim sends its next request when its last one has ended."""
        unfinished = self.driver.scheduler.by_request
        if any(name.startswith(f"v{victim}-") for name in unfinished):
            return
        name = f"v{victim}-{self.num_steps}"
        self.driver.add(request(name, [victim] * VICTIM_PROMPT, VICTIM_OUTPUT, client=f"victim {victim}"))
        seen[name] = (0, self.num_steps)

    def attack(self, attack: Attack) -> None:
        driver = self.driver
        for num_prompt, num_output in attack.requests:
            self.num_sent += 1
            start = [0] * min(num_prompt, VICTIM_PROMPT) if attack.shares else []
            prompt = [*start, *[self.num_sent + 100] * (num_prompt - len(start))]
            try:
                driver.add(request(f"h{self.num_sent}", prompt, num_output, client="hostile", priority=attack.priority))
            except Overloaded:
                break
        own = [name for name in driver.scheduler.by_request if name.startswith("h")]
        for name in own[: attack.num_left]:
            driver.abort(name)


@pytest.mark.parametrize(
    "attack",
    [
        Attack([(1, 100)] * 12),  # many small prompts with long answers
        Attack([(200, 100)] * 4),  # each fills the pool
        Attack([(200, 100)] * 4, priority=-3, shares=True, num_left=3),  # whose prefix another computes, and leaves
        Attack([(60, 1)] * 12, num_left=50),  # sent, left and sent again
    ],
)
def test_attacks(attack: Attack) -> None:
    tenants = Tenants([attack], num_victims=2, policy="priority")
    tenants.run(250)
    assert len(tenants.waits) > 40
    assert sum(tenants.waits) < 8 * len(tenants.waits)


@settings(max_examples=num_examples(daily=3, exhaustive=500), deadline=None)
@given(
    attacks=ATTACKS,
    num_victims=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    steps_in_flight=st.integers(1, 2),
    is_paced=st.booleans(),
)
def test_no_one_waits_longer_than_a_bound_whatever_a_hostile_client_sends(
    attacks: list[Attack], num_victims: int, policy: str, steps_in_flight: int, is_paced: bool
) -> None:
    tenants = Tenants(
        attacks,
        num_victims=num_victims,
        policy=policy,
        steps_in_flight=steps_in_flight,
        pace=PromptPace(0.05) if is_paced else None,
    )
    tenants.run(250)
    assert len(tenants.waits) >= num_victims  # the run was long enough to tell; `run` has checked each wait
    driver = tenants.driver
    driver.run(max_steps=20_000)  # nothing is lost: all that was accepted ends
    assert sorted(driver.finished) == sorted(driver.requests)
    driver.check_idle()


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


def test_a_prompt_that_fills_steps_leaves_another_client_its_share_of_each() -> None:
    driver = Driver(layout(["full"], num_pages=400), max_model_len=400, max_num_batched_tokens=16)
    driver.add(request("long", range(300), 4, client="a"))
    driver.step()
    driver.add(request("short", range(500, 530), 4, client="b"))
    for _ in range(2):
        plan = driver.schedule()
        assert plan is not None
        assert plan.count == [8, 8]
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
