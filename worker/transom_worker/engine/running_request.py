"""`RunningRequest`: one request inside the engine, from its output tokens to the output events that leave the worker.

A request's text and its end are a deterministic function of the request and its output tokens. So a request that migrates from
another worker carries that worker's tokens (`resumed_output_ids`). They are replayed here, and the text continues where it
stopped: with the same characters held back (they could be the beginning of a stop string), and the same stop conditions.
"""

import heapq
import math
from collections.abc import Mapping

from transom_core.contract import ErrorInfo, FinishReason, KvQuality, OutputEvent, Request, Usage
from transom_core.errors import RequestError, StepFailed, WorkerLost
from transom_core.grammar import GrammarMatcher
from transom_core.text.detokenizer import Detokenizer
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.stop_strings import StopStrings
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.telemetry.engine_events import RequestTimes


class RunningRequest:
    """Detokenises a request's tokens and checks its stop conditions.

    After each token these are checked in order: end of text and stop tokens, stop strings, the grammar (nothing may be able to
    follow), and the length. Before `min_tokens` only the grammar and the length end a request; until then the sampler forbids
    stop tokens as well.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        arrival_s: float,
    ) -> None:
        """Replay `resumed_output_ids`; `finish_reason` is set if these end the request already. A "length" may become a "stop" by
        `hold_to`: the grammar is checked before the length.

        `arrival_s` is when the request arrived at this worker.
        """
        params = request.params
        most = max_model_len - request.num_prompt_tokens
        self.request = request
        self.num_output_tokens = 0  # including those of other workers
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._max_tokens = most if params.max_tokens is None else min(params.max_tokens, most)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._end_token_ids = self._eos_token_ids.union(params.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        # Whether any token may end it here, or has an event that says more than others.
        self._has_no_plain_token = bool(params.stop) or request.prefill_only or request.kv_quality
        self.grammar: GrammarMatcher | None = None  # it has consumed the output so far
        # What must end before the request may be admitted: a fetch, a load from the disk, compiling, a slot for its
        # adapter, or its group's arrival.
        self.num_holds = 0
        self._num_chars = 0  # length of all final text
        self._end_text = ""  # text that was held back when the request ended between two tokens
        self._num_cached_tokens: int | None = None  # unknown until the first token
        self._num_host_tokens = 0
        self.num_fetched_tokens = 0  # tokens of its prefix that came from another worker before it was admitted
        self.num_direct_tokens = 0  # of these, those that came straight into the device's pool
        self.num_disk_tokens = 0  # tokens of its prefix that were read from the disk tier before it was admitted
        self._index_version = 0
        self._kv_quality = KvQuality() if request.kv_quality else None
        self.deadline_s: float | None = None  # on the engine's clock
        self.times = RequestTimes(arrival_s, request_id=request.request_id, trace_parent=request.trace_parent)
        for token_id in request.resumed_output_ids:
            if self.finish_reason is None:
                self._num_chars += len(self._text_of(token_id))

    def hold_to(self, matcher: GrammarMatcher) -> None:
        """Make every further token follow a grammar. Its matcher has consumed the resumed output already."""
        self.grammar = matcher
        if matcher.is_complete:
            self.end_by_grammar()

    def end_by_grammar(self) -> None:
        """End the request between two tokens, since its grammar allows no further token; `end_event` has the held-back text."""
        self._end_text = self._last_text("", "stop", None)

    def may_end(self, output: SequenceOutput) -> bool:
        """Return whether this token may end the request, or has an event that says more than `plain_event`."""
        return (
            output.token_id in self._end_token_ids
            or self.num_output_tokens + 1 >= self._max_tokens
            or output.is_first
            or self._has_no_plain_token
            or self.grammar is not None
        )

    def plain_event(self, output: SequenceOutput) -> OutputEvent:
        """Return the event of a new token that cannot end the request (`may_end`); this is most of them, and takes less time."""
        self.num_output_tokens += 1
        text, text_offset = self._detokenizer.push(output.token_id), self._num_chars
        self._num_chars = text_offset + len(text)
        logprobs = None if output.logprobs is None else (output.logprobs,)
        fields = (
            output.request_id, output.position, (output.token_id,), text, text_offset, logprobs,
            None, None, None, None, None, False, None,
        )  # fmt: skip
        # A named tuple's own constructor is a Python function, which takes three times as long.
        return tuple.__new__(OutputEvent, fields)

    def token_event(self, output: SequenceOutput) -> OutputEvent:
        """Return the event of one new token, which may end the request.

        Raises:
            RequestError, StepFailed, WorkerLost: see `GrammarMatcher.consume`. The token is neither sent nor counted.
        """
        try:
            text = self._text_of(output.token_id)
        except (RequestError, StepFailed, WorkerLost):
            self.num_output_tokens -= 1  # `error_event` says how many tokens were sent
            raise
        text_offset = self._num_chars
        self._num_chars = text_offset + len(text)
        is_first = self._num_cached_tokens is None
        if is_first:
            self._num_cached_tokens = output.num_cached_tokens
            self._num_host_tokens = output.num_host_tokens
            self._index_version = output.index_version
        if output.quality is not None and self._kv_quality is not None:
            self._kv_quality += KvQuality(
                num_tokens=1,
                kl=output.quality.kl,
                max_kl=output.quality.kl,
                num_agreeing=int(output.quality.top_token_agrees),
                dropped_mass=output.quality.dropped_mass,
            )
        # By position: names would double the time.
        return OutputEvent(
            output.request_id,
            output.position,
            (output.token_id,),
            text,
            text_offset,
            None if output.logprobs is None else (output.logprobs,),
            output.prompt_logprobs,
            self.finish_reason,
            self._stop_reason,
            self._usage() if is_first or self.finish_reason else None,
            None,  # no error
            self.request.prefill_only and self.finish_reason is None,
            output.embedding,
        )

    def end_event(self) -> OutputEvent:
        """The last event of a request that ends between two tokens: by its resumed tokens, or by its grammar."""
        return OutputEvent(
            request_id=self.request.request_id,
            position=self.num_output_tokens,
            text=self._end_text,
            text_offset=self._num_chars,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            usage=self._usage(),
        )

    def error_event(self, error: Exception) -> OutputEvent:
        """Return the last event of a request that ends with this error."""
        return OutputEvent(
            request_id=self.request.request_id,
            position=self.num_output_tokens,
            finish_reason="error",
            usage=self._usage(),
            error=ErrorInfo.of(error),
        )

    def _text_of(self, token_id: int) -> str:
        """Add one token, and return the text that becomes final with it. Set `finish_reason` if the token ends the request."""
        self.num_output_tokens += 1
        params = self.request.params
        may_stop = self.num_output_tokens >= params.min_tokens
        if may_stop and token_id in self._end_token_ids:
            is_eos = token_id in self._eos_token_ids
            shows = params.include_stop_str_in_output and not is_eos
            piece = self._detokenizer.push(token_id) if shows else ""
            return self._last_text(piece, "stop", None if is_eos else token_id)
        text, stop_string = self._detokenizer.push(token_id), None
        if params.stop:
            text, stop_string = self._stops.push(text, may_stop=may_stop)
        if stop_string is not None:
            self.finish_reason, self._stop_reason = "stop", stop_string
        elif self.grammar is not None and self._is_completed_by(self.grammar, token_id):
            text += self._last_text("", "stop", None)
        elif self.num_output_tokens >= self._max_tokens:
            text += self._last_text("", "length", None)
        return text

    def _is_completed_by(self, grammar: GrammarMatcher, token_id: int) -> bool:
        """Let the grammar consume a token; return whether nothing can follow it. Raises like `consume`."""
        grammar.consume(token_id)
        return grammar.is_complete

    def _last_text(self, piece: str, reason: FinishReason, stop_token_id: int | None) -> str:
        """End the request with `piece` after all text that was held back, and return the text that becomes final.

        If this completes a stop string, that is the reason of the end instead of `reason`.
        """
        may_stop = self.num_output_tokens >= self.request.params.min_tokens
        text, stop_string = self._stops.push(piece + self._detokenizer.flush(), may_stop=may_stop)
        if stop_string is not None:
            self.finish_reason, self._stop_reason = "stop", stop_string
            return text
        self.finish_reason, self._stop_reason = reason, stop_token_id
        return text + self._stops.flush()

    def _usage(self) -> Usage:
        num_cached = self._num_cached_tokens or 0
        num_host = min(num_cached, self._num_host_tokens + self.num_direct_tokens)
        return Usage(
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=num_cached,
            num_host_tokens=num_host,
            num_fetched_tokens=min(self.num_fetched_tokens, num_host),
            num_disk_tokens=min(self.num_disk_tokens, self._num_host_tokens),
            index_version=self._index_version,
            kv_quality=self._kv_quality,
        )


LEAST_REMOVED = 64  # fewer deadlines of ended requests are not worth the time that removing them takes


class Deadlines:
    """The deadlines of `requests`, which the engine adds and removes, on the engine's clock."""

    def __init__(self, requests: Mapping[str, RunningRequest]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []  # (time, request id), those of some ended requests included

    @property
    def next_s(self) -> float:
        """A time before which no deadline passes; infinite if there are none."""
        return self._heap[0][0] if self._heap else math.inf

    def watch(self, running: RunningRequest, deadline_s: float) -> None:
        """Note the deadline of a request. If more than half of the deadlines are of ended requests, those are removed."""
        running.deadline_s = deadline_s
        heapq.heappush(self._heap, (deadline_s, running.request.request_id))
        if len(self._heap) > 2 * len(self._requests) + LEAST_REMOVED:
            known = self._requests.items()
            self._heap = [(one.deadline_s, name) for name, one in known if one.deadline_s is not None]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float) -> list[str]:
        """Return the ids of the requests whose deadlines have passed, and forget these."""
        passed = []
        while self.next_s <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            running = self._requests.get(request_id)
            if running is not None and running.deadline_s == deadline_s:  # else its id was used again
                passed.append(request_id)
        return passed
