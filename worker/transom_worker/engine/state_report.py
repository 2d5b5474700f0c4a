"""Reports a worker's state: its recent speed (`StepRates`), its load for routers and the autoscaler (`worker_load`), and all
figures that its metrics page reads at a scrape (`worker_state`)."""

from transom_core.contract import WorkerLoad
from transom_worker.execution.executor import RankReport
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.telemetry.engine_events import AdapterStats, GrammarStats, WorkerState

HEADROOM_LENGTHS = (1024, 8192)  # lengths of requests, in tokens, for which the headroom is reported
WEIGHT = 0.2  # of the newest measurement in the moving averages
LEAST_PREFILL_TOKENS = 16  # steps with fewer prompt tokens say too little about the prefill rate
# Fetches of fewer bytes say too little about the transfer rate: most of their time is that of the calls.
LEAST_FETCHED_BYTES = 2**20
MAX_PLACES = 64  # whose rates are kept: those of the last fetches, since nodes come and go


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
        # Place -> the averages of a fetch from there, in bytes and seconds; "": of all fetches.
        self._fetches: dict[str, tuple[float, float]] = {}

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of steps with prompt tokens, including their decode tokens."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def fetch_rates(self) -> dict[str, float]:
        """Bytes per second of fetches of prefixes from other workers, by `PrefixSource.place`; "": of all fetches."""
        return {place: num_bytes / seconds for place, (num_bytes, seconds) in self._fetches.items()}

    def fetched(self, place: str, num_bytes: int, seconds: float) -> None:
        """Count the fetch of a prefix from another worker."""
        if num_bytes < LEAST_FETCHED_BYTES:
            return
        for one in {"", place}:
            of_bytes, of_s = self._fetches.pop(one, (0.0, 0.0))
            self._fetches[one] = _mean(of_bytes, num_bytes), _mean(of_s, seconds)
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


def worker_load(scheduler: Scheduler, rates: StepRates) -> WorkerLoad:
    """Return how much a worker has to do now, and how fast it has been lately."""
    stats, fetch_rates = scheduler.stats(), rates.fetch_rates
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
        fetch_bytes_per_s=fetch_rates.pop("", 0.0),
        fetch_rates=fetch_rates,
    )


def worker_state(
    scheduler: Scheduler,
    rates: StepRates,
    ranks: tuple[RankReport, ...],
    grammars: GrammarStats,
    adapters: AdapterStats,
    *,
    oldest_waiting_s: float,
) -> WorkerState:
    """Return the present state of queue, cache and ranks.

    `oldest_waiting_s` is when the oldest request arrived that no step has computed yet; 0 if there is none.
    """
    return WorkerState(
        stats=scheduler.stats(),
        load=worker_load(scheduler, rates),
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
