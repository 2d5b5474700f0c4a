"""Output events: what a worker sends back for each request, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transom_core import errors
from transom_core.contract.logprob_table import LogprobTable, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvQuality:
    """How far a request's KV policy departs from full attention, summed over the `num_tokens` tokens that were compared.

    `kl` is KL(full attention || policy) of the next-token distributions in nats, and `max_kl` the largest value of one token.
    `num_agreeing` counts the tokens with the same most likely next token. `dropped_mass` is the share of full attention on keys
    that the policy does not read.
    """

    num_tokens: int = 0
    kl: float = 0.0
    max_kl: float = 0.0
    num_agreeing: int = 0
    dropped_mass: float = 0.0

    def __add__(self, other: KvQuality) -> KvQuality:
        return KvQuality(
            num_tokens=self.num_tokens + other.num_tokens,
            kl=self.kl + other.kl,
            max_kl=max(self.max_kl, other.max_kl),
            num_agreeing=self.num_agreeing + other.num_agreeing,
            dropped_mass=self.dropped_mass + other.dropped_mass,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. `num_cached_tokens` are prompt tokens whose KV was found in the prefix cache.

    Of the cached tokens, `num_host_tokens` were found in the host tier or had just come from another worker. Of those,
    `num_fetched_tokens` had just come from another worker (`Request.prefix_source`), and `num_disk_tokens` from the disk tier.

    `index_version` is the version of the worker's prefix index when its scheduler searched it: a router's mirror of the index at
    that version predicts `num_cached_tokens` exactly. `kv_quality` is set if the request asks for it (`Request.kv_quality`), and
    counts the tokens that this worker has computed. `num_weight_updates` counts how often the model's weights were replaced after
    the first token; the router counts it, since the request may migrate in between.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_host_tokens: int = 0
    num_fetched_tokens: int = 0
    num_disk_tokens: int = 0
    index_version: int = 0
    kv_quality: KvQuality | None = None
    num_weight_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error in a message between worker and router: the name of its class in `errors`, its text and its details.

    `loss_cause` and `num_lost` belong to the errors with which a worker says that it has lost requests.
    """

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    loss_cause: errors.LossCause | None = None
    num_lost: int | None = None

    @classmethod
    def of(cls, error: Exception) -> ErrorInfo:
        """Describe `error`; a class that is not in Transom's tree of errors becomes StepFailed."""
        return cls(
            kind=type(error).__name__ if isinstance(error, errors.TransomError) else "StepFailed",
            message=str(error) or type(error).__name__,
            param=getattr(error, "param", None),
            retry_after_s=getattr(error, "retry_after_s", None),
            loss_cause=getattr(error, "loss_cause", None),
            num_lost=getattr(error, "num_lost", None),
        )

    def error(self) -> errors.TransomError:
        """Build the error again, in the process that has received the message."""
        kind: type[errors.TransomError] = getattr(errors, self.kind, errors.StepFailed)
        if issubclass(kind, errors.RequestError):
            return kind(self.message, param=self.param)
        if issubclass(kind, errors.Overloaded):
            return kind(self.message, retry_after_s=self.retry_after_s or 1.0)
        if issubclass(kind, errors.WorkerLost):
            return kind(self.message, loss_cause=self.loss_cause or "unknown", num_lost=self.num_lost)
        if issubclass(kind, errors.StepFailed):
            return kind(self.message, loss_cause=self.loss_cause or "unknown")
        return kind(self.message)


class OutputEvent(NamedTuple):
    """What one step added to one request. A tuple, since one is made, pickled and read for every token.

    `position` is the output index of the first of `token_ids` (resumed tokens counted), and `text_offset` the number of characters
    before `text`; with these a router recognises the repeated events of a migrated request, and drops them. The last event has a
    `finish_reason` and may have no token; `error` is set only with the finish reason "error". With `is_handover` the event ends
    this attempt, but not the output: another worker continues it (`Request.prefill_only`).
    """

    request_id: str
    position: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_offset: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None  # one per token id; a LogprobTable if there are many
    prompt_logprobs: LogprobTable | None = None  # for the prompt's second token and all after it, on one event
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it; None for end of text
    usage: Usage | None = None  # on the first and the last event
    error: ErrorInfo | None = None
    is_handover: bool = False
    embedding: Sequence[float] | None = None  # of the prompt, with the first token (`SamplingParams.pooling`)
