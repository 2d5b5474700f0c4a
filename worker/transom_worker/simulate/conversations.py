"""Makes synthetic workloads: conversations in which each prompt repeats the conversation so far, in several orders and shapes.

A *session* is one conversation of 8 turns, sent by one client; a turn's request waits for the answer to the previous turn.

The sizes are those with which other engines' figures were published, so that hit rates can be compared.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from transom_core.errors import ConfigError
from transom_worker.simulate.agent_sessions import agent_sessions
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload, chained

NUM_SESSIONS = 16
NUM_TURNS = 8
FIRST_PROMPT_TOKENS = 4_000
ANSWER_TOKENS = 400
TURN_TOKENS = 600
# `--memory 1x`: the tokens of all sessions at their end, 4,000 + 8 * (400 + 600) each.
WORKING_SET_TOKENS = NUM_SESSIONS * 12_000
MEAN_PAUSE_S = 60.0  # between one session's turns, with Poisson arrivals

SHORT_ANSWER_TOKENS = 100

Conversation = list[SimulatedRequest]


def build_workload(name: str, *, seed: int = 0) -> Workload:
    """Return the synthetic workload of that name. Raises ConfigError for an unknown name."""
    builder = BUILDERS.get(name)
    if builder is None:
        raise ConfigError(f"There is no workload {name!r}; take one of {', '.join(BUILDERS)}.")
    return Workload(name=name, requests=tuple(builder(random.Random(seed))))


def round_robin(rng: random.Random) -> list[SimulatedRequest]:
    """Return sessions that send their turns in a fixed cyclic order: the worst case for least-recently-used eviction."""
    return _interleave(_sessions(), list(range(NUM_SESSIONS)) * NUM_TURNS)


def shuffled(rng: random.Random) -> list[SimulatedRequest]:
    """Return the sessions of `round_robin`, which send their turns in a random order."""
    order = list(range(NUM_SESSIONS)) * NUM_TURNS
    rng.shuffle(order)
    return _interleave(_sessions(), order)


def poisson(rng: random.Random) -> list[SimulatedRequest]:
    """Return the sessions of `round_robin`, with exponentially distributed pauses between the turns of each."""
    arrivals = sorted(
        (arrival_s, session)
        for session in range(NUM_SESSIONS)
        for arrival_s in accumulate(rng.expovariate(1 / MEAN_PAUSE_S) for _ in range(NUM_TURNS))
    )
    requests = _interleave(_sessions(), [session for _, session in arrivals])
    return [replace(request, arrival_s=arrival_s) for request, (arrival_s, _) in zip(requests, arrivals, strict=True)]


def system_prompt(rng: random.Random) -> list[SimulatedRequest]:
    """Return requests of users that share a system prompt and nothing else."""
    space = TokenSpace()
    system = space.take(4_096)
    users = [_request([system, space.take(2_048)], space.take(SHORT_ANSWER_TOKENS)) for _ in range(20)]
    return _one_by_one(users)


def shared_prefixes(rng: random.Random) -> list[SimulatedRequest]:
    """Return groups of requests that share a system prompt each and go on for 40 to 1,300 tokens; groups take turns."""
    space = TokenSpace()
    groups = [space.take(1_500) for _ in range(8)]
    suffixes = [40, 220, 400, 580, 760, 940, 1_120, 1_300]
    return _one_by_one(
        [
            _request([system, space.take(suffix)], space.take(SHORT_ANSWER_TOKENS))
            for suffix in suffixes
            for system in groups
        ]
    )


def long_answers(rng: random.Random) -> list[SimulatedRequest]:
    """Return one conversation whose answers are longer than any sliding window."""
    return _one_by_one(_conversation(TokenSpace(), first=1_000, answer=2_000, turn=200, num_turns=8))


def edited_message(rng: random.Random) -> list[SimulatedRequest]:
    """Return a conversation of six messages, then five that begin with its first 5, 4, 3, 2 and 1 messages and end differently."""
    space = TokenSpace()
    messages = [space.take(3_000) for _ in range(5)] + [space.take(1_384)]
    kept = [[*messages[:count], space.take(500)] for count in (5, 4, 3, 2, 1)]
    return _one_by_one([_request(prompt, space.take(SHORT_ANSWER_TOKENS)) for prompt in [messages, *kept]])


BUILDERS: dict[str, Callable[[random.Random], list[SimulatedRequest]]] = {
    "sessions": round_robin,
    "shuffled": shuffled,
    "poisson": poisson,
    "system-prompt": system_prompt,
    "shared-prefixes": shared_prefixes,
    "edited-message": edited_message,
    "long-answers": long_answers,
    "agents": agent_sessions,
}


def _sessions() -> list[Conversation]:
    """Return the sessions that `round_robin`, `shuffled` and `poisson` interleave."""
    space = TokenSpace()
    return [
        _conversation(space, first=FIRST_PROMPT_TOKENS, answer=ANSWER_TOKENS, turn=TURN_TOKENS, num_turns=NUM_TURNS)
        for _ in range(NUM_SESSIONS)
    ]


def _conversation(space: TokenSpace, *, first: int, answer: int, turn: int, num_turns: int) -> Conversation:
    """Return the requests of one conversation: a first prompt of `first` tokens, answers, and user turns of `turn` tokens."""
    requests = []
    messages = [space.take(first)]
    for _ in range(num_turns):
        answer_run = space.take(answer)
        requests.append(_request(messages, answer_run))
        messages += [answer_run, space.take(turn)]
    return requests


def _request(messages: Sequence[Run], answer: Run) -> SimulatedRequest:
    """Return one request of a chat: each message except the last ends a turn inside the prompt."""
    ends = accumulate(message.num_tokens for message in messages[:-1])
    return SimulatedRequest(prompt=tuple(messages), answer=answer, turn_boundaries=tuple(ends))


def _one_by_one(requests: Conversation) -> list[SimulatedRequest]:
    """Return the requests, each of which waits for the answer to the previous one."""
    return _interleave([requests], [0] * len(requests))


def _interleave(sessions: Sequence[Conversation], order: Iterable[int]) -> list[SimulatedRequest]:
    """Return the sessions' requests in this order of sessions; each waits for the previous request of its session."""
    turns = [iter(session) for session in sessions]
    return chained((session, next(turns[session])) for session in order)
