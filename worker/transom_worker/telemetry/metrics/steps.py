"""Steps and tokens, fed several times a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_worker.telemetry.metrics.own_labels import Buckets, OwnLabels
from transom_worker.telemetry.metrics.tally import Tally

if TYPE_CHECKING:
    from transom_worker.scheduling.step import StepTimings

STEP_PARTS = ("schedule", "wait", "output", "prepare", "copy", "forward", "sample")
INTER_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0),  # a preempted request waits for room between two tokens
)
STEP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Steps(Collector):
    """Plain numbers that the engine's thread adds to."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self.output_tokens = 0
        self.inter_token = Tally(INTER_TOKEN_BUCKETS_S)
        self._num_steps = 0
        self._parts = tuple(Tally(STEP_BUCKETS_S) for _ in STEP_PARTS)
        self._tokens = Tally(TOKEN_BUCKETS)
        self._sequences = Tally(SEQUENCE_BUCKETS)

    def scheduled(self, *, num_tokens: int, num_seqs: int) -> None:
        """A plan went to the ranks."""
        self._tokens.observe(num_tokens)
        self._sequences.observe(num_seqs)

    def stepped(self, timings: StepTimings, *, schedule_s: float, wait_s: float, output_s: float) -> None:
        """A result came back."""
        self._num_steps += 1
        schedule, wait, output, prepare, copy, forward, sample = self._parts
        schedule.observe(schedule_s)
        wait.observe(wait_s)
        output.observe(output_s)
        prepare.observe(timings.prepare_s)
        copy.observe(timings.copy_s)
        forward.observe(timings.forward_s)
        sample.observe(timings.sample_s)

    def collect(self) -> Iterator[Metric]:
        """At scrape time."""
        own = self._own
        yield own.counter("transom_output_tokens", "Tokens generated.", self.output_tokens)
        yield own.histograms(
            "transom_inter_token_seconds",
            "Seconds between two tokens of one request.",
            (),
            [((), _buckets(self.inter_token))],
        )
        yield own.histograms(
            "transom_step_seconds",
            "Seconds of one step by part: schedule, wait (for the ranks' result) and output (text, stops and events) are the "
            "engine's; prepare, copy (of blocks), forward and sample are the first rank's, inside wait.",
            ("part",),
            [((part,), _buckets(tally)) for part, tally in zip(STEP_PARTS, self._parts, strict=True)],
        )
        yield own.counter("transom_steps", "Steps whose result has come back.", self._num_steps)
        yield own.histograms("transom_step_tokens", "Tokens computed in one step.", (), [((), _buckets(self._tokens))])
        yield own.histograms(
            "transom_step_sequences", "Sequences computed in one step.", (), [((), _buckets(self._sequences))]
        )


def _buckets(tally: Tally) -> Buckets:
    return Buckets(tally.bounds, tally.counts.copy(), tally.sum)
