"""What a worker reports about itself: its identity, its load, and its messages to routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from transom_core.config import WorkerRole
from transom_core.contract.output import OutputEvent

if TYPE_CHECKING:  # for types only: importing the messages must not import the KV cache
    from transom_core.contract.kv_events import CacheShape, KvUpdate


PauseMode = Literal["keep", "wait"]
"""What a pause of a worker does to its requests: `keep` stops all, `wait` lets those that are there end and holds later ones."""


class FetchSpeed(NamedTuple):
    """How fast prefixes come from other workers; the defaults hold until something is measured.

    `wait_s` are the seconds of a fetch before and after the blocks move: calls, and waits for steps of both engines. Apart from it,
    `bytes_per_s` holds for small and large fetches alike.
    """

    wait_s: float = 0.01
    bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """How much a worker has to do, for the routing policies and the autoscaler.

    `waiting_tokens` are the tokens to compute before every request in the worker has its next token: the prompts in the queue
    (their cache hits are not known yet) and the remainders of the running prompts. Rates are smoothed, and 0 until something
    was measured.
    """

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    waiting_tokens: int = 0
    used_share: float = 0.0  # share of the KV pool's bytes that are in blocks which sequences hold
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    first_token_s: float = 0.0  # from arrival at the worker to the first token, of recent requests
    fetch_speeds: Mapping[str, FetchSpeed] = field(default_factory=dict)  # by `PrefixSource.place`; "": of all


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroupInfo:
    """One KV cache group: its number format as `--kv-cache-dtype` names it, and bytes per token on the first rank, with scales."""

    name: str
    dtype: str
    bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker is, and its limits, constant while it runs. A worker that is started again has another `worker` id.

    `tokenizer` is the digest of the worker's tokenizer, empty if it is not known. `loaded_at_s` is the time (since the epoch) at
    which the worker began to load its model: where workers have different identities, the newest is that of the worker that began
    last. `replaced` has the last identities that the worker had before its weights were replaced in place; they are older than the
    present one, even if another worker starts with one of them later.
    """

    worker: str
    max_model_len: int
    vocab_size: int
    cache: CacheShape
    tokenizer: str = ""
    loaded_at_s: float = 0.0
    replaced: tuple[str, ...] = ()
    kv_groups: tuple[KvGroupInfo, ...] = ()
    role: WorkerRole = "both"
    node: str = ""  # the host, if it is known
    block_bytes: tuple[int, ...] = ()  # the most bytes of one block of each group, over all ranks; empty: not known
    can_fetch: bool = False  # fetch prefixes from other workers, and lend them its own
    kv_policy_obstacle: str = ""  # why the model's layers cannot follow a request's KV policy; empty if they can
    device: str = ""
    num_ranks: int = 1
    weight_bytes: int = 0
    kv_bytes: int = 0
    hidden_size: int = 0  # of the model, and so of embeddings; 0: not known
    start_s: float = 0.0
    report: str = ""

    @property
    def identity(self) -> str:
        """Return the identity of the model and of all else that decides its numbers; empty if it is not known."""
        return self.cache.identity


# Ray keeps state for each message of a streaming call until the call has ended. So a worker ends each call after this many
# messages, and the router makes the next call.
MAX_CALL_MESSAGES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMessage:
    """One message on a router's stream: a step's events of this router's requests, and the changes that every router receives.

    The first message of a stream has the whole prefix index in `kv`, and so has the first one after a `resync`. `kv` is None if the
    index has not changed, and `load` is None if it was not measured again. `taken` has the ids of this router's requests that the
    worker admitted after the previous load report and before this one. `identity` is the model's new one, with the first message
    after its weights were replaced.
    """

    events: tuple[OutputEvent, ...] = ()
    kv: KvUpdate | None = None
    load: WorkerLoad | None = None
    taken: tuple[str, ...] = ()
    identity: str | None = None
