"""What crosses between router and worker: requests in, output events out.

Everything is plain data (ints, floats, strings, tuples), versioned by `CONTRACT_VERSION`. Every stateful stage of a
request's life (penalties, stops, detokeniser, grammar) can be rebuilt from a `Request`, so that a stream can be resumed on
any worker: `resumed_output_ids` are the tokens that the client side already has, and events go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

from transom_worker import errors
from transom_worker.errors import RequestError

if TYPE_CHECKING:  # a type alone: what crosses here needs no cache
    from transom_worker.kvcache.events import CacheShape, KvUpdate

CONTRACT_VERSION = 3

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
LEAST_TEMPERATURE = 1e-5

# Fields of SamplingParams and what they may be; None: unbounded.
_INTEGERS: dict[str, tuple[int | None, int | None]] = {
    "n": (1, 128),
    "max_tokens": (1, None),
    "min_tokens": (0, None),  # and at most max_tokens
    "top_k": (-1, None),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_MAY_BE_UNSET = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when an answer ends.

    Filters apply in this order: logit bias, penalties, temperature, top_k, top_p, min_p. `temperature` 0 (or under 1e-5) is greedy.
    `n` is expanded into `n` requests before the engine sees them. `max_tokens` None means up to the model's length.

    Raises:
        RequestError: a value is out of range; `param` names the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per output token; 0: the chosen token alone
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _read_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _read_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_UNSET:
                continue
            if not isinstance(value, Integral):
                raise RequestError(f"{name} is {value!r}; it must be a whole number.", param=name)
            _check_range(name, int(value), low, self.max_tokens if name == "min_tokens" else high)
        for name, (least, most) in _NUMBERS.items():
            _check_range(name, getattr(self, name), least, most)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0.0; it must be above 0 and at most 1.", param="top_p")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise: at 0, and where dividing by the temperature overflows."""
        return self.temperature < LEAST_TEMPERATURE

    def single(self) -> SamplingParams:
        """The same parameters for one choice."""
        return self if self.n == 1 else replace(self, n=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPolicy:
    """A per-request KV policy on full-attention layers (design section 3); no worker supports one yet."""

    type: Literal["window", "adaptive", "heavy"]
    sinks: int = 0
    window: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue: all that a worker needs, from any router, at any output position.

    `turn_boundaries` are prompt positions where chat turns end (ascending), hints for checkpoints.
    `arrival_s` and `deadline_s` are seconds since the epoch. Lower `priority` runs first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved: an unseeded request gets one at the router
    choice_index: int = 0
    resumed_output_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    turn_boundaries: tuple[int, ...] = ()
    kv_policy: KvPolicy | None = None
    grammar: str | None = None  # reserved; no worker supports one yet
    trace_parent: str | None = None  # the router's span, as W3C's traceparent header has it, if the request is traced
    version: int = CONTRACT_VERSION

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, without resumed output."""
        return len(self.prompt_token_ids)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker has to do, for whoever chooses among workers and for autoscaling.

    `waiting_tokens` are tokens to compute before every request in the worker has its next token: prompts in the queue (hits not
    known yet) and what is left of those that run. Rates are smoothed, 0 while nothing was measured.
    """

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    waiting_tokens: int = 0
    used_share: float = 0.0  # of the KV pool, by blocks that sequences hold
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    first_token_s: float = 0.0  # of recent requests, from arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Who a worker is and what it can do; constant while it lives. Another start of it has another `worker` id."""

    worker: str
    max_model_len: int
    vocab_size: int
    cache: CacheShape
    device: str = ""
    num_ranks: int = 1
    weight_bytes: int = 0
    kv_bytes: int = 0
    start_s: float = 0.0
    report: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """One message on a router's stream: a step's events of this router's requests, and what changed for everybody.

    The first message after opening has the whole index, and so has one after a `resync`. `kv` is None where nothing changed,
    `load` where it was told not long ago.
    """

    events: tuple[OutputEvent, ...] = ()
    kv: KvUpdate | None = None
    load: WorkerLoad | None = None


def _read_stops(given: object) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if stops in ((), (None,)):
        return ()
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop holds {stop!r}; give strings, and ids as stop_token_ids.", param="stop")
        if not stop:
            raise RequestError("stop holds an empty string; leave it out.", param="stop")
    return stops


def _read_token_ids(given: object) -> tuple[int, ...]:
    ids = tuple(given) if isinstance(given, Iterable) else () if given is None else (given,)
    wrong = next((i for i in ids if not isinstance(i, Integral)), None)
    if wrong is not None:
        raise RequestError(f"stop_token_ids holds {wrong!r}; give token ids.", param="stop_token_ids")
    return ids


def _read_bias(given: Mapping[int, float] | None) -> dict[int, float]:
    try:
        biases = {int(token_id): float(bias) for token_id, bias in (given or {}).items()}
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise RequestError(f"logit_bias is {given!r}; give a bias by token id.", param="logit_bias") from None
    for token_id, bias in biases.items():
        _check_range("logit_bias", token_id, 0, None)
        _check_range("logit_bias", bias, -100.0, 100.0)
    return biases


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    """Raise RequestError unless low <= value <= high (None: unbounded)."""
    if not isinstance(value, Real) or not (isinstance(value, Integral) or math.isfinite(value)):
        raise RequestError(f"{name} is {value!r}; it must be a finite number.", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}; it must be {allowed}.", param=name)
