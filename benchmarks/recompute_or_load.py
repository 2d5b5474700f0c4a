"""How good the choice between computing a host hit's tokens and loading its blocks is, and what swap and recompute cost.

    python benchmarks/recompute_or_load.py [--only regret|swap]

**Regret**: a stream of prompts whose beginning is in the host tier. The hit search (`find_hit`) chooses by the rates that
`RateMeter` has measured, which learns from what was done: a load is measured only when one is made. An oracle knows both costs
of each prompt in advance. The regret is the time that the choices took beyond the oracle's, as a share of it; beside it, that of
always loading and of always computing. Costs are invented: a prompt token takes `TOKEN_S`, and more behind a long context; a load
takes some multiple of that, which stays, jumps, swings, or is noise.

**Swap**: one request of the demo model is preempted through the scheduler of a whole engine, behind a prompt of several lengths.
The time is from the preemption to its next token, less an ordinary step, in CPU seconds of the process (other programs disturb
those least), by either mode.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transom_core.contract import Request, SamplingParams
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import find_hit
from transom_core.kv_cache.retention import Retention
from transom_worker.engine.engine import Engine
from transom_worker.llm import LLM
from transom_worker.scheduling.rate_meter import RateMeter
from transom_worker.scheduling.step import StepPlan, StepTimings

BLOCK = 16
BLOCK_BYTES = 368_640  # 16 tokens of SmolLM2-135M in bfloat16
TOKEN_S = 1e-3
CONTEXT_TOKENS = 16_384  # behind so many, a token takes twice as long
NUM_PROMPTS = 2_000
LENGTHS = (512, 2_048, 8_192, 32_768)
SHARES = (0.25, 0.5, 0.9)  # of the prompt that the host tier has
SEEDS = (0, 1, 2)
SWAPPED = (256, 512, 1024)
REPEATS = 3

LoadTime = Callable[[int, random.Random], float]  # of prompt number i: seconds a token, in units of `TOKEN_S`


@dataclass(frozen=True, slots=True)
class Scenario:
    """How long loading a token takes, as a multiple of computing it."""

    name: str
    load_time: LoadTime


def jump(i: int, before: float, after: float) -> float:
    """Return one value for the first half of the prompts, and another one for the second."""
    return before if i < NUM_PROMPTS // 2 else after


SCENARIOS = (
    Scenario("loads take 0.01", lambda i, rng: 0.01),
    Scenario("loads take 0.5", lambda i, rng: 0.5),
    Scenario("loads take 0.9", lambda i, rng: 0.9),
    Scenario("loads take 1.1", lambda i, rng: 1.1),
    Scenario("loads take 3", lambda i, rng: 3.0),
    Scenario("0.2, and 4 from the middle on", lambda i, rng: jump(i, 0.2, 4.0)),
    Scenario("4, and 0.2 from the middle on", lambda i, rng: jump(i, 4.0, 0.2)),
    Scenario("4 for 50 prompts, else 0.2, in turns", lambda i, rng: 4.0 if i // 50 % 4 == 3 else 0.2),
    Scenario("swings between 0.25 and 4", lambda i, rng: 4.0 ** math.sin(i / 100)),
    Scenario("0.5 with noise of a factor 2", lambda i, rng: 0.5 * 2.0 ** rng.gauss(0, 1)),
    Scenario("1 with noise of a factor 2", lambda i, rng: 2.0 ** rng.gauss(0, 1)),
    Scenario("2 with noise of a factor 2", lambda i, rng: 2.0 * 2.0 ** rng.gauss(0, 1)),
    Scenario("0.5 with noise of a factor 3", lambda i, rng: 0.5 * 3.0 ** rng.gauss(0, 1)),
    Scenario("0.2, and 4 from the middle on, noise 2", lambda i, rng: jump(i, 0.2, 4.0) * 2.0 ** rng.gauss(0, 1)),
    Scenario("4, and 0.2 from the middle on, noise 2", lambda i, rng: jump(i, 4.0, 0.2) * 2.0 ** rng.gauss(0, 1)),
    Scenario("0.3, and each tenth one 6", lambda i, rng: 6.0 if rng.random() < 0.1 else 0.3),
)


def prompts(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Yield (hash blocks of a prompt, those of them that the host tier has)."""
    for _ in range(NUM_PROMPTS):
        num_blocks = rng.choice(LENGTHS) // BLOCK
        yield num_blocks, max(1, int(num_blocks * rng.choice(SHARES)))


def compute_s(begin: int, end: int) -> float:
    """The seconds that computing tokens `[begin, end)` takes."""
    return TOKEN_S * ((end - begin) + (end * end - begin * begin) / (2 * CONTEXT_TOKENS))


def regrets(scenario: Scenario, seed: int) -> tuple[float, float, float, float, int]:
    """Return the regret of the measured rates, of always loading and of always computing, the share of prompts that load, and how
    often the rates changed.
    """
    rng = random.Random(seed)
    meter, rates = RateMeter([BLOCK_BYTES]), LoadRates.unmeasured([BLOCK_BYTES])
    retention = Retention(GroupSpec(name="full", kind=GroupKind.FULL, layers=(), block_size=BLOCK))
    chain = [index.to_bytes(32, "little") for index in range(max(LENGTHS) // BLOCK)]
    chosen = best = loading = computing = 0.0
    num_loads = num_changes = 0
    for i, (num_blocks, in_host) in enumerate(prompts(rng)):
        host = set(chain[:in_host])
        hit = find_hit([retention], [()], chain[:num_blocks], num_blocks, window_repair=True, host=[host], rates=rates)
        load = scenario.load_time(i, rng) * TOKEN_S * in_host * BLOCK
        whole = compute_s(0, in_host * BLOCK)
        loads = hit.start > 0
        num_loads += loads
        chosen += load if loads else whole
        best, loading, computing = best + min(load, whole), loading + load, computing + whole
        begin, end = hit.start, num_blocks * BLOCK
        plan = StepPlan(step_id=i, count=[end - begin])
        if end > begin:
            meter.stepped(plan, StepTimings(forward_s=compute_s(begin, end)))
        if loads:
            meter.loaded([in_host], load)
        if (changed := meter.next_rates(rates)) is not None:
            rates, num_changes = changed, num_changes + 1
    return chosen / best - 1, loading / best - 1, computing / best - 1, num_loads / NUM_PROMPTS, num_changes


def regret_table() -> None:
    """Print the regret of each scenario, the median of `SEEDS`."""
    print(
        "| a load's time in units of computing | regret of the rule | always load | always compute | loads | changes |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for scenario in SCENARIOS:
        found = zip(*(regrets(scenario, seed) for seed in SEEDS), strict=True)
        *shares, num_changes = (statistics.median(values) for values in found)
        columns = [f"{100 * share:.1f} %" for share in shares]
        print(f"| {scenario.name} | " + " | ".join(columns) + f" | {num_changes} |", flush=True)


def cpu_seconds(engine: Engine, num_tokens: int) -> float:
    """Step until the only request has so many more tokens; return the CPU seconds."""
    begin_s = time.process_time()
    while num_tokens > 0:
        num_tokens -= sum(len(event.token_ids) for event in engine.step())
    return time.process_time() - begin_s


def preempted_s(engine: Engine, length: int, seed: int) -> float:
    """The CPU seconds that one preemption behind a prompt costs."""
    tokens = random.Random(seed).choices(range(100, 40_000), k=length)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add(Request(request_id="one", prompt_token_ids=tuple(tokens), params=params, seed=0))
    cpu_seconds(engine, 3)
    ordinary = statistics.median(cpu_seconds(engine, 1) for _ in range(5))
    begin_s = time.process_time()
    engine.scheduler.admission.preempt(engine.scheduler.by_request["one"])
    decided_s = time.process_time() - begin_s
    after = decided_s + cpu_seconds(engine, 1)
    engine.abort("one")
    while engine.has_work:
        engine.step()
    return after - ordinary


def swap_table() -> None:
    """Print what either mode costs, by context length."""
    times: dict[tuple[str, int], float] = {}
    for mode in ("recompute", "swap"):
        with LLM(
            "smollm2", swap_space="256MiB", preemption_mode=mode, kv_cache_memory_bytes="128MiB",
            enable_prefix_caching=False, max_num_batched_tokens=1024,
        ) as llm:  # fmt: skip
            preempted_s(llm.engine, 64, 0)
            for length in SWAPPED:
                found = [preempted_s(llm.engine, length, seed) for seed in range(REPEATS)]
                times[mode, length] = statistics.median(found)
    print("\n| tokens of context | recompute, CPU ms | swap, CPU ms | swap / recompute |")
    print("|---:|---:|---:|---:|")
    for length in SWAPPED:
        one, other = times["recompute", length], times["swap", length]
        print(f"| {length:,} | {1e3 * one:.0f} | {1e3 * other:.1f} | {other / one:.4f} |", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Regret of recompute or load, and swap against recompute.")
    parser.add_argument("--only", choices=["regret", "swap"], help="print one table")
    only = parser.parse_args().only
    if only != "swap":
        regret_table()
    if only != "regret":
        swap_table()


if __name__ == "__main__":
    main()
