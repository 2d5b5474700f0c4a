"""No request starves, whatever others send: inside one client by the bound that `scheduling.queue` states, and beside a hostile
client by a bound that does not depend on what it sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.contract.request import PRIORITY_AGING_S
from transom_core.errors import Overloaded
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.fair_preemption import SLICE_STEPS
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Attack:
    """What an attacker does before one step, `pause_s` after the one before: it sends requests of (prompt, output) tokens, and
    leaves some of its others. Where it `shares`, its prompts begin as the victims' do.
    """

    requests: list[tuple[int, int]] = field(default_factory=list)
    priority: int = 0
    shares: bool = False
    num_left: int = 0
    pause_s: float = 1.0


def attacks(*, prompt: int, output: int, priorities: tuple[int, int]) -> st.SearchStrategy[list[Attack]]:
    one = st.builds(
        Attack,
        requests=st.lists(st.tuples(st.integers(1, prompt), st.integers(1, output)), min_size=1, max_size=12),
        priority=st.integers(*priorities),
        shares=st.booleans(),
        num_left=st.sampled_from([0, 0, 1, 5, 50]),
        pause_s=st.sampled_from([1.0, 7.0, 20.0]),
    )
    return st.lists(one, min_size=1, max_size=6)


class Attacker:
    """Never stops sending requests to a scheduler whose memory holds little more than the longest of them."""

    def __init__(
        self, attacks: list[Attack], *, client: str, shared: list[int], max_model_len: int, **config: object
    ) -> None:
        roomy = KvCache(layout(["full", "window"], num_pages=1000), block_size=BLOCK)
        least = roomy.capacity.worst_case_pages(max_model_len)
        self.driver = Driver(
            layout(["full", "window"], num_pages=least + 2),
            max_model_len=max_model_len,
            min_shared_tokens=BLOCK,
            **config,  # type: ignore[arg-type]
        )
        self.now_s = self.driver.now_s = 0.0
        self.attacks, self.client, self.shared = cycle(attacks), client, shared
        self.num_sent = 0

    def attack(self) -> None:
        driver, attack = self.driver, next(self.attacks)
        self.now_s = driver.now_s = self.now_s + attack.pause_s
        for num_prompt, num_output in attack.requests:
            self.num_sent += 1
            start = self.shared[:num_prompt] if attack.shares else []
            prompt = [*start, *[self.num_sent + 100] * (num_prompt - len(start))]
            name, fields = f"h{self.num_sent}", dict(client=self.client, priority=attack.priority)
            try:
                driver.add(request(name, prompt, num_output, **fields))  # type: ignore[arg-type]
            except Overloaded:
                break
        own = [name for name in driver.scheduler.by_request if name.startswith("h")]
        for name in own[: attack.num_left]:
            driver.abort(name)


# One client

MAX_PRIORITY = 1


class Watch(SchedulerListener):
    """Notes which requests are admitted while the victim stands in the queue, but for those that may be."""

    def __init__(self, victim: Sequence, queue: OrderedQueue, *, may_pass: set[str]) -> None:
        self.victim, self.queue, self.may_pass = victim, queue, may_pass
        self.overtakers: list[str] = []
        self.num_preemptions = 0  # of the victim

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        name = sequence.request.request_id
        if name not in self.may_pass and self.victim in list(self.queue):
            self.overtakers.append(name)

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        self.num_preemptions += sequence is self.victim


@settings(max_examples=num_examples(daily=6, exhaustive=1500))
@given(
    attacks=attacks(prompt=60, output=30, priorities=(-MAX_PRIORITY, MAX_PRIORITY)),
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 4),
    steps_in_flight=st.integers(1, 2),
    is_paced=st.booleans(),
)
def test_a_request_is_overtaken_for_a_bounded_time_and_ends_after_bounded_work(
    attacks: list[Attack], priority: int, policy: str, max_num_seqs: int, steps_in_flight: int, is_paced: bool
) -> None:
    prompt = list(range(40))
    config = {"policy": policy, "max_num_seqs": max_num_seqs, "steps_in_flight": steps_in_flight, "max_waiting": 16}
    pace = PromptPace(0.05) if is_paced else None
    attacker = Attacker(attacks, client="", shared=prompt, max_model_len=96, pace=pace, **config)
    driver, admission = attacker.driver, attacker.driver.scheduler.admission
    attacker.attack()
    driver.add(request("victim", prompt, 6, priority=priority))
    # While others may overtake the victim.
    overtaking_s = (priority + MAX_PRIORITY) * PRIORITY_AGING_S if policy == "priority" else 0.0
    last_overtaking_s = attacker.now_s + overtaking_s
    while attacker.now_s <= last_overtaking_s and "victim" not in driver.finished:
        attacker.attack()
        driver.step()
    # From here on: nothing that arrives is admitted before the victim, and it ends with the work that is here now.
    if "victim" in driver.finished:
        return
    victim, ahead = driver.scheduler.by_request["victim"], set(driver.scheduler.by_request) - {"victim"}
    items = [driver.requests[name] for name in driver.scheduler.by_request]
    max_steps = sum(item.num_prompt_tokens + (item.params.max_tokens or 0) + 2 * steps_in_flight for item in items)
    watch = Watch(victim, admission.waiting.queue, may_pass=ahead)
    admission.listeners.append(watch)
    for _ in range(max_steps):
        attacker.attack()
        driver.step()
        if "victim" in driver.finished:
            break
    assert "victim" in driver.finished, f"not after {max_steps} steps"
    assert watch.overtakers == []
    assert watch.num_preemptions <= len(ahead)


# Several clients

MAX_MODEL_LEN = 320
NUM_SLOTS, STEP_TOKENS = 6, 24
VICTIM_PROMPT, VICTIM_OUTPUT = 20, 6
# The hostile client's first sequence may fill the pool for a slice, after the steps in which it computes again what it lost, with
# half of each step's tokens.
MAX_WAIT = SLICE_STEPS + MAX_MODEL_LEN // (STEP_TOKENS // 2)


class Tenants(Attacker):
    """Victims who send one small request after the other, beside a client that never stops."""

    def __init__(self, attacks: list[Attack], *, num_victims: int, **config: object) -> None:
        config |= {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": STEP_TOKENS, "max_waiting": 32}
        shared = [0] * VICTIM_PROMPT
        super().__init__(attacks, client="hostile", shared=shared, max_model_len=MAX_MODEL_LEN, **config)
        self.num_victims, self.num_steps = num_victims, 0
        self.waits: list[int] = []  # of the victims' requests for their first token, in steps

    def run(self, num_steps: int) -> None:
        driver = self.driver
        seen: dict[str, tuple[int, int]] = {}  # a victim's request -> (tokens, step of the last one)
        for _ in range(num_steps):
            self.num_steps += 1
            self.attack()
            for victim in range(self.num_victims):
                self.keep_busy(victim, seen)
            driver.step()
            for name, (count, last) in seen.items():
                if len(driver.outputs[name]) > count:
                    if not count:
                        self.waits.append(self.num_steps - last)
                    seen[name] = (len(driver.outputs[name]), self.num_steps)
                assert name in driver.finished or self.num_steps - seen[name][1] <= MAX_WAIT, f"{name} starves"

    def keep_busy(self, victim: int, seen: dict[str, tuple[int, int]]) -> None:
        """A victim sends its next request when its last one has ended."""
        if any(name.startswith(f"v{victim}-") for name in self.driver.scheduler.by_request):
            return
        name = f"v{victim}-{self.num_steps}"
        self.driver.add(request(name, [victim] * VICTIM_PROMPT, VICTIM_OUTPUT, client=f"victim {victim}"))
        seen[name] = (0, self.num_steps)


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


@settings(max_examples=num_examples(daily=3, exhaustive=500))
@given(
    attacks=attacks(prompt=200, output=100, priorities=(-3, 0)),
    num_victims=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    steps_in_flight=st.integers(1, 2),
    is_paced=st.booleans(),
)
def test_no_one_waits_longer_than_a_bound_whatever_a_hostile_client_sends(
    attacks: list[Attack], num_victims: int, policy: str, steps_in_flight: int, is_paced: bool
) -> None:
    pace = PromptPace(0.05) if is_paced else None
    tenants = Tenants(attacks, num_victims=num_victims, policy=policy, steps_in_flight=steps_in_flight, pace=pace)
    tenants.run(250)
    assert len(tenants.waits) >= num_victims  # the run was long enough to tell; `run` has checked each wait
    driver = tenants.driver
    driver.run(max_steps=20_000)  # nothing is lost: all that was accepted ends
    assert sorted(driver.finished) == sorted(driver.requests)
    driver.check_idle()
