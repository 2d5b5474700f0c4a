"""KV policies: which keys and values the full-attention layers of one request keep. Without a policy they keep all of them.

Terms:

    sinks    the first tokens of a sequence, which every policy keeps: models put much attention on them, whatever they say
    window   the most recent tokens, the one that is computed included
    budget   the most tokens that a sequence keeps

Example, `WindowPolicy(sinks=4, window=1024)`: token 5,000 reads tokens 0 to 3 and 3,977 to 5,000.

A window follows from a token's position alone, so what it leaves is published in the prefix cache under the policy's `text`.
The other two policies depend on the attention of the sequence itself (its *history*), and their blocks are never published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar, Literal

from transom_worker.errors import RequestError

DEFAULT_SINKS = 4  # as many as attention sinks need, by the paper that named them (StreamingLLM)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """Keep the first `sinks` tokens and the last `window` ones.

    Raises:
        RequestError: `sinks` is negative, or `window` is not positive.
    """

    type: ClassVar[Literal["window"]] = "window"
    depends_on_history: ClassVar[bool] = False
    sinks: int = DEFAULT_SINKS
    window: int

    def __post_init__(self) -> None:
        _check_whole("sinks", self.sinks, 0)
        _check_whole("window", self.window, 1)

    @property
    def text(self) -> str:
        """The policy's canonical text."""
        return f"window sinks={self.sinks} window={self.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePolicy:
    """Keep the first `sinks` tokens and a window that grows and shrinks between `min_window` and `max_window` tokens.

    It grows while its oldest block gets at least the share `threshold` of the attention, and shrinks while it gets less.

    Raises:
        RequestError: `sinks` is negative, a window is not positive, the least one exceeds the largest, or `threshold` is not
        between
            0 and 1.
    """

    type: ClassVar[Literal["adaptive"]] = "adaptive"
    depends_on_history: ClassVar[bool] = True
    sinks: int = DEFAULT_SINKS
    min_window: int
    max_window: int
    threshold: float

    def __post_init__(self) -> None:
        _check_whole("sinks", self.sinks, 0)
        _check_whole("min_window", self.min_window, 1)
        _check_whole("max_window", self.max_window, 1)
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

    @property
    def text(self) -> str:
        """The policy's canonical text."""
        return (
            f"adaptive sinks={self.sinks} min_window={self.min_window} max_window={self.max_window} "
            f"threshold={float(self.threshold)!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyPolicy:
    """Keep `budget` tokens: the first `sinks`, the most recent ones, and the blocks that have got the most attention so far.

    Raises:
        RequestError: `sinks` is negative, or `budget` is not positive.
    """

    type: ClassVar[Literal["heavy"]] = "heavy"
    depends_on_history: ClassVar[bool] = True
    sinks: int = DEFAULT_SINKS
    budget: int

    def __post_init__(self) -> None:
        _check_whole("sinks", self.sinks, 0)
        _check_whole("budget", self.budget, 1)

    @property
    def text(self) -> str:
        """The policy's canonical text."""
        return f"heavy sinks={self.sinks} budget={self.budget}"


KvPolicy = WindowPolicy | AdaptivePolicy | HeavyPolicy


def _check_whole(name: str, value: object, least: int) -> None:
    """Raises RequestError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise RequestError(
            f"kv_policy.{name} is {value!r}; it must be a whole number of at least {least}.", param=f"kv_policy.{name}"
        )
