"""KV policies: which keys and values the full-attention layers of one request keep. Without a policy they keep all of them.

Terms:

    sinks    the first tokens of a sequence, which every policy keeps, because models put much attention on them for any text
    window   the most recent tokens, the one that is computed included
    budget   the most tokens that a sequence keeps

Example, `WindowPolicy(sinks=4, window=1024)`: token 5,000 reads tokens 0 to 3 and 3,977 to 5,000.

What a window keeps depends only on a token's position, so its blocks are published in the prefix cache under the policy's `text`.
The other two policies depend on the attention of the sequence itself (its *history*), so their blocks are never published.
"""

import json
import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import ClassVar

from transom_core.errors import ConfigError, RequestError

DEFAULT_SINKS = 4  # as many as the paper that named attention sinks (StreamingLLM) found to be enough
MAX_STREAM_TOKENS = 2**20
"""The most tokens, prompt and output together, of a request whose policy lets it run past the model's length.

RoPE's angles are float32 products of position and frequency: at this position an angle is off by at most 0.03, and the error grows
in proportion to the position.
"""
MAX_LONG_PROMPT_TOKENS = 2**17
"""The most prompt tokens of such a request, if the model's length is less.

The router's event loop and the engine's thread each hash the prompt; 8,192 hash blocks of 16 tokens take either of them 4 to 8 ms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """What all policies have. `bound` is the name of the field that bounds what a policy keeps."""

    type: ClassVar[str]
    bound: ClassVar[str]
    depends_on_history: ClassVar[bool] = True
    may_exceed_model_len: ClassVar[bool] = True
    sinks: int = DEFAULT_SINKS

    @property
    def text(self) -> str:
        """Return the policy's canonical text."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        sizes = (f"{name}={one if isinstance(one, Integral) else float(one)!r}" for name, one in values.items())
        return " ".join((self.type, *sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy(_Policy):
    """Keep the first `sinks` tokens and the last `window` ones.

    Raises:
        RequestError: `sinks` is negative, or `window` is not positive.
    """

    type = "window"
    bound = "window"
    depends_on_history = False
    window: int  # keys, except sinks, are at most this far from their query, so a stream may exceed the model's length

    def __post_init__(self) -> None:
        _check_sizes(self, "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePolicy(_Policy):
    """Keep the first `sinks` tokens and a window that grows and shrinks between `min_window` and `max_window` tokens.

    It grows while its oldest block gets at least the share `threshold` of the attention, and shrinks while it gets less.

    Raises:
        RequestError: `sinks` is negative, a window is not positive, `min_window` exceeds `max_window`, or `threshold` is not
            between 0 and 1.
    """

    type = "adaptive"
    bound = "max_window"
    min_window: int
    max_window: int
    threshold: float

    def __post_init__(self) -> None:
        _check_sizes(self, "min_window", "max_window")
        if self.min_window > self.max_window:
            raise RequestError(
                f"kv_policy.min_window is {self.min_window} and kv_policy.max_window {self.max_window}; the first must not "
                "exceed the second.",
                param="kv_policy.min_window",
            )
        given = self.threshold
        if not isinstance(given, Real) or isinstance(given, bool) or not math.isfinite(given) or not 0 < given < 1:
            raise RequestError(
                f"kv_policy.threshold is {given!r}; it must be a share of the attention above 0 and below 1.",
                param="kv_policy.threshold",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyPolicy(_Policy):
    """Keep `budget` tokens: the first `sinks`, the most recent ones, and the blocks that have got the most attention so far.

    Raises:
        RequestError: `sinks` is negative, or `budget` is not positive.
    """

    type = "heavy"
    bound = "budget"
    may_exceed_model_len = False  # a kept block may be as far from the query as the sequence is long
    budget: int

    def __post_init__(self) -> None:
        _check_sizes(self, "budget")


KvPolicy = WindowPolicy | AdaptivePolicy | HeavyPolicy
_EXAMPLE = 'Give one such as {"type": "window", "sinks": 4, "window": 1024}.'
MIN_ADAPTIVE_BLOCKS = 2  # one kept block, and one that is being filled
MIN_HEAVY_BLOCKS = 3  # after the sinks: one kept for its attention, the most recent one, and one that is being filled


def check_kv_policy(
    policy: KvPolicy | None, *, kv_quality: bool, block_size: int, max_model_len: int, obstacle: str
) -> None:
    """Check a request's policy against the model and its cache. `obstacle` says why the model takes no policy; it is empty if the
    model does.

    Raises:
        RequestError: the model takes no policy, a size exceeds the model's length or is too small for the blocks that the policy
            needs, or `kv_quality` is set without a policy.
    """
    if policy is None:
        if kv_quality:
            raise RequestError(
                "kv_quality compares a kv_policy with full attention, and the request has none; send a kv_policy, or leave it out.",
                param="kv_quality",
            )
        return
    if obstacle:
        raise RequestError(
            f"kv_policy {policy.type!r} needs a model whose layers all have full attention, and {obstacle}; leave it out, or send "
            'kv_policy {"type": "full"}.',
            param="kv_policy",
        )
    name: str = policy.bound
    kept: int = getattr(policy, name)
    if isinstance(policy, HeavyPolicy):
        if kept > max_model_len:
            raise RequestError(
                f"kv_policy.{name} is {kept}; it may have up to {max_model_len} tokens, the model's length.",
                param=f"kv_policy.{name}",
            )
    elif kept + policy.sinks > max_model_len:
        raise RequestError(
            f"kv_policy.{name} is {kept} and kv_policy.sinks {policy.sinks}; together they may have up to "
            f"{max_model_len} tokens, the model's length.",
            param=f"kv_policy.{name}",
        )
    least = _least(policy, block_size)
    if kept < least:
        raise RequestError(
            f"kv_policy.{name} is {kept}; with {policy.sinks} sinks and KV blocks of {block_size} tokens it must be "
            f"at least {least}.",
            param=f"kv_policy.{name}",
        )


def max_stream_len(policy: KvPolicy | None, *, kv_quality: bool, max_tokens: int | None, max_model_len: int) -> int:
    """Return the most tokens, prompt and output, that a request with this policy may have.

    More than the model's length is allowed only if the policy may exceed it and the request bounds its output. `kv_quality`
    compares with full attention, which ends at the model's length.
    """
    if policy is None or not policy.may_exceed_model_len or kv_quality or max_tokens is None:
        return max_model_len
    return max(max_model_len, MAX_STREAM_TOKENS)


def max_prompt_len(stream_len: int, max_model_len: int) -> int:
    """Return the most prompt tokens of a request whose prompt and output may have `stream_len` tokens together."""
    return min(stream_len, max(max_model_len, MAX_LONG_PROMPT_TOKENS))


def kv_policy_from_json(text: str) -> KvPolicy | None:
    """Read the setting `--kv-policy`: the JSON of a request's field `kv_policy`; None for the type "full".

    Raises:
        ConfigError: it is not a JSON object, its type is unknown, or a field is missing, unknown or wrong.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-policy is not JSON ({error}); {_EXAMPLE}") from None
    kinds = {kind.type: kind for kind in (WindowPolicy, AdaptivePolicy, HeavyPolicy)}
    name = given.pop("type", None) if isinstance(given, dict) else None
    if name == "full" and not given:
        return None
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"--kv-policy is {text}; its type must be one of full, {', '.join(kinds)}. {_EXAMPLE}")
    try:
        return kinds[name](**given)
    except TypeError as error:
        named = str(error).partition("() ")[2]
        raise ConfigError(f"--kv-policy {name}: {named}. {_EXAMPLE}") from None
    except RequestError as error:
        raise ConfigError(f"--kv-policy: {error}") from None


def _least(policy: KvPolicy, block_size: int) -> int:
    """Return the least value of the field that bounds what the policy keeps."""
    match policy:
        case WindowPolicy():
            return 1
        case AdaptivePolicy():
            return MIN_ADAPTIVE_BLOCKS * block_size
        case HeavyPolicy():
            return (-(-policy.sinks // block_size) + MIN_HEAVY_BLOCKS) * block_size


def _check_sizes(policy: _Policy, *names: str) -> None:
    """Raise RequestError unless `sinks` and the fields of these names are whole numbers, the fields of at least 1."""
    for name in ("sinks", *names):
        value, least = getattr(policy, name), 0 if name == "sinks" else 1
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
            raise RequestError(
                f"kv_policy.{name} is {value!r}; it must be a whole number of at least {least}.",
                param=f"kv_policy.{name}",
            )
