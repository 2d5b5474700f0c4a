"""Output events: what comes back from a worker for each request, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transom_worker import errors

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token and its rank (1 = most likely) before temperature and filters."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the most likely ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. `num_cached_tokens` are prompt tokens whose KV was found in the prefix cache.

    `index_version` is that of the worker's prefix index when its scheduler searched it: a mirror at that version predicts
    `num_cached_tokens` exactly.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    index_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error on the wire between worker and router: the class name in `errors`, its message and details."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: Exception) -> ErrorInfo:
        """Describe an error; whatever is not in Transom's tree becomes StepFailed."""
        return cls(
            kind=type(error).__name__ if isinstance(error, errors.TransomError) else "StepFailed",
            message=str(error) or type(error).__name__,
            param=getattr(error, "param", None),
            retry_after_s=getattr(error, "retry_after_s", None),
        )

    def error(self) -> errors.TransomError:
        """The error again, on the other side."""
        kind: type[errors.TransomError] = getattr(errors, self.kind, errors.StepFailed)
        if issubclass(kind, errors.RequestError):
            return kind(self.message, param=self.param)
        if issubclass(kind, errors.Overloaded):
            return kind(self.message, retry_after_s=self.retry_after_s or 1.0)
        return kind(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEvent:
    """What one step added to one request.

    `position` is the output index of the first of `token_ids` (resumed tokens counted), and `text_offset` the number of
    characters sent before `text`; so a router drops duplicates after a resume. `finish_reason` is set on the last event,
    which may carry no token; `error` only with finish reason "error".
    """

    request_id: str
    position: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_offset: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # one per prompt token, once; first is None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it; None for end of text
    usage: Usage | None = None  # on the first and the last event
    error: ErrorInfo | None = None
