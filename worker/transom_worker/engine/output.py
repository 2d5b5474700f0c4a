"""One answer as it grows: text out of tokens, and when it ends.

An `Answer` is a deterministic function of the request and its output tokens, one at a time. So a resumed request replays
`resumed_output_ids` through a fresh one and goes on where the first worker stopped: same held-back text, same stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.contract import FinishReason, Request
from transom_worker.text.detokenizer import Detokenizer
from transom_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one token added: final text, and how the answer ended, if it did."""

    text: str
    text_offset: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Answer:
    """Detokeniser and stop conditions of one request.

    Order of checks after each token: end of text and stop tokens, stop strings, then length. Nothing but length ends an
    answer before `min_tokens` (the sampler forbids stop tokens until then as well).
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, eos_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        params = request.params
        room = max_model_len - request.num_prompt_tokens
        self.request = request
        self.num_output_tokens = 0
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._sent_chars = 0
        self.finished: Progress | None = None
        for token_id in request.resumed_output_ids:
            self.finished = self.finished or self._finished(self.push(token_id))

    @staticmethod
    def _finished(progress: Progress) -> Progress | None:
        return progress if progress.finish_reason else None

    def push(self, token_id: int) -> Progress:
        """Add one token."""
        self.num_output_tokens += 1
        params = self.request.params
        may_stop = self.num_output_tokens >= params.min_tokens
        if may_stop and token_id in self._eos_token_ids:
            return self._end("", "stop", None)
        if may_stop and token_id in params.stop_token_ids:
            late = self._detokenizer.push(token_id) if params.include_stop_str_in_output else ""
            return self._end("", "stop", token_id, late=late)
        text, stop = self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)
        if stop is not None:
            return self._progress(text, "stop", stop)
        if self.num_output_tokens >= self._max_tokens:
            return self._end(text, "length", None)
        return self._progress(text, None, None)

    def _end(self, text: str, reason: FinishReason, stop: int | None, *, late: str = "") -> Progress:
        """End after `text` with all that was held back; what only completes now may still hold a stop string."""
        may_stop = self.num_output_tokens >= self.request.params.min_tokens
        tail, stop_string = self._stops.push(late + self._detokenizer.flush(), may_stop=may_stop)
        if stop_string is not None:
            return self._progress(text + tail, "stop", stop_string)
        return self._progress(text + tail + self._stops.flush(), reason, stop)

    def _progress(self, text: str, reason: FinishReason | None, stop: int | str | None) -> Progress:
        offset = self._sent_chars
        self._sent_chars += len(text)
        return Progress(text=text, text_offset=offset, finish_reason=reason, stop_reason=stop)


class StopStrings:
    """Finds the first stop string in growing text, and holds back only what could be the beginning of one."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Text that is now final, and the stop string that ended it, if any.

        While `may_stop` is False, text passes: a stop string counts only if it begins after `min_tokens` were reached.
        """
        if not self._stops:
            return text, None
        self._held += text
        if not may_stop:
            return self.flush(), None
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            final = self._held[: at + len(stop) if self._include else at]
            self._held = ""
            return final, stop
        keep = max(self._overlap(stop) for stop in self._stops)
        final = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return final, None

    def flush(self) -> str:
        """Everything that was held back."""
        final, self._held = self._held, ""
        return final

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        limit = min(len(stop) - 1, len(self._held))
        return next((n for n in range(limit, 0, -1) if self._held.endswith(stop[:n])), 0)
