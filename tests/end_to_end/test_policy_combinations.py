"""KV policies with everything else on: requests of every policy and of none in one batch get the tokens that they get alone.

Windows and requests without a policy are compared with transformers; policies that depend on attention with an engine that
computes one request after the other, with nothing on.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_combinations import NUM_TOKENS, compare, prompts
from tests.engine_driver import Whole, make_engine, make_request, run
from tests.matrices import some_daily
from tests.oracle_answers import oracle_answers
from tests.thread_ranks import ThreadRanks
from tests.tiny_checkpoints import FULL, HybridCase
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, Request, WindowPolicy
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor_factory import create_executor
from transom_worker.scheduling.rate_meter import RateMeter

WINDOW = WindowPolicy(sinks=5, window=17)
NO_SINKS = WindowPolicy(sinks=0, window=24)
ADAPTIVE = AdaptivePolicy(sinks=4, min_window=16, max_window=64, threshold=0.05)
HEAVY = HeavyPolicy(sinks=4, budget=48)
MIXED: tuple[KvPolicy | None, ...] = (None, WINDOW, HEAVY, NO_SINKS, ADAPTIVE)
POLICIES: dict[str, tuple[KvPolicy | None, ...]] = {"mixed": MIXED, "window": (WINDOW,), "no sinks": (NO_SINKS,)}
# Windows hold little: many sequences at once.
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 24}
TIGHT_KIB = 280  # the longest request just fits
ROOMY_KIB = 8 << 10

Answers = list[list[int]]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[KvPolicy | None, Answers]:
    """Every prompt's answer under every policy."""
    cases: dict[KvPolicy | None, HybridCase] = {None: FULL}
    cases |= {one: HybridCase(window=one.window, sinks=one.sinks) for one in (WINDOW, NO_SINKS)}
    answers = {policy: oracle_answers(tiny_model, prompts(), NUM_TOKENS, case) for policy, case in cases.items()}
    engine = make_engine(str(tiny_model), **SETTINGS, enable_prefix_caching=False, max_num_batched_tokens=1024)
    for policy in (ADAPTIVE, HEAVY):
        found = [run(engine, [request])[0] for request in requests((policy,), "alone")]
        answers[policy] = [whole.token_ids for whole in found]
        assert answers[policy] != answers[None]  # something was dropped
    engine.shutdown()
    return answers


def requests(policies: tuple[KvPolicy | None, ...], name: str, known: Answers | None = None) -> list[Request]:
    """One request for each prompt, policies in turn; every fourth one of a mix is compared with full attention, if it has one.

    Requests resume with some of the `known` answers.
    """
    made = []
    for i, prompt in enumerate(prompts()):
        policy = policy_of(policies, i)
        resumed = known[i][: i % NUM_TOKENS] if known else None
        plain = make_request(f"{name} {i}", prompt, max_tokens=NUM_TOKENS, resumed=resumed)
        is_compared = policy is not None and i % 4 == 3 and len(policies) > 1
        made.append(replace(plain, kv_policy=policy, kv_quality=is_compared))
    return made


def policy_of(policies: tuple[KvPolicy | None, ...], i: int) -> KvPolicy | None:
    """The policy of prompt `i`: three prompts have the same, since the last of the three shares a prefix with the one before."""
    return policies[i // 3 % len(policies)]


def check(
    engine: Engine, policies: tuple[KvPolicy | None, ...], expected: dict[KvPolicy | None, Answers]
) -> list[Whole]:
    """All prompts twice: from nothing, and resumed over what is cached then."""
    want = [expected[policy_of(policies, i)][i] for i in range(len(prompts()))]
    fresh = run(engine, requests(policies, "fresh"))
    compare([whole.token_ids for whole in fresh], want, policies, None)
    again = run(engine, requests(policies, "again", want))
    compare([whole.token_ids for whole in again], [w[i % NUM_TOKENS :] for i, w in enumerate(want)], policies, None)
    return fresh + again


def num_compared(engine: Engine) -> int:
    """Tokens whose policy was compared with full attention."""
    stats = engine.scheduler.admission.policy_counts.stats((), block_size=SETTINGS["block_size"])
    return sum(one.num_compared for one in stats.values())


# Policies, ranks, KiB of the pool, tokens of a step, steps in flight, and how requests are preempted ("" without a host tier).
COMBINATIONS = [
    ("mixed", 1, TIGHT_KIB, 16, 2, "swap"),
    ("window", 1, TIGHT_KIB, 16, 2, "swap"),
    ("mixed", 2, TIGHT_KIB, 64, 2, "swap"),
    ("mixed", 1, TIGHT_KIB, 64, 1, ""),
    ("mixed", 1, TIGHT_KIB, 16, 2, ""),
    ("no sinks", 1, TIGHT_KIB, 64, 2, "swap"),
    ("no sinks", 1, TIGHT_KIB, 16, 2, "auto"),
    ("window", 1, TIGHT_KIB, 64, 2, "auto"),
    ("mixed", 3, TIGHT_KIB, 64, 2, "swap"),
    ("mixed", 3, ROOMY_KIB, 64, 2, "swap"),
]


@pytest.mark.parametrize(
    ("name", "ranks", "pool_kib", "chunk", "steps", "preemption"), some_daily(COMBINATIONS, COMBINATIONS[:3])
)
def test_a_combination_is_exact(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[KvPolicy | None, Answers],
    name: str,
    ranks: int,
    pool_kib: int,
    chunk: int,
    steps: int,
    preemption: str,
) -> None:
    """Attention is summed over the ranks, so policies keep the same blocks on each of them as on one rank alone."""
    host: dict[str, Any] = {"swap_space": f"{2 // ranks or 1}MiB", "preemption_mode": preemption} if preemption else {}
    engine = make_engine(
        str(tiny_model),
        **SETTINGS,
        device="cpu",
        executor=partial(ThreadRanks, size=ranks) if ranks > 1 else create_executor,
        max_num_batched_tokens=chunk,
        steps_in_flight=steps,
        kv_cache_memory_bytes=(pool_kib << 10) // min(ranks, 2),  # each of several ranks has one of the two KV heads
        **host,
    )
    changes = engine.scheduler.cache.changes
    if changes.rates is not None:  # loads are worth their time, however busy the machine is
        changes.set_rates(changes.rates._replace(token_ns=10**9))
        monkeypatch.setattr(RateMeter, "next_rates", lambda *_: None)
    policies = POLICIES[name]
    found = check(engine, policies, expected)
    work, loads = engine.scheduler.work, engine.scheduler.cache.tiers.loads
    assert (work.num_swaps > 0) == (bool(preemption) and pool_kib == TIGHT_KIB)
    # A sequence that loads a hit and has computed nothing is not swapped. How long a load takes decides whether one is preempted.
    assert (work.preempted_tokens > 0) == (not preemption)
    assert sum(whole.num_cached_tokens for whole in found) > 0
    assert (num_compared(engine) > 0) == (len(policies) > 1)
    if len(policies) == 1:
        assert sum(loads.num_loaded) > 0
    engine.shutdown()
