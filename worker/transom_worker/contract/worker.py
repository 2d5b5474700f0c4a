"""What a worker tells of itself: who it is, what it has to do, and its messages to routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transom_worker.contract.output import OutputEvent

if TYPE_CHECKING:  # a type alone: what crosses here needs no cache
    from transom_worker.kvcache.events import CacheShape, KvUpdate


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
