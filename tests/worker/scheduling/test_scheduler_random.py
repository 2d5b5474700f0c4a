"""Random requests over tiny pools: whatever happens, counts balance, keys are right and every request finishes."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.how_many import num_examples
from tests.lost_windows import lose_windows
from tests.matrices import some_daily
from tests.worker.scheduling.kept_blocks_model import check_kept
from tests.worker.scheduling.scheduler_driver import BLOCK, ENTRY_MIXES, MIXES, Driver, layout, request
from transom_core.contract import KvPolicy, SamplingParams
from transom_core.errors import PromptTooLong, RequestTooLarge
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.sequence import SequenceStatus


def random_run(
    mix: tuple[str, ...],
    seed: int,
    *,
    steps_in_flight: int,
    num_requests: int = 14,
    equal: float = 0.0,
    pace: PromptPace | None = None,
    has_host: bool = False,
    out_of_memory: float = 0.0,
    prompt_logprobs: float = 0.0,
    policies: Sequence[KvPolicy | None] = (),
    num_clients: int = 1,
    after_each: Callable[[Driver], None] = lambda _: None,
) -> Driver:
    """`equal`: how often a prompt is that of the request before; `out_of_memory`: how often steps run out of memory;
    `prompt_logprobs`: how often a request asks for them; `policies` are KV policies that requests have; requests come from
    `num_clients` clients of different weights. `after_each` is called after each event.
    """
    rng = random.Random(seed)
    least = KvCache(layout(mix, num_pages=1000), block_size=BLOCK).capacity.worst_case_pages(80)
    driver = Driver(
        layout(mix, num_pages=max(1, least + rng.choice([-1, 0, 0, 0, 1, 2, 30]))),
        steps_in_flight=steps_in_flight,
        policy=rng.choice(["fcfs", "priority"]),
        caching=rng.random() < 0.9,
        window_repair=rng.random() < 0.8,
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        max_model_len=80,
        min_shared_tokens=rng.choice([1, 1, BLOCK, 20, None]),
        pace=pace,
        host_pages=least * rng.choice([1, 1, 2, 8]) if has_host else 0,
        load_after=lambda: rng.choice([0, 0, 1, 3, 9]),
        preemption_mode=rng.choice(["swap", "swap", "auto", "recompute"]) if has_host else "auto",
    )
    scheduler, num_dropped = driver.scheduler, 0
    if has_host and policies:  # loads are worth their while
        scheduler.cache.changes.set_rates(LoadRates(1_000, (1,)))
    prompt = [1, 2, 3]
    prefixes = [[rng.randrange(50) for _ in range(60)] for _ in range(3)]
    waiting = [f"r{i}" for i in range(num_requests)]
    admitted_tokens = 0
    while waiting or driver.scheduler.has_work:
        if waiting and rng.random() < 0.6:
            name = waiting.pop()
            if not equal or rng.random() > equal:
                prompt = rng.choice(prefixes)[: rng.randrange(1, 60 if rng.random() < 0.6 else 16)] + [
                    rng.randrange(50) for _ in range(rng.randrange(6))
                ]
            resumed = tuple(rng.randrange(50) for _ in range(rng.choice([0, 0, 0, 5])))
            max_tokens = len(resumed) + rng.randrange(1, 60 if policies else 30)
            driver.stop_at[name] = rng.randrange(1, 80 if policies else 50)
            fields: dict[str, Any] = dict(priority=rng.randrange(3), waited_s=rng.random())
            if num_clients > 1:
                client = rng.randrange(num_clients)
                fields |= dict(client=str(client), client_weight=[1.0, 3.0, 0.5][client % 3])
            if policies:
                policy = fields["kv_policy"] = rng.choice(policies)
                fields["kv_quality"] = policy is not None and rng.random() < 0.2
            if prompt_logprobs and rng.random() < prompt_logprobs:
                fields["params"] = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0)
            try:
                driver.add(request(name, prompt, max_tokens, resumed=resumed, **fields))
                admitted_tokens += len(prompt)
            except (RequestTooLarge, PromptTooLong):
                driver.requests.pop(name, None)
        if rng.random() < 0.03 and driver.requests:
            driver.abort(rng.choice(sorted(driver.requests)))
        loading = [name for name, one in scheduler.by_request.items() if one.status is SequenceStatus.LOADING]
        # if it has output, it was preempted: a later prompt goes on after this output
        if loading and rng.random() < 0.3:
            driver.abort(name := rng.choice(loading))
            prompt = [*driver.requests[name].prompt_token_ids, *driver.tokens[name]]
        if rng.random() < 0.01:
            driver.fail()
        if out_of_memory and driver.in_flight and rng.random() < out_of_memory:
            driver.run_out_of_memory()
        if rng.random() < 0.05:
            lose_windows(driver.scheduler.cache)
        if rng.random() < 0.5:
            driver.schedule()
        elif driver.in_flight:
            driver.receive()
        else:
            driver.step()
        driver.check()
        was_dropped, num_dropped = num_dropped, sum(s.num_dropped_blocks for s in scheduler.policy_stats().values())
        assert num_dropped >= was_dropped  # swapped and preempted requests stay counted
        after_each(driver)
    check_kept(driver)
    assert sorted(driver.finished) == sorted(driver.requests)
    outcomes = driver.scheduler.stats().outcome_tokens
    never_admitted = sum(
        driver.requests[name].num_prompt_tokens for name in driver.requests if name not in driver.admitted
    )
    assert sum(outcomes.values()) == admitted_tokens - never_admitted
    assert sum(driver.scheduler.stats().outcome_requests.values()) == len(driver.admitted)
    driver.check_idle()
    return driver


class RandomPace(PromptPace):
    """Sets a limit that nothing explains, as a machine may whose other work comes and goes."""

    def __init__(self, seed: int) -> None:
        super().__init__(1.0)
        self._rng = random.Random(seed)

    def limit(self, context: int, *, decodes: bool) -> int:
        return self._rng.choice([1, 2, 5, 16, 30])


# Blocks go to the host tier and come back while other requests run; requests are swapped, and wait for what others compute or load.
# These are preempted, aborted and fail meanwhile.
KINDS: dict[str, dict[str, Any]] = {
    "one tier": {"prompt_logprobs": 0.1},
    "equal prompts": {"equal": 0.8},
    "two tiers": {"has_host": True},
    "equal prompts on two tiers": {"has_host": True, "equal": 0.8, "out_of_memory": 0.01},
    "out of memory": {"has_host": True, "num_requests": 8, "out_of_memory": 0.03},
    "clients": {"has_host": True, "num_clients": 3, "equal": 0.4, "out_of_memory": 0.01},
}


EVERY = list(product((*MIXES, *ENTRY_MIXES), KINDS))


# every day half of the kinds for each mix, and half of the mixes for each kind
@pytest.mark.parametrize(
    ("mix", "kind"), some_daily(EVERY, [case for n, case in enumerate(EVERY) if (n + n // len(KINDS)) % 2 == 0])
)
def test_random_requests(mix: tuple[str, ...], kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "clients":  # they take turns at loads
        request.getfixturevalue("one_block_in_flight")
    seeds = range(num_examples(daily=2, exhaustive=16))
    drivers = [random_run(mix, seed, steps_in_flight=1 + seed % 2, **KINDS[kind]) for seed in seeds]
    if kind == "one tier" and mix[0] == "full":  # the pools are tiny enough to matter
        assert any(driver.scheduler.work.preemptions["recompute"] for driver in drivers)
        assert any(driver.executor.num_repaired for driver in drivers) == (len(mix) > 1 and "snapshot" not in mix)
    if kind == "equal prompts":
        # steps of 3 tokens, which a third of them has, leave none for a second prompt, so nothing waits for the first
        assert sum(driver.num_followed > 0 for driver in drivers) >= len(drivers) / 4
    if kind == "two tiers":
        assert sum(driver.executor.num_loaded for driver in drivers) > 0
        assert sum(driver.scheduler.work.preemptions["swap"] for driver in drivers) > 0


@pytest.mark.parametrize("mix", [*MIXES, *ENTRY_MIXES], ids="+".join)
def test_random_requests_at_a_pace(mix: tuple[str, ...]) -> None:
    for seed in range(1, 1 + num_examples(daily=1, exhaustive=24)):
        random_run(
            mix,
            seed,
            steps_in_flight=1 + seed % 2,
            equal=0.25 * (seed % 3),
            pace=RandomPace(seed),
            num_clients=1 + seed % 4,
        )


def test_what_a_failed_step_may_not_have_copied_is_not_swapped_again() -> None:
    """A swapped request is loaded back when the step fails that was to copy its blocks to the host."""
    random_run(("full", "window"), 125, steps_in_flight=2, has_host=True)
