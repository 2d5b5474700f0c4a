"""What an executor and its ranks say to each other, in the order in which they say it.

    rank               executor
    Hello         ->                  the process runs, on this host
                  <-  Open            to the first rank: open a meeting for ranks on these hosts
    Opened        ->
                  <-  Load            join the other ranks there, and load your part
    Progress ...  ->
    Loaded        ->
                  <-  Measure         once all have loaded: how large may the pool be?
    Room          ->
                  <-  Allocate        the least of all answers
    Ready         ->
                  <-  Step ...        plans, to all ranks alike
    Used ...      ->                  what the rank has used, once a second while it works
    Done ...      ->                  results, from the first rank
    Failed        ->                  at any time, instead of the next answer

Everything is plain data and pickled: both ends are the same program, and nobody else can write into the channel.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from transom_worker.config import EngineConfig
from transom_worker.contract import ErrorInfo
from transom_worker.execution.executor import ExecutorInfo, RankUse
from transom_worker.scheduling.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """All that a new rank must know. It holds a secret: launchers hand it over in memory, never on disk."""

    config: EngineConfig
    rank: int
    size: int
    endpoint: str
    server_key: bytes
    worker: str = "0"  # whose rank it is, for its log lines


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's process runs. Ranks of the same `host` share cores and memory; `ip` is the rank's address for the others."""

    host: str
    ip: str
    process_id: int


@dataclass(frozen=True, slots=True)
class Open:
    """Open a meeting for ranks on these hosts, in order of rank."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """Where ranks meet."""

    meeting: str


@dataclass(frozen=True, slots=True)
class Load:
    """Meet the others and load, beside so many ranks on the same host."""

    meeting: str
    ranks_on_host: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading has come: the share of the checkpoint's tensors that were read, and this rank's bytes of them."""

    share: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights are in place."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Say how large a pool there is room for."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of the largest pool that this rank has room for."""

    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the cache of this pool, and warm up."""

    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Plans may come."""

    info: ExecutorInfo


@dataclass(frozen=True, slots=True)
class Step:
    """A plan. `epoch` counts the steps that have failed: behind a failed step, plans of its epoch are dropped."""

    epoch: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Used:
    """What this rank has used since its process began."""

    use: RankUse


@dataclass(frozen=True, slots=True)
class Done:
    """A step's result."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Failed:
    """Start-up or a step raised. With a `step_id`, before the rank began anything that ranks do together: it goes on."""

    error: ErrorInfo
    step_id: int | None = None


def encode(message: object) -> bytes:
    """A message's bytes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> Any:
    """The message again."""
    return pickle.loads(data)
