"""What routers believe of a worker's queue, when the worker reports its load only where it has changed enough."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.cluster.routing.test_placer import info, request, whole
from tests.how_many import num_examples
from transom_cluster.routing.placer import Placer
from transom_core.contract import OutputEvent, Usage, WorkerLoad, WorkerMessage
from transom_worker.engine.router_outbox import NEWS_PERIOD_S, TOKENS, TOKENS_SHARE, RouterOutbox

STEP_S = 0.02
STEP_TOKENS = 200
DELAY_S = 0.03  # of any message, at most


class Worker:
    """Computes one prompt after the other, and reports to two routers as a replica does, by the test's clock."""

    def __init__(self, routers: list[Router]) -> None:
        self.now_s = 0.0
        self.queue: deque[tuple[Router, str, int]] = deque()  # router, request id, tokens to compute
        self.taken: list[tuple[Router, str]] = []
        self.outboxes = {router: RouterOutbox(lambda: self.now_s) for router in routers}
        self.deliver([], whole_index=True)

    @property
    def waiting_tokens(self) -> int:
        return sum(num_tokens for _, _, num_tokens in self.queue)

    def take(self, router: Router, request_id: str, num_tokens: int) -> None:
        self.queue.append((router, request_id, num_tokens))
        self.taken.append((router, request_id))

    def step(self) -> None:
        left, first = STEP_TOKENS, []
        while self.queue and left:
            router, request_id, num_tokens = self.queue.popleft()
            computed = min(left, num_tokens)
            left -= computed
            if computed < num_tokens:
                self.queue.appendleft((router, request_id, num_tokens - computed))
            else:
                first.append((router, request_id))
        self.deliver(first)

    def deliver(self, first: list[tuple[Router, str]], *, whole_index: bool = False) -> None:
        load = WorkerLoad(max_num_seqs=1000, waiting_tokens=self.waiting_tokens, num_waiting=len(self.queue))
        for router, outbox in self.outboxes.items():
            events = tuple(first_event(request_id) for owner, request_id in first if owner is router)
            taken = tuple(request_id for owner, request_id in self.taken if owner is router)
            kv = whole() if whole_index else None
            outbox.put(WorkerMessage(events=events, load=load, taken=taken, kv=kv))
        self.taken = []


class Router:
    """A placer, the messages on their way to it, and the requests on their way from it."""

    def __init__(self, seed: int) -> None:
        self.placer = Placer("kv", seed=seed)
        self.placer.add_worker("a", info("a"))
        self.coming: deque[tuple[float, WorkerMessage]] = deque()
        self.going: deque[tuple[float, str, int]] = deque()

    @property
    def believed(self) -> int:
        return self.placer.workers["a"].candidate(0).queue_tokens

    def hear(self, now_s: float) -> None:
        while self.coming and self.coming[0][0] <= now_s:
            message = self.coming.popleft()[1]
            assert self.placer.update("a", message)
            for event in message.events:
                assert event.usage is not None
                self.placer.first_event(event.request_id, event.usage)
                self.placer.ended(event.request_id)


def first_event(request_id: str) -> OutputEvent:
    usage = Usage(num_prompt_tokens=1, num_output_tokens=1, num_cached_tokens=0)
    return OutputEvent(request_id=request_id, position=0, token_ids=(1,), usage=usage, finish_reason="length")


@pytest.mark.parametrize("seed", range(num_examples(2, 6)))
def test_two_routers_know_the_queue_up_to_what_is_no_news_and_what_has_not_arrived(seed: int) -> None:
    rng = random.Random(seed)
    routers = [Router(0), Router(1)]
    worker = Worker(routers)
    arrivals: deque[tuple[float, Router, int]] = deque()  # of the last second, for the bound
    num_placed = num_messages = 0
    rate = 0.0
    for step in range(3000):
        worker.now_s = now_s = step * STEP_S
        if step % 250 == 0:
            # Requests a step, of 500 tokens on average: up to 1.5 times what the worker can compute.
            rate = rng.choice([0.0, 0.05, 0.3, 0.6])
        for router in routers:
            if rng.random() < rate / 2:
                num_placed += 1
                prompt = tuple(rng.randrange(5000) for _ in range(rng.randrange(50, 950)))
                name = f"r{num_placed}"
                router.placer.place(request(name, prompt), ("a",))
                router.going.append((now_s + rng.uniform(0, DELAY_S), name, len(prompt)))
                arrivals.append((now_s, router, len(prompt)))
            while router.going and router.going[0][0] <= now_s:
                worker.take(router, *router.going.popleft()[1:])
        worker.step()
        for router, outbox in worker.outboxes.items():
            if outbox.due_s() <= now_s:
                router.coming.append((now_s + rng.uniform(0, DELAY_S), outbox.take()))
                num_messages += 1
            router.hear(now_s)
        while arrivals and arrivals[0][0] < now_s - NEWS_PERIOD_S - 2 * DELAY_S - STEP_S:
            arrivals.popleft()
        for router in routers:
            true = worker.waiting_tokens + sum(num_tokens for _, _, num_tokens in router.going)
            unheard = sum(num_tokens for _, owner, num_tokens in arrivals if owner is not router)
            computed = STEP_TOKENS * (NEWS_PERIOD_S + DELAY_S + STEP_S) / STEP_S  # since the last report
            assert true - unheard - max(TOKENS, TOKENS_SHARE * true) * 1.2 - 950 <= router.believed
            assert router.believed <= true + computed
    assert num_placed > 100
    assert num_messages < 3000 * 2 * 0.5
