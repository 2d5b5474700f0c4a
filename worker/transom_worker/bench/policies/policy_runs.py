"""Runs requests on an idle engine, and records memory, time, preemptions and the prompts' log-probabilities."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from transom_core.contract import KvPolicy, LogprobTable, OutputEvent, Request, SamplingParams
from transom_core.errors import RequestError
from transom_worker.engine.engine import Engine

_request_numbers = itertools.count()


@dataclass(slots=True, kw_only=True)
class Run:
    """The figures of requests that ran together."""

    seconds: float
    peak_kv_bytes: int  # the most bytes of blocks that sequences referenced at the same time
    peak_running: int  # the most sequences that ran at the same time
    num_preemptions: int
    recomputed_tokens: int  # tokens that preemptions discarded
    output_ids: list[list[int]] = field(default_factory=list)  # by request
    prompt_logprobs: list[LogprobTable | None] = field(default_factory=list)  # by request
    step_cpu_s: list[float] = field(default_factory=list)  # CPU seconds of each step, all threads

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens of all requests."""
        return sum(map(len, self.output_ids))

    @property
    def tokens_per_s(self) -> float:
        """Return output tokens per second; the time includes that of the prompts."""
        return self.num_output_tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float:
        """Return the CPU milliseconds of all threads per output token, prompts included.

        Other processes on the machine change this figure less than they change elapsed time.
        """
        return 1e3 * sum(self.step_cpu_s) / self.num_output_tokens


def make_request(
    token_ids: Sequence[int], policy: KvPolicy | None, *, max_tokens: int, prompt_logprobs: int | None = None
) -> Request:
    """Return a greedy request that generates exactly `max_tokens` tokens."""
    return Request(
        request_id=f"policies-{next(_request_numbers)}",
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs),
        seed=0,
        kv_policy=policy,
    )


def run_together(engine: Engine, requests: Sequence[Request]) -> Run:
    """Run requests until all have ended.

    Raises:
        RequestError: the engine refuses a request, or one ends in an error.
    """
    scheduler = engine.scheduler
    discarded, preempted = scheduler.work.preempted_tokens, scheduler.work.num_preemptions
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    tables: dict[str, LogprobTable | None] = dict.fromkeys(outputs)
    peak_bytes = peak_running = 0
    step_cpu_s = []
    begin_s = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        step_begin_s = time.process_time()
        events = engine.step()
        step_cpu_s.append(time.process_time() - step_begin_s)
        for event in events:
            _take(event, outputs, tables)
        used = sum(group.active_blocks * group.block_bytes for group in scheduler.stats().groups)
        peak_bytes, peak_running = max(peak_bytes, used), max(peak_running, scheduler.num_running)
    return Run(
        seconds=time.perf_counter() - begin_s,
        peak_kv_bytes=peak_bytes,
        peak_running=peak_running,
        num_preemptions=scheduler.work.num_preemptions - preempted,
        recomputed_tokens=scheduler.work.preempted_tokens - discarded,
        output_ids=list(outputs.values()),
        prompt_logprobs=list(tables.values()),
        step_cpu_s=step_cpu_s,
    )


def _take(event: OutputEvent, outputs: dict[str, list[int]], tables: dict[str, LogprobTable | None]) -> None:
    if event.error is not None:
        raise RequestError(f"A request of the measurement ended in an error: {event.error.message}")
    outputs[event.request_id].extend(event.token_ids)
    if event.prompt_logprobs is not None:
        tables[event.request_id] = event.prompt_logprobs
