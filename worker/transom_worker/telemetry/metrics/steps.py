"""Metrics of steps and of output tokens, which are updated several times per step and must be cheap."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_core.telemetry.histogram import Histogram
from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.scheduling.step import StepPlan, StepTimings
from transom_worker.telemetry.engine_events import EngineEventSink, EngineStepTimes, RequestTimes

STEP_PARTS = ("schedule", "wait", "output", "prepare", "copy", "forward", "sample")
INTER_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0),  # a preempted request waits in the queue between two tokens
)
STEP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Steps(EngineEventSink, Collector):
    """Keeps plain numbers, to which the engine's thread adds and which a scrape reads."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self._output_tokens = 0
        self._inter_token = Histogram(INTER_TOKEN_BUCKETS_S)
        self._num_out_of_memory = 0
        self._num_steps = 0
        self._parts = tuple(Histogram(STEP_BUCKETS_S) for _ in STEP_PARTS)
        self._tokens = Histogram(TOKEN_BUCKETS)
        self._sequences = Histogram(SEQUENCE_BUCKETS)

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a step's plan to the ranks."""
        self._tokens.observe(plan.num_tokens)
        self._sequences.observe(len(plan.seq_ids))

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        """A request has its first token from this worker."""
        self._output_tokens += 1
        times.last_token_s = now_s

    def tokens(self, times: list[RequestTimes], now_s: float) -> None:
        """Each of these requests has another token. Most have their last one from the same step."""
        self._output_tokens += len(times)
        for last_s, count in Counter([one.last_token_s for one in times]).items():
            self._inter_token.observe(max(0.0, now_s - last_s), count)
        for one in times:
            one.last_token_s = now_s

    def ran_out_of_memory(self) -> None:
        """A step ran out of memory."""
        self._num_out_of_memory += 1

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """A step's result has arrived."""
        self._num_steps += 1
        schedule, wait, output, prepare, copy, forward, sample = self._parts
        schedule.observe(engine_times.schedule_s)
        wait.observe(engine_times.wait_s)
        output.observe(engine_times.output_s)
        prepare.observe(rank_times.prepare_s)
        copy.observe(rank_times.copy_s)
        forward.observe(rank_times.forward_s)
        sample.observe(rank_times.sample_s)

    def collect(self) -> Iterator[Metric]:
        """Make the metric families; the client library calls this at each scrape."""
        own = self._own
        yield own.counter("transom_output_tokens", "Tokens generated.", self._output_tokens)
        yield own.histograms(
            "transom_inter_token_seconds",
            "Seconds between two tokens of one request.",
            (),
            [((), self._inter_token.buckets())],
        )
        yield own.histograms(
            "transom_step_seconds",
            "Seconds of one step: schedule, wait (for the ranks' result) and output (text, stops and events) are the "
            "engine's; prepare, copy (of blocks), forward and sample are the first rank's, inside wait.",
            ("part",),
            [((part,), times.buckets()) for part, times in zip(STEP_PARTS, self._parts, strict=True)],
        )
        yield own.counter("transom_steps", "Steps whose result has come back.", self._num_steps)
        yield own.counter(
            "transom_out_of_memory_steps",
            "Steps that ran out of memory, each of which ended one request.",
            self._num_out_of_memory,
        )
        yield own.histograms("transom_step_tokens", "Tokens computed in one step.", (), [((), self._tokens.buckets())])
        yield own.histograms(
            "transom_step_sequences", "Sequences computed in one step.", (), [((), self._sequences.buckets())]
        )
