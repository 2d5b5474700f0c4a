"""Limits the prompt tokens of a step, so that it takes about `target_step_s` seconds (`PromptPace`), and divides them among prompts
(`share_limit`) and clients (`divide`).

On a CPU a step with a chunk of 1,024 prompt tokens takes most of a second, in which every other request waits for its next
token. So the scheduler asks for a limit if other requests decode or wait. The pace (seconds per prompt token) is learned from the
steps themselves, by context (the number of tokens before a chunk), since attention makes later chunks of a prompt slower:

    limit = (target - time of a step that only decodes) / seconds per prompt token at this context

Example: the target is 0.2 s, a step that only decodes takes 0.06 s, and a prompt token takes 0.5 ms: 280 tokens, rounded to
256. Prompts get at least half of the target, and at least as much time as decoding, so that they make progress even if decode steps
are slow. A limit is at least `LEAST_TOKENS`, since each step has a cost besides that of its tokens, and a multiple of `ROUNDED_TO`,
since kernels compute rows in tiles. It is `FIRST_TOKENS` until a step with prompt tokens has been measured.

Times are taken from the steps' results, so a replayed recording of a run gives the same limits.

The limit is divided among running and waiting prompts, with two aims: a short prompt does not wait for all chunks of a long one,
and no prompt starves. So the oldest prompt gets at least half of the limit. Shorter prompts share the rest, the one with the fewest
tokens first. The oldest prompt also gets what they do not need. Example with a limit of 200 tokens: the oldest prompt has 1,500
tokens left, and prompts of 60, 900 and 30 tokens wait. The prompts of 30 and 60 tokens are computed whole, the one of 900 begins
with 10 tokens, and the oldest one gets 100. If all prompts are equally long, the oldest one gets the whole limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_worker.scheduling.step import StepPlan, StepTimings

WEIGHT = 0.3  # of the newest measurement in the moving averages
FIRST_TOKENS = LEAST_TOKENS = 128
ROUNDED_TO = 64
LEAST_MEASURED = 16  # a step with fewer prompt tokens says too little about the pace
CONTEXT_TOKENS = 512  # contexts of 0 to 511 tokens have one pace, as have 512 to 1,023, 1,024 to 2,047, and so on
QUANTUM = 16  # tokens that a waiting prompt starts with where only prompts after it have a share


class PromptPace:
    """Learns from each step's result (`stepped`), and limits the prompt tokens of the next steps (`limit`)."""

    def __init__(self, target_step_s: float) -> None:
        self._target_s = target_step_s
        self._decode_s = 0.0  # of a step that only decodes; 0 until there was one
        self._token_s: dict[int, float] = {}  # seconds per prompt token, by class of context

    def limit(self, context: int, *, decodes: bool) -> int:
        """Return the most prompt tokens of a step. Its oldest prompt has `context` tokens already, which are cached or computed.

        `decodes`: the step also computes tokens of requests that decode.
        """
        token_s = self._token_s_at(_context_class(context))
        if not token_s:
            return FIRST_TOKENS
        decode_s = self._decode_s * decodes
        prompt_s = max(self._target_s - decode_s, self._target_s / 2, decode_s)
        return max(LEAST_TOKENS, int(prompt_s / token_s) // ROUNDED_TO * ROUNDED_TO)

    def stepped(self, plan: StepPlan, timings: StepTimings) -> None:
        """Learn from a step. Rows of more than one token are prompts."""
        elapsed_s = timings.prepare_s + timings.copy_s + timings.forward_s + timings.sample_s
        prompts = [(start, count) for start, count in zip(plan.start, plan.count, strict=True) if count > 1]
        num_tokens = sum(count for _, count in prompts)
        if elapsed_s <= 0.0:
            return
        if not num_tokens:
            self._decode_s = _mean(self._decode_s, elapsed_s)
        elif num_tokens >= LEAST_MEASURED:
            decodes = len(prompts) < len(plan.count)
            # Half of the time at least, since the time of decoding is only an estimate.
            prompt_s = max(elapsed_s - self._decode_s * decodes, elapsed_s / 2)
            kind = _context_class(sum(start * count for start, count in prompts) // num_tokens)
            self._token_s[kind] = _mean(self._token_s.get(kind, 0.0), prompt_s / num_tokens)

    def _token_s_at(self, kind: int) -> float:
        """Return the seconds per prompt token of the nearest measured class of context; 0 if none was measured."""
        nearest = min(self._token_s, key=lambda measured: (abs(measured - kind), measured), default=None)
        return 0.0 if nearest is None else self._token_s[nearest]


def share_limit(limit: int, needs: Sequence[int], *, num_running: int) -> list[int]:
    """Return how many tokens each prompt gets.

    `needs` are the tokens that the prompts still have to compute: first those of the `num_running` running prompts in order, of
    which the first is the oldest, then those of waiting ones, in the queue's order. A waiting prompt can be admitted only after
    those before it. So if it has a share and one before it has none, that one gets `QUANTUM` tokens, even beyond the limit.
    """
    if not needs:
        return []
    shares = [0] * len(needs)
    shorter = [at for at in range(1, len(needs)) if needs[at] < needs[0]]
    left = limit - min(needs[0], max(1, limit - limit // 2))
    for at in sorted(shorter, key=lambda at: needs[at]):
        shares[at] = min(needs[at], left)
        left -= shares[at]
    shares[0] = min(needs[0], limit - sum(shares))
    left = limit - sum(shares)
    for at in range(1, len(needs)):  # what even the oldest one does not need is given to the others, in order
        more = min(needs[at] - shares[at], left)
        shares[at] += more
        left -= more
    has_share_after = False
    for at in reversed(range(max(1, num_running), len(needs))):
        if not shares[at] and has_share_after:
            shares[at] = min(needs[at], QUANTUM)
        has_share_after = has_share_after or shares[at] > 0
    return shares


def divide(limit: int, needs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide `limit` tokens among clients by their weights; what one does not need is given to the others. Each gets at least one.

    Example: 100 tokens, needs of 10, 500 and 500, and weights of 1, 1 and 2: 10, 30 and 60.
    """
    shares, left, left_weight = [0] * len(needs), limit, sum(weights)
    # Clients that need the least for their weight come first: what they leave of their shares is there for all after them. 1e-9
    # makes up for rounding errors of the quotient.
    for at in sorted(range(len(needs)), key=lambda at: needs[at] / weights[at]):
        shares[at] = max(1, min(needs[at], int(left * weights[at] / left_weight + 1e-9)))
        left -= shares[at]
        left_weight -= weights[at]
    return shares


def _context_class(context: int) -> int:
    """Return the number of a context's class; `CONTEXT_TOKENS` has the classes."""
    return (context // CONTEXT_TOKENS).bit_length()


def _mean(mean: float, value: float) -> float:
    """Return a moving average after one more value; 0 stands for an average without values."""
    return mean + WEIGHT * (value - mean) if mean else value
