"""Several workers (real schedulers, caches and replay executors), and a random trace of sessions on them.

Every update and every search is kept, so that mirrors can be led through the whole history and stopped where a worker searched.
"""

import contextlib
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_cluster.routing.fleet_index import FleetPrefixIndex, PrefixIndexMirror
from transom_cluster.routing.prompt_hashes import PromptHashes
from transom_core.contract import KvPolicy, Request, SamplingParams, WindowPolicy
from transom_core.contract.kv_events import KvUpdate
from transom_core.errors import RequestTooLarge
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.kvcache.manager import KvCache

MAX_MODEL_LEN = 112
NUM_SESSIONS = 7
SYSTEM_TOKENS = 24


@dataclass(frozen=True)
class Search:
    """What a worker's scheduler found for one request, at which version of its index."""

    request: Request
    version: int
    num_cached_tokens: int
    num_host_tokens: int


class Worker:
    """One worker; its updates and searches since its start.

    With `host_pages` it has a host tier of as many, loads take some steps, and load rates change now and then.
    """

    def __init__(self, mix: Sequence[str], rng: random.Random, *, host_pages: int) -> None:
        least = KvCache(layout(mix, num_pages=1000), block_size=BLOCK).capacity.worst_case_pages(MAX_MODEL_LEN)
        self.driver = Driver(
            layout(mix, num_pages=least + rng.choice([0, 1, 2, 6])),
            max_model_len=MAX_MODEL_LEN,
            steps_in_flight=rng.choice([1, 2]),
            max_num_seqs=rng.choice([4, 8]),
            max_num_batched_tokens=rng.choice([16, 32]),
            host_pages=host_pages,
            load_after=lambda: rng.randrange(4),
        )
        self.cache = self.driver.scheduler.cache
        self.updates: list[KvUpdate] = []
        self.first_rates = self.cache.changes.rates
        self.rates: dict[int, LoadRates] = {}  # by the version that they began
        self.cache.changes.set_rates = self._set_rates  # type: ignore[method-assign]
        self.searches: list[Search] = []
        self.num_introduced: Counter[str] = Counter()
        self.num_again = 0  # requests that lost their blocks before their first token
        self._unanswered: set[str] = set()

    def add(self, item: Request) -> None:
        """Raises RequestTooLarge."""
        self.driver.add(item)
        self._unanswered.add(item.request_id)

    def step(self) -> None:
        """Fill the pipeline, take a result, note what was searched and what has changed."""
        while (plan := self.driver.schedule()) is not None:
            self.num_introduced.update(new.request_id for new in plan.new_sequences)
        if self.driver.in_flight:
            self.driver.receive()
        for name in sorted(name for name in self._unanswered if self.driver.outputs[name]):
            self._unanswered.remove(name)
            first = self.driver.outputs[name][0]
            self.num_again += self.num_introduced[name] > 1
            cached, loaded = first.num_cached_tokens, first.num_host_tokens
            self.searches.append(Search(self.driver.requests[name], first.index_version, cached, loaded))
        if (update := self.cache.changes.take()) is not None:
            self.updates.append(update)

    def _set_rates(self, rates: LoadRates) -> None:
        """Take the place of `ChangeLog.set_rates`, and note at which version the rates begin."""
        type(self.cache.changes).set_rates(self.cache.changes, rates)
        self.rates[self.cache.changes.version] = rates


class Fleet:
    """Three workers, and sessions that go on where they stopped, on whatever worker.

    A request has one of the KV `policies`, by its session. Each worker has one of `host_pages`, in turn, as its host tier's.
    """

    def __init__(
        self,
        mix: Sequence[str],
        seed: int,
        *,
        policies: Sequence[KvPolicy | None] = (None,),
        host_pages: Sequence[int] = (0,),
    ) -> None:
        self.rng = rng = random.Random(seed)
        self._policies = policies
        self.workers = [Worker(mix, rng, host_pages=host_pages[i % len(host_pages)]) for i in range(3)]
        self._system = [rng.randrange(50) for _ in range(SYSTEM_TOKENS)]
        self._sessions: list[list[int]] = [self._new_session() for _ in range(NUM_SESSIONS)]
        self._running: dict[str, tuple[Worker, int]] = {}
        self._num_sent = 0

    def run(self, num_requests: int) -> None:
        """Serve this number of requests."""
        rng = self.rng
        while self._num_sent < num_requests or self._running:
            if self._num_sent < num_requests and rng.random() < 0.5:
                self._send()
            if rng.random() < 0.02 and self._running:
                name = rng.choice(sorted(self._running))
                worker, _ = self._running.pop(name)
                worker.driver.abort(name)
            for worker in self.workers:
                if rng.random() < 0.8:
                    self._step(worker)
        for worker in self.workers:  # what an abort has changed
            worker.step()

    def _new_session(self) -> list[int]:
        begin = self._system if self.rng.random() < 0.6 else []
        return [*begin, *(self.rng.randrange(50) for _ in range(self.rng.randrange(4, 20)))]

    def _send(self) -> None:
        rng = self.rng
        session = rng.randrange(NUM_SESSIONS)
        prompt = self._sessions[session]
        if len(prompt) > 66:
            prompt = self._sessions[session] = self._new_session()
        self._num_sent += 1
        resumed = tuple(rng.randrange(50) for _ in range(rng.choice([0, 0, 0, 0, 9])))
        max_tokens = len(resumed) + rng.randrange(1, 20)
        item = request(
            f"r{self._num_sent}",
            prompt,
            resumed=resumed,
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=1 if rng.random() < 0.03 else None),
            cache_salt=rng.choice([None, None, None, "tenant"]),
            turn_boundaries=(SYSTEM_TOKENS,) if prompt[:SYSTEM_TOKENS] == self._system else (),
            kv_policy=(policy := self._policies[session % len(self._policies)]),
            kv_quality=policy is not None and rng.random() < 0.1,
        )
        worker = rng.choice(self.workers)
        with contextlib.suppress(RequestTooLarge):
            worker.add(item)
            self._running[item.request_id] = (worker, session)

    def _step(self, worker: Worker) -> None:
        if self.rng.random() < 0.02:
            lose_windows(worker.cache)
        if worker.cache.tiers.host.exists and self.rng.random() < 0.02:
            worker.cache.changes.set_rates(self._any_rates(len(worker.cache.shape.groups)))
        num_finished = len(worker.driver.finished)
        worker.step()
        for name in worker.driver.finished[num_finished:]:
            if name in self._running:
                _, session = self._running.pop(name)
                more = [self.rng.randrange(50) for _ in range(self.rng.randrange(1, 12))]
                prompt = worker.driver.requests[name].prompt_token_ids
                self._sessions[session] = [*prompt, *worker.driver.tokens[name], *more]

    def _any_rates(self, num_groups: int) -> LoadRates:
        """Rates at which loads are sometimes worth their time."""
        return LoadRates(self.rng.choice([50, 1000]), tuple(self.rng.choice([1, 900, 9000]) for _ in range(num_groups)))


def run_by_run(updates: Sequence[KvUpdate], rates: Mapping[int, LoadRates]) -> Iterator[KvUpdate]:
    """The same updates in the smallest steps: a scheduler may search between any two runs, and before and after new `rates`."""
    for update in updates:
        version = update.after
        runs = deque(update.runs)
        while runs or version < update.version:
            if version + 1 in rates:
                yield KvUpdate(after=version, version=version + 1, runs=(), rates=rates[version + 1])
                version += 1
                continue
            run = runs.popleft()
            yield KvUpdate(after=version, version=version + len(run.digests), runs=(run,))
            version += len(run.digests)
        assert version == update.version


class Prediction(NamedTuple):
    """Prompt tokens that a worker would find cached, and how many of them in its host tier."""

    num_cached_tokens: int
    num_host_tokens: int


def predict(index: FleetPrefixIndex, mirror: PrefixIndexMirror, item: Request) -> Prediction:
    """What a worker with this index would find."""
    policy = item.kv_policy
    if item.params.prompt_logprobs is not None or item.kv_quality or (policy and policy.depends_on_history):
        return Prediction(0, 0)
    window = policy if isinstance(policy, WindowPolicy) else None
    num_tokens = item.num_prompt_tokens + len(item.resumed_output_ids)
    hits = index.find_hits([mirror], PromptHashes().of(item, mirror.shape), num_tokens, window)
    start, device_start = (min(int(found[0]), item.num_prompt_tokens) for found in (hits.start, hits.device_start))
    return Prediction(start, start - device_start)
