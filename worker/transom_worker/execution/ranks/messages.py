"""Defines the messages between an executor and its ranks, in the order in which they are sent. A *rendezvous* is the place where
ranks connect to each other (`models.parallel.rendezvous`); a *load* copies KV blocks beside the steps, under a *ticket*.

    rank                     executor
    Hello               ->                    the rank's process runs, on this host
                        <-  OpenRendezvous    to the first of several ranks only: open a rendezvous for ranks on these hosts
    RendezvousOpened    ->
                        <-  Load              connect to the other ranks there, and load this rank's part of the weights
    LoadProgress ...    ->
    Loaded              ->
                        <-  Measure           once all ranks have loaded: how large a KV pool fits?
    Busy ...            ->                    it compiles kernels; after Allocate it also pins memory and captures graphs
    KvCapacity          ->
                        <-  Allocate          the smallest capacity of all ranks
    ExecutorInfo        ->                    the rank is ready for plans
                        <-  RunStep ...       plans, the same to all ranks
    RankUsage ...       ->                    what the rank has used, once a second while it works
    StepResult ...      ->                    results, from the first rank only
    LoadsEnded ...      ->                    loads that have ended, from every other rank
                        <-  ReadBlocks, WriteBlocks, LoadAdapter  to every rank, between plans
    BlocksDone          ->
                        <-  BeginRead                             to every rank, between plans
    ReadEnd             ->                                        at any time, from the rank's thread of reads
    RankFailed          ->                    at any time, instead of the next message

Messages are plain data, and are pickled. That is safe because both ends are the same program, and the channel's keys keep other
programs out.
"""

import pickle
from dataclasses import dataclass
from typing import Any

from transom_core.config import EngineConfig
from transom_core.contract import ErrorInfo
from transom_core.model_files.content import ContentPart
from transom_worker.execution.executor import RemoteRead
from transom_worker.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything that a new rank must know. It has the key of the channel, so launchers pass it in memory and never on disk."""

    config: EngineConfig
    rank: int
    size: int
    endpoint: str
    server_key: bytes
    worker: str = "0"  # the id of the worker, for the rank's log lines


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's process runs. Ranks with the same `host` share cores and memory; other ranks reach this one at `ip`. `gpu` is the
    UUID of the rank's GPU; empty on a CPU."""

    host: str
    ip: str
    process_id: int
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class OpenRendezvous:
    """Asks the first rank to open a rendezvous. `hosts` are the hosts of all ranks, in order of rank."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RendezvousOpened:
    """The rendezvous is open at this address."""

    rendezvous: str


@dataclass(frozen=True, slots=True)
class Load:
    """Asks a rank to connect to the other ranks and to load its weights.

    `ranks_on_host` ranks share this host; this one is number `index_on_host` of them, counted from 0.
    """

    rendezvous: str
    ranks_on_host: int
    index_on_host: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come: the share of the tensors that the rank has read, and the bytes that it has kept of them."""

    share: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Busy:
    """The rank measures its memory or warms up, which may take minutes, and does not hang."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank has loaded its weights; `contents` is its part of the contents of the model's files."""

    contents: tuple[ContentPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """Asks a rank for the size of the largest KV pool that fits into its memory."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The size of the largest KV pool that fits into this rank's memory, in bytes."""

    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Asks a rank to allocate a KV pool of this size, and to warm up. `contents` is the digest of the model's files."""

    pool_bytes: int
    contents: bytes = b""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A plan to run. `epoch` counts the steps that have failed so far: after a failed step, ranks drop the plans of its epoch."""

    epoch: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class LoadsEnded:
    """Tickets of the loads that have ended on this rank, and of those that have failed. A rank sends it after a step with any.

    After a step without rows the rank always sends it, so that the executor knows that the rank has done the step.
    """

    step_id: int
    loaded: tuple[int, ...]
    load_s: tuple[float, ...]
    failed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Asks a rank for the contents of blocks; `call` numbers the calls of an executor."""

    call: int
    tier: int
    group: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Gives a rank the contents of blocks."""

    call: int
    tier: int
    group: int
    blocks: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Asks a rank to load its part of the LoRA adapter at `path` into a slot."""

    call: int
    slot: int
    path: str


@dataclass(frozen=True, slots=True)
class BeginRead:
    """Begins a read of another worker's memory."""

    read: RemoteRead


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """The answer to `ReadBlocks` (with the contents), `WriteBlocks` or `LoadAdapter`; `refusal` says why the call was wrong."""

    call: int
    data: bytes = b""
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Start-up or a step raised an exception.

    `step_id` is given if a step failed before the rank's first collective: the rank can then go on with later steps.
    """

    error: ErrorInfo
    step_id: int | None = None


def encode(message: object) -> bytes:
    """Return a message as bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    """Return the message from which `encode` made these bytes."""
    return pickle.loads(data)
