"""`PromptPace`: learns from steps what rows and prompt tokens cost, and limits the prompt tokens of a step, so that it takes about
`target_step_s` seconds. `time_shares` divides steps among clients by the same costs.

On a CPU a step with a chunk of 1,024 prompt tokens takes most of a second, in which every other request waits for its next
token. So the scheduler asks for a limit if other requests decode or wait. The pace (seconds per prompt token) is learned from the
steps themselves, by context (the number of tokens before a chunk), since attention makes later chunks of a prompt slower:

    limit = (target - time of a step that only decodes) / seconds per prompt token at this context

Example: the target is 0.2 s, a step that only decodes takes 0.06 s, and a prompt token takes 0.5 ms: 280 tokens, rounded to
256. Prompts get at least half of the target, and at least as much time as decoding, so that they make progress even if decode steps
are slow. A limit is at least what is worth a step (`least_tokens`), since each step has a cost besides that of its tokens, and
above `ROUNDED_TO` a multiple of it, since kernels compute rows in tiles. It is `FIRST_TOKENS` until a step with prompt tokens has
been measured.

A step that only decodes `rows` sequences, which read `keys` keys together, takes about

    fixed_s + rows * row_s + keys * key_s

Steps of about as many rows and keys per row have one average, so that sizes that have not occurred for long count, too; the three
costs are fitted to these averages. The fixed part is fitted first: until steps of several sizes were measured, all time counts as
fixed. On a GPU `row_s` is next to nothing.

Times are taken from the steps' results, so a replayed recording of a run gives the same limits.
"""

from collections.abc import Iterable
from typing import NamedTuple

from transom_worker.scheduling.step import StepPlan, StepTimings

WEIGHT = 0.3  # of the newest measurement in the moving averages
FIRST_TOKENS = LEAST_TOKENS = 128
LEAST_ROUNDED_TO = 16
ROUNDED_TO = 64
LEAST_MEASURED = 16  # a step with fewer prompt tokens says too little about the pace
CONTEXT_TOKENS = 128  # contexts of 0 to 127 tokens have one pace, as have 128 to 255, 256 to 511, and so on
FIT_STEPS = 8  # decode steps after which the costs are fitted again
MEMORY_STEPS = 64  # an average of this age, in steps, has half of the weight of a new one
NUM_SWEEPS = 16  # of a fit; errors shrink to less than 1 % of what they were
# No measurement counts as more than this many times the average: the first step of a size is recorded, too.
OUTLIER = 2.0


class DecodeCosts(NamedTuple):
    """Seconds of a step that only decodes: a fixed part, and those of each row and of each key that rows read."""

    fixed_s: float
    row_s: float
    key_s: float

    def of_rows(self, rows: int, keys: int) -> float:
        """Return the seconds of `rows` rows that read `keys` keys together, beside the fixed part."""
        return rows * self.row_s + keys * self.key_s


class _Average(NamedTuple):
    """Decode steps of one class of sizes: averages, and the number of the newest one."""

    rows: float
    keys: float
    seconds: float
    number: int


class PromptPace:
    """Learns from each step's result (`stepped`), and limits the prompt tokens of the next steps (`limit`) if there is a target."""

    def __init__(self, target_step_s: float | None = None) -> None:
        self.target_s = target_step_s
        self._decode_s = 0.0  # of a step that only decodes; 0 until there was one
        self._token_s: dict[int, float] = {}  # seconds per prompt token, by class of context
        self._decodes: dict[tuple[int, int], _Average] = {}  # by class of rows, and of keys per row
        self._num_decodes = 0
        self._costs: DecodeCosts | None = None  # fitted to `_decodes`; None: it is to be fitted

    @property
    def has_measured(self) -> bool:
        """Whether any step's time is known."""
        return bool(self._token_s or self._decodes)

    @property
    def decode_costs(self) -> DecodeCosts:
        """The costs of steps that only decode; all 0 until one was measured."""
        if self._costs is None:
            self._costs = _fit(self._decodes.values(), self._num_decodes)
        return self._costs

    def limit(self, context: int, *, decodes: bool) -> int | None:
        """Return the most prompt tokens of a step; None without a target. Its oldest prompt has `context` tokens already, which are
        cached or computed.

        `decodes`: the step also computes tokens of requests that decode.
        """
        if self.target_s is None:
            return None
        token_s = self.token_s(context)
        if not token_s:
            return FIRST_TOKENS
        decode_s = self._decode_s * decodes
        prompt_s = max(self.target_s - decode_s, self.target_s / 2, decode_s)
        return max(self.least_tokens(context), int(prompt_s / token_s) // ROUNDED_TO * ROUNDED_TO)

    def least_tokens(self, context: int) -> int:
        """Return the fewest prompt tokens that are worth a step: at most `LEAST_TOKENS`, and after a long context as many as take
        the time of `LEAST_TOKENS` without one, so that no step of others is longer because of a context.

        They take at least twice the fixed part of a step, since their measured time may contain it once.
        """
        token_s = self.token_s(context)
        if not token_s:
            return LEAST_TOKENS
        least_s = max(LEAST_TOKENS * self.token_s(0), 2 * self.decode_costs.fixed_s)
        most = min(LEAST_TOKENS, int(least_s / token_s) // LEAST_ROUNDED_TO * LEAST_ROUNDED_TO)
        return max(LEAST_ROUNDED_TO, most)

    def stepped(self, plan: StepPlan, timings: StepTimings) -> None:
        """Learn from a step. Rows of more than one token are prompts."""
        elapsed_s = timings.copy_s + timings.compute_s
        num_rows, num_tokens = len(plan.count), plan.num_tokens
        if elapsed_s <= 0.0 or not num_rows:
            return
        if num_tokens == num_rows:
            self._decode_s = _mean(self._decode_s, elapsed_s)
            self._decoded(num_rows, sum(plan.start), elapsed_s)
            return
        prompts = [(start, count) for start, count in zip(plan.start, plan.count, strict=True) if count > 1]
        num_decoding = num_rows - len(prompts)
        num_tokens -= num_decoding
        if num_tokens >= LEAST_MEASURED:
            decode_s = 0.0
            if num_decoding:
                keys = sum(plan.start) - sum(start for start, _ in prompts)
                decode_s = self.decode_costs.fixed_s + self.decode_costs.of_rows(num_decoding, keys)
            # A quarter of the time at least, since the time of decoding is only an estimate.
            prompt_s = max(elapsed_s - decode_s, elapsed_s / 4)
            kind = _class(sum(start * count for start, count in prompts) // num_tokens)
            self._token_s[kind] = _mean(self._token_s.get(kind, 0.0), prompt_s / num_tokens)

    def token_s(self, context: int) -> float:
        """Return the seconds per prompt token of the nearest measured class of context; 0 if none was measured."""
        kind = _class(context)
        nearest = min(self._token_s, key=lambda measured: (abs(measured - kind), measured), default=None)
        return 0.0 if nearest is None else self._token_s[nearest]

    def _decoded(self, rows: int, keys: int, seconds: float) -> None:
        """Learn from a step that only decodes."""
        self._num_decodes += 1
        kind = (rows.bit_length(), _class(keys // rows))
        known = self._decodes.get(kind)
        if known is None:
            self._decodes[kind] = _Average(rows, keys, seconds, self._num_decodes)
        else:
            self._decodes[kind] = _Average(
                _mean(known.rows, rows),
                _mean(known.keys, keys),
                _mean(known.seconds, min(seconds, OUTLIER * known.seconds)),
                self._num_decodes,
            )
        if known is None or self._num_decodes % FIT_STEPS == 0:
            self._costs = None


def _fit(averages: Iterable[_Average], number: int) -> DecodeCosts:
    """Return the costs, none below 0, with the least squares of relative errors, by coordinate descent from 0.

    The fixed part comes first, so that it gets the time of which it is not known yet what it is for.
    """
    products = [[0.0] * 3 for _ in range(3)]
    sums = [0.0] * 3
    for one in averages:
        weight = MEMORY_STEPS / (MEMORY_STEPS + number - one.number) / one.seconds**2
        features = (1.0, one.rows, one.keys)
        for at, feature in enumerate(features):
            sums[at] += weight * feature * one.seconds
            for other, value in enumerate(features):
                products[at][other] += weight * feature * value
    costs = [0.0] * 3
    for _ in range(NUM_SWEEPS):
        for at, row in enumerate(products):
            if row[at]:
                others = sum(row[other] * costs[other] for other in range(3) if other != at)
                costs[at] = max(0.0, (sums[at] - others) / row[at])
    return DecodeCosts(*costs)


def _class(value: int) -> int:
    """Return the number of a context's class; `CONTEXT_TOKENS` has the classes."""
    return (value // CONTEXT_TOKENS).bit_length()


def _mean(mean: float, value: float) -> float:
    """Return a moving average after one more value; 0 stands for an average without values."""
    return mean + WEIGHT * (value - mean) if mean else value
