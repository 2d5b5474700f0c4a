"""What is routed: sessions of several turns behind one system prompt, questions about documents, prompts that share nothing, and a
mix of all of these."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload

SYSTEM_TOKENS = 1_024
SESSION_TURNS = 6
FIRST_TURN_TOKENS = (200, 3_000)
TURN_TOKENS = (50, 400)
ANSWER_TOKENS = (40, 160)
MEAN_PAUSE_S = 8.0

NUM_DOCUMENTS = 200
DOCUMENT_TOKENS = (3_000, 9_000)
HOT_SHARE = 0.5  # of all questions: about the first document
QUESTION_TOKENS = (20, 100)

PROMPT_TOKENS = (500, 4_000)

MIXED_RATE = 5.0  # requests per second and worker
MIXED_SYSTEM_PROMPTS = 4
MIXED_TURNS = 4
MIXED_FIRST_TURN_TOKENS = (50, 1_500)
MIXED_PAUSE_S = 3.0
MIXED_DOCUMENT_TOKENS = (1_000, 6_000)
MIXED_SHARES = {"session": 0.55, "document": 0.25, "short": 0.19, "long": 0.01}
MIXED_SHORT_TOKENS = (20, 2_000)
MIXED_LONG_TOKENS = 30_000
HOT_DOCUMENT_TOKENS = 6_000


def sessions(num_workers: int, rng: random.Random, load: float) -> Workload:
    """Conversations that begin at random and come back after a pause; all share a system prompt."""
    space = TokenSpace()
    system = space.take(SYSTEM_TOKENS)
    requests: list[tuple[float, int, int, SimulatedRequest]] = []
    begin_s = 0.0
    for session in range(40 * num_workers):
        begin_s += rng.expovariate(num_workers * 1.1 * load)
        messages, arrival_s = [system, space.take(rng.randint(*FIRST_TURN_TOKENS))], begin_s
        for turn in range(SESSION_TURNS):
            request = _request(messages, space.take(rng.randint(*ANSWER_TOKENS)), arrival_s)
            requests.append((arrival_s, session, turn, request))
            messages = [*messages, request.answer, space.take(rng.randint(*TURN_TOKENS))]
            arrival_s += 3.0 + rng.expovariate(1 / MEAN_PAUSE_S)
    return _in_order("sessions", requests)


def hot_document(num_workers: int, rng: random.Random, load: float) -> Workload:
    """Questions about documents, half of them about one."""
    space = TokenSpace()
    documents = [space.take(rng.randint(*DOCUMENT_TOKENS)) for _ in range(NUM_DOCUMENTS)]
    weights = [1 / rank**0.7 for rank in range(1, NUM_DOCUMENTS + 1)]
    requests, arrival_s = [], 0.0
    for number in range(220 * num_workers):
        arrival_s += rng.expovariate(num_workers * 8.0 * load)
        at = 0 if rng.random() < HOT_SHARE else rng.choices(range(NUM_DOCUMENTS), weights)[0]
        prompt = [documents[at], space.take(rng.randint(*QUESTION_TOKENS))]
        requests.append((arrival_s, number, 0, _request(prompt, space.take(rng.randint(*ANSWER_TOKENS)), arrival_s)))
    return _in_order("hot document", requests)


def no_reuse(num_workers: int, rng: random.Random, load: float) -> Workload:
    """Every prompt is new."""
    space = TokenSpace()
    requests, arrival_s = [], 0.0
    for number in range(220 * num_workers):
        arrival_s += rng.expovariate(num_workers * 7.0 * load)
        prompt = [space.take(rng.randint(*PROMPT_TOKENS))]
        requests.append((arrival_s, number, 0, _request(prompt, space.take(rng.randint(*ANSWER_TOKENS)), arrival_s)))
    return _in_order("no reuse", requests)


def mixed(
    num_workers: int, rng: random.Random, load: float, seconds: float = 20.0, *, hot_share: float = 0.0
) -> Workload:
    """Sessions, questions about documents of which few are asked about often (Zipf), and new prompts, most of them short, for
    `seconds`; `MIXED_RATE` requests per second and worker, those of a session's later turns included.

    From a third of the time on `hot_share` of all requests are questions about one more document of `HOT_DOCUMENT_TOKENS`.
    """
    space = TokenSpace()
    systems = [space.take(SYSTEM_TOKENS) for _ in range(MIXED_SYSTEM_PROMPTS)]
    documents = [space.take(rng.randint(*MIXED_DOCUMENT_TOKENS)) for _ in range(max(2 * num_workers, 8))]
    weights = list(accumulate(1 / rank for rank in range(1, len(documents) + 1)))
    hot_document = space.take(HOT_DOCUMENT_TOKENS)
    shares = MIXED_SHARES | {"session": MIXED_SHARES["session"] / MIXED_TURNS}
    requests: list[tuple[float, int, int, SimulatedRequest]] = []
    begin_s = number = 0.0
    while (begin_s := begin_s + rng.expovariate(MIXED_RATE * num_workers * load * sum(shares.values()))) < seconds:
        number += 1
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if begin_s > seconds / 3 and rng.random() < hot_share:
            kind = "hot document"
            prompt = [hot_document, space.take(rng.randint(*QUESTION_TOKENS))]
        elif kind == "document":
            document = rng.choices(documents, cum_weights=weights)[0]
            prompt = [document, space.take(rng.randint(*QUESTION_TOKENS))]
        elif kind == "session":
            prompt = [rng.choice(systems), space.take(rng.randint(*MIXED_FIRST_TURN_TOKENS))]
        else:
            prompt = [space.take(MIXED_LONG_TOKENS if kind == "long" else rng.randint(*MIXED_SHORT_TOKENS))]
        arrival_s = begin_s
        for turn in range(MIXED_TURNS if kind == "session" else 1):
            request = _request(prompt, space.take(rng.randint(*ANSWER_TOKENS)), arrival_s)
            if arrival_s < seconds:
                requests.append((arrival_s, int(number), turn, request))
            prompt = [*prompt, request.answer, space.take(rng.randint(*TURN_TOKENS))]
            arrival_s += 1.0 + rng.expovariate(1 / MIXED_PAUSE_S)
    return _in_order("mixed", requests)


WORKLOADS: dict[str, Callable[[int, random.Random, float], Workload]] = {
    "sessions": sessions,
    "hot document": hot_document,
    "no reuse": no_reuse,
    "mixed": mixed,
}


def _request(messages: list[Run], answer: Run, arrival_s: float) -> SimulatedRequest:
    ends = accumulate(message.num_tokens for message in messages[:-1])
    return SimulatedRequest(prompt=tuple(messages), answer=answer, turn_boundaries=tuple(ends), arrival_s=arrival_s)


def _in_order(name: str, requests: list[tuple[float, int, int, SimulatedRequest]]) -> Workload:
    """By arrival; each turn of a session waits for the answer before it."""
    last: dict[int, int] = {}
    ordered: list[SimulatedRequest] = []
    for arrival_s, session, _, request in sorted(requests, key=lambda entry: entry[:3]):
        ordered.append(
            SimulatedRequest(
                prompt=request.prompt,
                answer=request.answer,
                turn_boundaries=request.turn_boundaries,
                arrival_s=arrival_s,
                after=last.get(session),
            )
        )
        last[session] = len(ordered) - 1
    return Workload(name=name, requests=tuple(ordered))
