"""Who goes on when a worker is lost, and which request is to blame. Pure; docs/failover.md has the reasons.

Whatever may have run on a lost worker is a *suspect*: it goes on, but no two suspects on one worker, until it has brought
`RELEASE_TOKENS` more tokens; then all losses are forgotten. So when a worker is lost with a suspect on it, that one is named; named
after `max_lost_workers` losses in all it is stopped, and whoever else was blamed for the same losses is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from transom_worker.config import FailoverConfig
from transom_worker.errors import PoisonRequest, WorkerLost

RELEASE_TOKENS = 8  # more than the last steps before a loss whose events may be lost with the worker

POISON = (
    "The request was stopped: {n} workers were lost while they computed it. Sending it again would end the same way."
)
GAVE_UP = "The worker was lost {n} times while this answer was computed, and it is not sent to another; send the request again."


@dataclass(slots=True, eq=False)
class Incident:
    """A worker's loss, and who may have caused it."""

    suspects: list[LossRecord]


@dataclass(slots=True, eq=False)
class LossRecord:
    """What one request has gone through: how often it went on elsewhere, and the losses that it may have caused."""

    num_resumes: int = 0
    is_suspect: bool = False
    incidents: list[Incident] = field(default_factory=list)

    @property
    def num_losses(self) -> int:
        """Workers that may have been lost by this request."""
        return len(self.incidents)

    def release(self) -> None:
        """It has shown that the same step does not lose a worker again: whatever was lost before, it was not the reason."""
        for incident in self.incidents:
            incident.suspects.remove(self)
        self.incidents.clear()
        self.is_suspect = False

    def clear(self, incident: Incident) -> None:
        """Somebody else caused that loss."""
        self.incidents.remove(incident)
        self.is_suspect = self.is_suspect and bool(self.incidents)


def judge(may_have_run: Sequence[LossRecord], *, max_lost_workers: int) -> LossRecord | None:
    """A worker was lost with these on it: make suspects of whom that concerns; the one that must not be sent again, if any.

    Only a suspect is named: who was alone there may have been alone for this router only.
    """
    suspects = [record for record in may_have_run if record.is_suspect]
    blamed = suspects or list(may_have_run)
    incident = Incident(blamed)
    for record in blamed:
        record.incidents.append(incident)
        record.is_suspect = True
    if len(suspects) != 1 or suspects[0].num_losses < max_lost_workers:
        return None
    culprit = suspects[0]
    for shared in culprit.incidents:
        for other in shared.suspects:
            if other is not culprit:
                other.clear(shared)
        shared.suspects = [culprit]
    return culprit


Cause = Literal["lost", "torn", "moved"]
"""Why attempts cannot go on at their worker: it was lost with them, output is missing in between, or it has to end."""


class Run(Protocol):
    """What is known of one attempt at a worker."""

    record: LossRecord
    is_sent: bool
    awaits_reply: bool
    num_new_tokens: int


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Generic[AnyRun]):
    """What becomes of attempts: who goes on (those whose clients see them stand still first), who has had enough, who is poison."""

    going_on: list[AnyRun]
    given_up: list[AnyRun]
    culprits: list[AnyRun]


def after_loss(
    attempts: Sequence[AnyRun], cause: Cause, config: FailoverConfig, *, max_num_seqs: int | None
) -> Verdict[AnyRun]:
    """Draw the conclusions. A worker that has to end is nobody's doing and not counted, nor is one that was never reached."""
    culprit = None
    if cause == "lost":
        ran = may_have_run(attempts, max_num_seqs=max_num_seqs)
        culprit = judge(ran, max_lost_workers=config.max_lost_workers)
    verdict: Verdict[AnyRun] = Verdict(going_on=[], given_up=[], culprits=[])
    for attempt in sorted(attempts, key=lambda attempt: not attempt.num_new_tokens):
        is_counted = cause != "moved" and attempt.is_sent
        if attempt.record is culprit:
            verdict.culprits.append(attempt)
        elif is_counted and attempt.record.num_resumes >= config.max_resumes:
            verdict.given_up.append(attempt)
        else:
            attempt.record.num_resumes += is_counted
            verdict.going_on.append(attempt)
    return verdict


def poison(record: LossRecord) -> PoisonRequest:
    """What the culprit's client is told."""
    return PoisonRequest(POISON.format(n=record.num_losses))


def lost_too_often(record: LossRecord) -> WorkerLost:
    """What the client of one that has had enough is told."""
    return WorkerLost(GAVE_UP.format(n=record.num_resumes + 1))


def may_have_run(attempts: Sequence[Run], *, max_num_seqs: int | None) -> list[LossRecord]:
    """Which of the attempts at a lost worker it may have computed when it was lost.

    Those without a token merely waited if those that had begun took all of its places. Places that other routers' requests took
    are not known, so that in doubt an attempt ran.
    """
    num_streaming = sum(attempt.num_new_tokens > 0 for attempt in attempts)
    had_place = max_num_seqs is None or num_streaming < max_num_seqs
    return [
        attempt.record
        for attempt in attempts
        if attempt.is_sent and (had_place or attempt.num_new_tokens or attempt.awaits_reply)
    ]
