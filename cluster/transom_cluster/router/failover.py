"""The failover rule: which requests migrate when a worker is lost, and which request is to blame. Pure; docs/failover.md has the
reasons.

- **loss**: a worker died, or its event stream broke, while it had requests.
- **suspect**: a request that may have run on a lost worker. The router sends it to another worker, but no two suspects to one
  worker, until it has brought `RELEASE_TOKENS` more tokens; then all its losses are forgotten.
- **culprit**: a suspect that was the only suspect on a lost worker, after `max_lost_workers` losses in all. It is stopped as a
  **poison request**, and all other suspects of its losses are cleared.

For example, with `max_lost_workers = 2`: worker 0 is lost with the requests a, b and c, which become suspects. The router sends a
to worker 1 and b to worker 2; c waits. Worker 1 is lost: a was the only suspect there, and this is its second loss, so a is
stopped. b and c are cleared, and c need not wait any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from transom_worker.config import FailoverConfig
from transom_worker.errors import PoisonRequest, WorkerLost

RELEASE_TOKENS = 8  # more than the tokens of the last steps before a loss, whose events may be lost with the worker

POISON = (
    "The request was stopped: {n} workers were lost while they computed it. Sending it again would end the same way."
)
GAVE_UP = "The worker was lost {n} times while this answer was computed, and it is not sent to another; send the request again."


@dataclass(slots=True, eq=False)
class Loss:
    """The loss of one worker, with the requests that may have caused it."""

    suspects: list[LossRecord]


@dataclass(slots=True, eq=False)
class LossRecord:
    """The losses that one request had a part in: how often it migrated after one, and the losses that it may have caused."""

    num_migrations: int = 0
    is_suspect: bool = False
    losses: list[Loss] = field(default_factory=list)

    @property
    def num_losses(self) -> int:
        """The number of losses that this request may have caused."""
        return len(self.losses)

    def release(self) -> None:
        """Forget all losses: the request has repeated the step at which a worker was lost, and this worker is still there."""
        for loss in self.losses:
            loss.suspects.remove(self)
        self.losses.clear()
        self.is_suspect = False

    def clear(self, loss: Loss) -> None:
        """Forget one loss, which another request caused."""
        self.losses.remove(loss)
        self.is_suspect = self.is_suspect and bool(self.losses)


def assign_blame(may_have_run: Sequence[LossRecord], *, max_lost_workers: int) -> LossRecord | None:
    """Make suspects of the requests that may have run on a lost worker; return the culprit, if there is one.

    Only a request that was a suspect before can be the culprit. A request that was alone on the worker may have been alone among
    this router's requests only: those of other routers are not known.
    """
    suspects = [record for record in may_have_run if record.is_suspect]
    blamed = suspects or list(may_have_run)
    loss = Loss(blamed)
    for record in blamed:
        record.losses.append(loss)
        record.is_suspect = True
    if len(suspects) != 1 or suspects[0].num_losses < max_lost_workers:
        return None
    culprit = suspects[0]
    for shared in culprit.losses:
        for other in shared.suspects:
            if other is not culprit:
                other.clear(shared)
        shared.suspects = [culprit]
    return culprit


Cause = Literal["lost", "torn", "moved"]
"""Why attempts cannot continue at their worker: `lost`, the worker was lost with them; `torn`, output in between is missing;
`moved`, the worker drains and has to end."""


class Attempt(Protocol):
    """The state of one attempt at a lost worker."""

    record: LossRecord
    is_sent: bool
    awaits_reply: bool
    num_new_tokens: int


AnyAttempt = TypeVar("AnyAttempt", bound=Attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverDecision(Generic[AnyAttempt]):
    """What happens to the attempts of a lost worker.

    `migrating` attempts go to other workers, those that have begun to stream first. `given_up` attempts were lost more than
    `max_resumes` times. `culprits` are stopped as poison requests.
    """

    migrating: list[AnyAttempt]
    given_up: list[AnyAttempt]
    culprits: list[AnyAttempt]


def after_loss(
    attempts: Sequence[AnyAttempt], cause: Cause, config: FailoverConfig, *, max_num_seqs: int | None
) -> FailoverDecision[AnyAttempt]:
    """Decide what happens to attempts that cannot continue at their worker.

    A worker that drains is not a loss: it counts for no request. Neither does a loss count for a request that was never sent.
    """
    culprit = None
    if cause == "lost":
        ran = may_have_run(attempts, max_num_seqs=max_num_seqs)
        culprit = assign_blame(ran, max_lost_workers=config.max_lost_workers)
    decision: FailoverDecision[AnyAttempt] = FailoverDecision(migrating=[], given_up=[], culprits=[])
    for attempt in sorted(attempts, key=lambda attempt: not attempt.num_new_tokens):
        is_counted = cause != "moved" and attempt.is_sent
        if attempt.record is culprit:
            decision.culprits.append(attempt)
        elif is_counted and attempt.record.num_migrations >= config.max_resumes:
            decision.given_up.append(attempt)
        else:
            if is_counted:
                attempt.record.num_migrations += 1
            decision.migrating.append(attempt)
    return decision


def poison(record: LossRecord) -> PoisonRequest:
    """The error that ends the culprit."""
    return PoisonRequest(POISON.format(n=record.num_losses))


def lost_too_often(record: LossRecord) -> WorkerLost:
    """The error that ends a request that was given up."""
    return WorkerLost(GAVE_UP.format(n=record.num_migrations + 1))


def may_have_run(attempts: Sequence[Attempt], *, max_num_seqs: int | None) -> list[LossRecord]:
    """The records of those attempts that a worker may have been computing when it was lost.

    An attempt without a token was only queued if `max_num_seqs` others had begun to stream. Requests of other routers may have
    run too, and are not known here; so where it is unclear an attempt counts as one that ran.
    """
    num_streaming = sum(attempt.num_new_tokens > 0 for attempt in attempts)
    had_free_slot = max_num_seqs is None or num_streaming < max_num_seqs
    return [
        attempt.record
        for attempt in attempts
        if attempt.is_sent and (had_free_slot or attempt.num_new_tokens or attempt.awaits_reply)
    ]
