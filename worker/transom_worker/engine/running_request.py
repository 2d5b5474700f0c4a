"""One admitted request inside the engine: its answer, its times, and the events that go out for it."""

from __future__ import annotations

import time

from transom_worker.contract import ErrorInfo, OutputEvent, Usage
from transom_worker.engine.output import Answer, Progress
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.telemetry.metrics import RequestTimes


class RunningRequest:
    """Turns new tokens and ends into events."""

    def __init__(self, answer: Answer) -> None:
        self.request = answer.request
        request = answer.request
        # The client of a resumed request has its first token: what was before is not this worker's time.
        arrival_s = 0.0 if request.resumed_output_ids else request.arrival_s
        self.times = RequestTimes(
            arrival_s or time.time(), request_id=request.request_id, trace_parent=request.trace_parent
        )
        self._answer = answer
        self._num_cached_tokens: int | None = None  # unknown until the first token
        self._index_version = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer until now, those that another worker gave included."""
        return self._answer.num_output_tokens

    def token_event(self, output: SequenceOutput) -> OutputEvent:
        """The event of one new token, which may end the answer."""
        progress = self._answer.push(output.token_id)
        is_first = self._num_cached_tokens is None
        if is_first:
            self._num_cached_tokens = output.num_cached_tokens
            self._index_version = output.index_version
        return OutputEvent(
            request_id=output.request_id,
            position=output.position,
            token_ids=(output.token_id,),
            text=progress.text,
            text_offset=progress.text_offset,
            logprobs=None if output.logprobs is None else (output.logprobs,),
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=progress.finish_reason,
            stop_reason=progress.stop_reason,
            usage=self._usage() if is_first or progress.finish_reason else None,
        )

    def end_event(self, end: Progress) -> OutputEvent:
        """The only event of an answer that its resumed tokens had ended already: `end` again, without its text."""
        return OutputEvent(
            request_id=self.request.request_id,
            position=self._answer.num_output_tokens,
            text_offset=end.text_offset + len(end.text),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            usage=self._usage(),
        )

    def error_event(self, error: Exception) -> OutputEvent:
        """The last event of a request that an error ended."""
        return OutputEvent(
            request_id=self.request.request_id,
            position=self._answer.num_output_tokens,
            finish_reason="error",
            usage=self._usage(),
            error=ErrorInfo.of(error),
        )

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self._answer.num_output_tokens,
            num_cached_tokens=self._num_cached_tokens or 0,
            index_version=self._index_version,
        )
