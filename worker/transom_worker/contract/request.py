"""Requests: what goes from a router to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transom_worker.contract.sampling_params import SamplingParams

CONTRACT_VERSION = 4


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
    turn_boundaries: tuple[int, ...] = ()
    kv_policy: KvPolicy | None = None
    grammar: str | None = None  # reserved; no worker supports one yet
    trace_parent: str | None = None  # the router's span, as W3C's traceparent header has it, if the request is traced
    version: int = CONTRACT_VERSION

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, without resumed output."""
        return len(self.prompt_token_ids)
