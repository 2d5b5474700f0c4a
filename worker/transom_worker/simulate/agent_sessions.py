"""The workload `agents`: long sessions of coding agents, which send almost the same prompt again after a few seconds.

Terms:

    session    one agent at work on one task; its turns are sent one after the other
    turn       a request: the whole history, at the end of which are the tools' results for the model's last call
    tools      the system prompt with the tools' descriptions; every session of one agent shares it
    reuse      the share of a prompt that the session's last turn, or the tools alone, already had as a prefix
    compaction a turn that replaces the history by a summary, because the history has reached its limit
    rewind     a turn that drops the end of the history and continues there with something else

The figures come from operators of agents: the median prompt has 195,000 tokens and the median answer 317; 96 % of the turns reuse
at least 90 % of their prompt; the pause before a turn is 2 s at the median and 11 minutes at the 99th percentile. Answers, tool
outputs and pauses have log-normal distributions with the given median and 99th percentile. The values are evenly spaced quantiles
in random order, so that every seed has these figures.
"""

import math
import random
from itertools import accumulate
from statistics import NormalDist

from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, chained

NUM_SESSIONS = 16
NUM_TURNS = 40
TOOLS_TOKENS = (9_000, 14_000, 22_000)  # the tools of each of three agents
FIRST_PROMPT_TOKENS = (132_000, 228_000)  # sessions begin in mid-work, with first prompts evenly spaced in this range
LIMIT_TOKENS = 250_000  # a longer history is compacted
SUMMARY_TOKENS = 150_000  # length of a compacted history, tools included
REWIND_CHANCE = 0.005  # that a turn is a rewind
REWIND_KEEPS = 0.7  # share of the history that a rewind keeps
REWIND_ADDS = 0.15  # new tokens of a rewind, as a share of the history

ANSWER_TOKENS = (317, 4_000)  # here and below: median and 99th percentile
TOOL_OUTPUT_TOKENS = (850, 5_000)
PAUSE_S = (2.0, 660.0)
START_WITHIN_S = 300.0  # sessions begin at random in this time
NOMINAL_TURN_S = 3.0  # assumed duration of a turn, which only puts the turns of all sessions in order


def agent_sessions(rng: random.Random) -> list[SimulatedRequest]:
    """Return the turns of all sessions in the order in which they nominally arrive."""
    space = TokenSpace()
    tools = [space.take(num_tokens) for num_tokens in TOOLS_TOKENS]
    num_turns = NUM_SESSIONS * NUM_TURNS
    answers = iter(_draw(rng, num_turns, *ANSWER_TOKENS))
    outputs = iter(_draw(rng, num_turns, *TOOL_OUTPUT_TOKENS))
    pauses = iter(_draw(rng, num_turns, *PAUSE_S))
    first, last = FIRST_PROMPT_TOKENS
    lengths = [first + (last - first) * session // (NUM_SESSIONS - 1) for session in range(NUM_SESSIONS)]
    rng.shuffle(lengths)
    turns: list[tuple[float, int, SimulatedRequest]] = []  # (nominal arrival, session, request)
    for session, num_tokens in enumerate(lengths):
        history = _History(space, rng.choice(tools), num_tokens)
        arrival_s, pause_s = rng.uniform(0, START_WITHIN_S), 0.0
        for turn in range(NUM_TURNS):
            answer = space.take(max(1, round(next(answers))))
            start_s = 0.0 if turn else arrival_s
            turns.append((arrival_s, session, history.request(answer, arrival_s=start_s, pause_s=pause_s)))
            history.go_on(rng, answer, max(1, round(next(outputs))))
            pause_s = next(pauses)
            arrival_s += NOMINAL_TURN_S + pause_s
    turns.sort(key=lambda turn: turn[:2])
    return chained((session, request) for _, session, request in turns)


class _History:
    """The messages of one session: its tools, what it has read before its first turn, then answers and tool outputs."""

    def __init__(self, space: TokenSpace, tools: Run, num_tokens: int) -> None:
        self._space = space
        self._messages = [tools, space.take(num_tokens - tools.num_tokens)]

    def request(self, answer: Run, *, arrival_s: float, pause_s: float) -> SimulatedRequest:
        """Return the turn whose prompt is the history."""
        ends = accumulate(message.num_tokens for message in self._messages[:-1])
        return SimulatedRequest(
            prompt=tuple(self._messages),
            answer=answer,
            turn_boundaries=tuple(ends),
            arrival_s=arrival_s,
            pause_s=pause_s,
        )

    def go_on(self, rng: random.Random, answer: Run, num_output_tokens: int) -> None:
        """Append an answer and a tool's output; compact the history if it is too long, or rewind it by chance."""
        self._messages += [answer, self._space.take(num_output_tokens)]
        num_tokens = sum(message.num_tokens for message in self._messages)
        if num_tokens > LIMIT_TOKENS:
            tools = self._messages[0]
            self._messages = [tools, self._space.take(SUMMARY_TOKENS - tools.num_tokens)]
        elif rng.random() < REWIND_CHANCE:
            self._cut(round(REWIND_KEEPS * num_tokens))
            self._messages.append(self._space.take(round(REWIND_ADDS * num_tokens)))

    def _cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, which must be more than the tools have."""
        kept: list[Run] = []
        for message in self._messages:
            if num_tokens > 0:
                kept.append(message.cut(num_tokens))
            num_tokens -= message.num_tokens
        self._messages = kept


def _draw(rng: random.Random, count: int, median: float, p99: float) -> list[float]:
    """Return quantiles of the log-normal distribution with this median and 99th percentile, in random order."""
    normal = NormalDist()
    sigma = math.log(p99 / median) / normal.inv_cdf(0.99)
    values = [median * math.exp(sigma * normal.inv_cdf((at + 0.5) / count)) for at in range(count)]
    rng.shuffle(values)
    return values
