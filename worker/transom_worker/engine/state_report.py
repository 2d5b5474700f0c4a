"""Reports a worker's state: its recent speed (`StepRates`), its load for routers and the autoscaler (`worker_load`), and all
figures that its metrics page reads at a scrape (`worker_state`)."""

from dataclasses import dataclass

from transom_core.contract import FetchSpeed, WorkerLoad
from transom_worker.execution.executor import RankReport
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.telemetry.engine_events import AdapterStats, GrammarStats, WorkerState

HEADROOM_LENGTHS = (1024, 8192)  # lengths of requests, in tokens, for which the headroom is reported
WEIGHT = 0.2  # of the newest measurement in the moving averages
LEAST_PREFILL_TOKENS = 16  # steps with fewer prompt tokens say too little about the prefill rate
# Fetches of fewer bytes say too little about the transfer rate: most of their time is that of the calls.
LEAST_FETCHED_BYTES = 2**20
WAITS_FADE_S = 60.0  # after so long without a fetch, half of what was measured about waits is forgotten
MAX_PLACES = 64  # whose speeds are kept: those of the last fetches, since nodes come and go


class StepRates:
    """How fast a worker has been lately: exponential moving averages, each 0 until something was measured.

    The first prefill does not count: code and caches are cold, and routers would avoid a worker that looks slow. First tokens of
    requests that arrived before the first step had ended do not count either, since these requests waited for that step. The
    prefill rate is the average of tokens divided by the average of seconds, so that long steps have more weight.

    The first-token time starts at 0, and the first measurement has only its weight, unlike in the other averages: the first request
    alone says little about the load. Example: after a request of 10 s the time is 2 s, and after another one of 10 s it is 3.6 s.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.first_token_s = 0.0
        self._has_prefilled = False
        self._warm_since_s: float | None = None  # the end of the first step
        self._prefill_tokens = 0.0  # average of a step
        self._prefill_s = 0.0  # average of a step
        self._fetches: dict[str, _Fetches] = {}  # by `PrefixSource.place`; "": all

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps with prompt tokens, including their decode tokens."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def fetch_speeds(self, now_s: float) -> dict[str, FetchSpeed]:
        """Return how fast prefixes come from other workers, by `PrefixSource.place`; "": from all."""
        return {place: fetches.speed(now_s) for place, fetches in self._fetches.items()}

    def fetched(self, place: str, num_bytes: int, seconds: float, read_s: float, *, now_s: float) -> None:
        """Count a fetch that ended at `now_s` and brought `num_bytes` in `seconds`; blocks moved for `read_s` of these."""
        if not num_bytes:
            return
        for one in {"", place}:
            fetches = self._fetches.pop(one, _Fetches(now_s))
            self._fetches[one] = fetches  # the last one
            fetches.count(num_bytes, seconds - read_s, read_s, now_s)
        if len(self._fetches) > MAX_PLACES:
            del self._fetches[next(iter(self._fetches))]

    def stepped(self, num_tokens: int, num_seqs: int, elapsed_s: float, *, now_s: float) -> None:
        """Count a step that computed `num_tokens` tokens of `num_seqs` sequences and ended at `now_s`.

        A step with one token for each sequence is a decode step.
        """
        if self._warm_since_s is None:
            self._warm_since_s = now_s
        if num_tokens == num_seqs:
            self.decode_step_s = _mean(self.decode_step_s, elapsed_s)
        elif num_tokens - num_seqs >= LEAST_PREFILL_TOKENS:
            if self._has_prefilled:
                self._prefill_tokens = _mean(self._prefill_tokens, num_tokens)
                self._prefill_s = _mean(self._prefill_s, elapsed_s)
            self._has_prefilled = True

    def first_token(self, arrival_s: float, now_s: float) -> None:
        """Count the first token, at `now_s`, of a request that arrived at this worker at `arrival_s`, by the same clock."""
        if self._warm_since_s is not None and arrival_s >= self._warm_since_s:
            self.first_token_s += WEIGHT * (now_s - arrival_s - self.first_token_s)


@dataclass(slots=True)
class _Fetches:
    """The moving averages of fetches from one place, the last of which ended at `last_s`.

    The measured wait fades: a wait in a busy moment may be so long that routers let no prefix be fetched, and then nothing would
    correct it. The rate is the network's and stays; that of blocks that come by calls has the waits of the calls in it.
    """

    last_s: float
    wait_s: float = FetchSpeed().wait_s
    num_bytes: float = 0.0
    read_s: float = 0.0

    def speed(self, now_s: float) -> FetchSpeed:
        """Return what routers should expect at `now_s`."""
        default = FetchSpeed()
        known: float = 0.5 ** ((now_s - self.last_s) / WAITS_FADE_S)
        rate = self.num_bytes / self.read_s if self.read_s else default.bytes_per_s
        return FetchSpeed(default.wait_s + known * (self.wait_s - default.wait_s), rate)

    def count(self, num_bytes: int, wait_s: float, read_s: float, now_s: float) -> None:
        """Count one fetch."""
        expected_s, self.last_s = self.speed(now_s).wait_s, now_s
        self.wait_s = expected_s + WEIGHT * (wait_s - expected_s)
        if num_bytes >= LEAST_FETCHED_BYTES:
            self.num_bytes, self.read_s = _mean(self.num_bytes, num_bytes), _mean(self.read_s, read_s)


def worker_load(scheduler: Scheduler, rates: StepRates, now_s: float) -> WorkerLoad:
    """Return how much a worker has to do at `now_s`, and how fast it has been lately."""
    stats = scheduler.stats()
    used = sum(group.active_blocks * group.block_bytes for group in stats.groups)
    return WorkerLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        max_num_seqs=scheduler.config.max_num_seqs,
        waiting_tokens=scheduler.waiting_tokens,
        used_share=used / max(1, stats.num_pages * stats.page_bytes),
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_s=rates.decode_step_s,
        first_token_s=rates.first_token_s,
        fetch_speeds=rates.fetch_speeds(now_s),
    )


def worker_state(
    scheduler: Scheduler,
    rates: StepRates,
    ranks: tuple[RankReport, ...],
    grammars: GrammarStats,
    adapters: AdapterStats,
    *,
    now_s: float,
    oldest_waiting_s: float,
) -> WorkerState:
    """Return the state of queue, cache and ranks at `now_s`.

    `oldest_waiting_s` is when the oldest request arrived that no step has computed yet; 0 if there is none.
    """
    return WorkerState(
        stats=scheduler.stats(),
        load=worker_load(scheduler, rates, now_s),
        work=scheduler.work.copy(),
        headroom=_headroom(scheduler),
        policies=scheduler.policy_stats(),
        grammars=grammars,
        adapters=adapters,
        ranks=ranks,
        oldest_waiting_s=oldest_waiting_s,
    )


def _headroom(scheduler: Scheduler) -> dict[str, int]:
    """Return how many requests could start now, by their length in tokens; `max` is the longest length that this worker serves."""
    longest = scheduler.max_model_len
    lengths = {str(length): length for length in HEADROOM_LENGTHS if length <= longest} | {"max": longest}
    return {name: scheduler.cache.capacity.num_that_fit(length) for name, length in lengths.items()}


def _mean(mean: float, value: float) -> float:
    """Return a moving average after one more value; 0 stands for an average without values."""
    return mean + WEIGHT * (value - mean) if mean else value
