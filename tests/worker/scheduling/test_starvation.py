"""No request starves, whatever others send: a property test of the bound that `scheduling.queue` states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.contract.request import PRIORITY_AGING_S
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence

MAX_PRIORITY = 1
MAX_MODEL_LEN = 96
BLOCK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an attacker does before one step: it sends requests of `(priority, prompt tokens, output tokens)`, `pause_s` later.

    Those with `shares` begin with the victim's own prompt.
    """

    pause_s: float
    requests: list[tuple[int, int, int]] = field(default_factory=list)
    shares: bool = False


TURNS = st.lists(
    st.builds(
        Turn,
        pause_s=st.sampled_from([1.0, 7.0, 20.0]),
        requests=st.lists(
            st.tuples(st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.integers(1, 60), st.integers(1, 30)),
            min_size=1,
            max_size=3,
        ),
        shares=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


class Watch(SchedulerListener):
    """Notes which requests are admitted while the victim stands in the queue, but for those that may be."""

    def __init__(self, victim: Sequence, queue: OrderedQueue, *, may_pass: set[str]) -> None:
        self.victim, self.queue, self.may_pass = victim, queue, may_pass
        self.overtakers: list[str] = []
        self.num_preemptions = 0  # of the victim

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        pass

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        name = sequence.request.request_id
        if name not in self.may_pass and self.victim in list(self.queue):
            self.overtakers.append(name)

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        self.num_preemptions += sequence is self.victim


class Attack:
    """A victim in a scheduler whose memory and slots are short, and an attacker that never stops sending requests."""

    def __init__(
        self,
        turns: list[Turn],
        priority: int,
        *,
        policy: str,
        pace: PromptPace | None,
        max_num_seqs: int,
        steps_in_flight: int,
    ) -> None:
        least = KvCache(layout(["full", "window"], num_pages=1000), block_size=BLOCK).capacity.worst_case_pages(96)
        self.driver = Driver(
            layout(["full", "window"], num_pages=least + 2),
            policy=policy,
            max_model_len=MAX_MODEL_LEN,
            min_shared_tokens=BLOCK,
            max_waiting=8,
            pace=pace,
            max_num_seqs=max_num_seqs,
            steps_in_flight=steps_in_flight,
        )
        self.driver.now_s = 0.0
        self.turns = cycle(turns)
        self.prompt = list(range(40))
        self.num_sent = 0
        self.arrival_s: dict[str, float] = {}
        self.take_turn()
        self.victim = request("victim", self.prompt, 6, priority=priority)
        self.driver.add(self.victim)
        overtaking_s = (priority + MAX_PRIORITY) * PRIORITY_AGING_S if policy == "priority" else 0.0
        self.last_overtaking_s = self.driver.now_s + overtaking_s

    def take_turn(self) -> None:
        turn, driver = next(self.turns), self.driver
        assert driver.now_s is not None
        driver.now_s += turn.pause_s
        for priority, num_prompt, num_output in turn.requests:
            if driver.scheduler.num_waiting >= 7:  # the victim's own place stays free: that is not the matter here
                break
            name = f"r{self.num_sent}"
            self.num_sent += 1
            prompt = [*self.prompt[:num_prompt], self.num_sent] if turn.shares else [self.num_sent + 100] * num_prompt
            self.arrival_s[name] = driver.now_s
            driver.add(request(name, prompt, num_output, priority=priority))

    @property
    def unfinished(self) -> set[str]:
        return set(self.driver.scheduler.by_request) - {"victim"}

    def total(self, name: str) -> int:
        item = self.driver.requests[name]
        return item.num_prompt_tokens + (item.params.max_tokens or 0)


@settings(max_examples=num_examples(daily=12, exhaustive=1500), deadline=None)
@given(
    turns=TURNS,
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 4),
    steps_in_flight=st.integers(1, 2),
    is_paced=st.booleans(),
)
def test_a_request_is_overtaken_for_a_bounded_time_and_ends_after_bounded_work(
    turns: list[Turn], priority: int, policy: str, max_num_seqs: int, steps_in_flight: int, is_paced: bool
) -> None:
    attack = Attack(
        turns,
        priority,
        policy=policy,
        max_num_seqs=max_num_seqs,
        steps_in_flight=steps_in_flight,
        pace=PromptPace(0.05) if is_paced else None,
    )
    driver, admission = attack.driver, attack.driver.scheduler.admission
    # While others may overtake the victim.
    while driver.now_s <= attack.last_overtaking_s and "victim" not in driver.finished:  # type: ignore[operator]
        attack.take_turn()
        driver.step()
    # From here on: nothing that arrives is admitted before the victim, and it ends with the work that is here now.
    if "victim" in driver.finished:
        return
    victim, ahead = driver.scheduler.by_request["victim"], attack.unfinished
    max_steps = sum(attack.total(name) + 2 * steps_in_flight for name in {*ahead, "victim"})
    watch = Watch(victim, admission.waiting.queue, may_pass=ahead)
    driver.scheduler.admission.listeners.append(watch)
    for _ in range(max_steps):
        attack.take_turn()
        driver.step()
        if "victim" in driver.finished:
            break
    assert "victim" in driver.finished, f"not after {max_steps} steps"
    assert watch.overtakers == []
    assert watch.num_preemptions <= len(ahead)
