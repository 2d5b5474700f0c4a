"""`SamplingParams`: how a request's tokens are sampled and when its output ends, with the allowed values of each field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Literal

from transom_core.errors import RequestError

MAX_LOGPROBS = 20  # OpenAI's limit of `top_logprobs`
MAX_STOP_STRINGS = 16
LEAST_TEMPERATURE = 1e-5

Pooling = Literal["last", "mean", "score"]
"""What a prompt becomes: the hidden state of its last token, the mean of all its tokens', or what the model's classification head
makes of the last one: a number for each label."""

# Fields of SamplingParams with their least and greatest values; None: unbounded.
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
    """How the next token is sampled and when an output ends.

    Filters apply in this order: logit bias, penalties, temperature, top_k, top_p, min_p. A `temperature` of 0 (or under 1e-5) is
    greedy. A request with `n` outputs is split into `n` requests before the engine sees it. If `max_tokens` is None, an output may
    grow to the model's length.

    With `pooling` the first token's event has the prompt's embedding: final hidden states, normalised by the model's last norm; or
    its score.

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
    pooling: Pooling | None = None
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
        """Return whether the most likely token is taken: at temperature 0, and where dividing by the temperature would overflow."""
        return self.temperature < LEAST_TEMPERATURE

    def single(self) -> SamplingParams:
        """Return these parameters with `n` = 1, for one choice of several."""
        return self if self.n == 1 else replace(self, n=1)


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
