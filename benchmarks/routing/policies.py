"""Routing policies on fleets in virtual time: how much prefill each computes, how often it hits, and how soon first tokens come.

    python -m benchmarks.routing.policies --config DIR --workers 3,8

DIR holds a model's config.json. Two routers share every fleet. The table is Markdown, as in docs/routing.md, which has the last
figures.
"""

import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from benchmarks.markdown_table import print_head, print_row
from benchmarks.routing.fleet import BLOCK_SIZE, NUM_BATCHED_TOKENS, FleetSimulation, Router, Worker
from transom_worker.simulate.simulation import read_plan
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload, chained

NUM_ROUTERS = 2
MEMORY = "3GiB"  # of KV, of each worker
POLICIES = ("kv", "round_robin")
COLUMNS = {
    "workload": "{workload}",
    "workers": "{workers}",
    "policy": "{policy}",
    "prefill tokens": "{prefill_tokens:,}",
    "hit": "{hit_rate:.1%}",
    "first token p50 ms": "{first_token_p50_ms:.0f}",
    "p95 ms": "{first_token_p95_ms:.0f}",
    "busiest": "{busiest_share:.2f}",
    "place us": "{placement_us:.0f}",
}

SYSTEM_TOKENS = 1_024
SESSIONS_PER_WORKER, SESSION_TURNS, MEAN_PAUSE_S = 40, 6, 8.0
FIRST_TURN_TOKENS, TURN_TOKENS, ANSWER_TOKENS = (200, 3_000), (50, 400), (40, 160)
NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 200, (3_000, 9_000), (20, 100)
HOT_SHARE = 0.5  # of all questions: about the first document
PROMPT_TOKENS = (500, 4_000)
PROMPTS_PER_WORKER = 220


def main(
    config: Annotated[Path, typer.Option(help="A model's folder.")],
    workers: Annotated[str, typer.Option(help="Fleet sizes.")] = "3,8",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Every policy on every workload and fleet."""
    print_head(*COLUMNS)
    for name in WORKLOADS:
        for num_workers in map(int, workers.split(",")):
            for one in POLICIES:
                row = simulate(config, name, num_workers, one, seed=seed)
                cells = {"workload": name, "workers": num_workers, "policy": one, **row}
                print_row(*(column.format(**cells) for column in COLUMNS.values()))


def simulate(config: Path, workload: str, num_workers: int, policy: Any, *, seed: int) -> dict[str, float]:
    """The figures of one run."""
    plan = read_plan(config, memory=MEMORY, block_size=BLOCK_SIZE, max_num_batched_tokens=NUM_BATCHED_TOKENS)
    fleet = [Worker(str(number), plan.layout) for number in range(num_workers)]
    infos = {worker.worker_id: worker.info for worker in fleet}
    routers = [Router(policy, infos, number) for number in range(NUM_ROUTERS)]
    totals = FleetSimulation(WORKLOADS[workload](num_workers, random.Random(seed)), fleet, routers).run()
    cuts, requests = quantiles(totals.first_token_s, n=20), totals.requests_by_worker.values()
    return {
        "prefill_tokens": sum(worker.prefill_tokens for worker in fleet),
        "hit_rate": totals.cached_tokens / totals.prompt_tokens,
        "first_token_p50_ms": cuts[9] * 1e3,
        "first_token_p95_ms": cuts[18] * 1e3,
        # The largest share of requests on one worker over an even share.
        "busiest_share": max(requests) * num_workers / sum(requests),
        "placement_us": 1e6 * median(one for router in routers for one in router.placement_s),
    }


def sessions(num_workers: int, rng: random.Random) -> Workload:
    """Conversations that begin at random and come back after a pause; all share a system prompt."""
    space = TokenSpace()
    system = space.take(SYSTEM_TOKENS)
    requests: list[tuple[float, int, int, SimulatedRequest]] = []  # arrival, session, turn
    begin_s = 0.0
    for session in range(SESSIONS_PER_WORKER * num_workers):
        begin_s += rng.expovariate(num_workers * 1.1)
        messages, arrival_s = [system, space.take(rng.randint(*FIRST_TURN_TOKENS))], begin_s
        for turn in range(SESSION_TURNS):
            answer = space.take(rng.randint(*ANSWER_TOKENS))
            requests.append((arrival_s, session, turn, _request(messages, answer, arrival_s)))
            messages = [*messages, answer, space.take(rng.randint(*TURN_TOKENS))]
            arrival_s += 3.0 + rng.expovariate(1 / MEAN_PAUSE_S)
    ordered = sorted(requests, key=lambda entry: entry[:3])
    return Workload(name="sessions", requests=tuple(chained((session, request) for _, session, _, request in ordered)))


def hot_document(num_workers: int, rng: random.Random) -> Workload:
    """Questions about documents, half of them about one."""
    space = TokenSpace()
    documents = [space.take(rng.randint(*DOCUMENT_TOKENS)) for _ in range(NUM_DOCUMENTS)]
    weights = [1 / rank**0.7 for rank in range(1, NUM_DOCUMENTS + 1)]

    def prompt() -> list[Run]:
        at = 0 if rng.random() < HOT_SHARE else rng.choices(range(NUM_DOCUMENTS), weights)[0]
        return [documents[at], space.take(rng.randint(*QUESTION_TOKENS))]

    return _independent("hot document", num_workers, rng, 8.0, space, prompt)


def no_reuse(num_workers: int, rng: random.Random) -> Workload:
    """Every prompt is new."""
    space = TokenSpace()
    return _independent("no reuse", num_workers, rng, 7.0, space, lambda: [space.take(rng.randint(*PROMPT_TOKENS))])


WORKLOADS: dict[str, Callable[[int, random.Random], Workload]] = {
    "sessions": sessions,
    "hot document": hot_document,
    "no reuse": no_reuse,
}


def _independent(
    name: str,
    num_workers: int,
    rng: random.Random,
    rate_per_s: float,
    space: TokenSpace,
    prompt: Callable[[], list[Run]],
) -> Workload:
    """Requests that do not wait for each other; `rate_per_s` is of each worker."""
    requests, arrival_s = [], 0.0
    for _ in range(PROMPTS_PER_WORKER * num_workers):
        arrival_s += rng.expovariate(num_workers * rate_per_s)
        requests.append(_request(prompt(), space.take(rng.randint(*ANSWER_TOKENS)), arrival_s))
    return Workload(name=name, requests=tuple(requests))


def _request(messages: list[Run], answer: Run, arrival_s: float) -> SimulatedRequest:
    ends = accumulate(message.num_tokens for message in messages[:-1])
    return SimulatedRequest(prompt=tuple(messages), answer=answer, turn_boundaries=tuple(ends), arrival_s=arrival_s)


if __name__ == "__main__":
    typer.run(main)
