"""The failover rule: which requests migrate when a worker is lost, and which request is to blame. Pure; docs/failover.md has the
reasons.

- **loss**: a worker died, or its event stream broke, while it had requests. The cause of a loss may be evidence against them
  (`EVIDENCE`): a step that raised an error is evidence, and a host that is gone is not.
- **strike**: a loss that counts against a request. Progress of `RELEASE_TOKENS` tokens at another worker removes all strikes.
- **suspect**: a request with a strike. The router sends it to another worker, but never two suspects to one worker.
- **on trial**: a suspect that one more strike brings to `max_lost_workers`. Its worker gets no other request meanwhile.
- **culprit**: a suspect with `max_lost_workers` strikes that was alone when it got the last one. It is stopped as a **poison
  request**, and all other suspects of its losses are cleared.

For example, with `max_lost_workers = 3`: a step of worker 0 raises an error with the requests a, b and c, which become suspects.
The router sends a to worker 1 and b to worker 2; c waits. Worker 1 is lost: a was the only suspect there, so it has two strikes and
is on trial. It runs alone on worker 3, which is lost, too: a is stopped as the culprit. b and c are cleared, and c stops waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from transom_core.config import FailoverConfig
from transom_core.errors import LossCause

RELEASE_TOKENS = 8  # more than the tokens of the last steps before a loss, whose events may be lost with the worker
# A request's first losses with weak evidence, without progress between them, give no strike. A server may lose workers twice in a
# row by accident; a third loss is probably the request's fault.
FREE_LOSSES = 2

Evidence = Literal["strong", "weak", "none"]

# How strongly a loss speaks against the requests that ran: with `strong` the computation caused it, with `weak` it may have, and
# with `none` the cause came from outside.
EVIDENCE: dict[LossCause, Evidence] = {
    "exception": "strong",
    "device_error": "strong",
    "crash": "strong",
    "hung": "strong",
    "unknown": "weak",
    "out_of_memory": "weak",  # before the loss, the worker has already ended the request that needed the most memory
    "silent": "weak",
    "killed": "none",
    "host_lost": "none",
    "stopped": "none",
}

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
    """The losses that one request may have caused since it last made progress.

    `num_free` of them gave no strike (`FREE_LOSSES`); `strikes` has the others. `num_migrations` counts all migrations of the
    request after a loss or a gap in its output, but not those from a worker that drains.
    """

    num_migrations: int = 0
    num_free: int = 0
    strikes: list[Loss] = field(default_factory=list)

    @property
    def num_losses(self) -> int:
        """Return the number of losses that this request may have caused."""
        return self.num_free + len(self.strikes)

    @property
    def is_suspect(self) -> bool:
        """Return whether the request has a strike."""
        return bool(self.strikes)

    def is_on_trial(self, max_lost_workers: int) -> bool:
        """Return whether one more strike can make this suspect the culprit."""
        return self.is_suspect and len(self.strikes) >= max_lost_workers - 1

    def release(self) -> None:
        """Forget all losses, because a worker has survived the step of this request at which another worker was lost."""
        for loss in self.strikes:
            loss.suspects.remove(self)
        self.strikes.clear()
        self.num_free = 0

    def clear(self, loss: Loss) -> None:
        """Forget one loss, which another request caused."""
        self.strikes.remove(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """What the router knows about the loss of a worker.

    `max_num_seqs` is the number of requests that the worker computes at once; None if it is not known. `num_lost` is the number of
    requests that the worker had begun to compute, including those of other routers; None if the worker did not report it.
    """

    cause: LossCause = "unknown"
    max_num_seqs: int | None = None
    num_lost: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one loss means for the requests that ran: the new suspects, those that are no longer suspects, and the culprit."""

    suspected: Sequence[LossRecord] = ()
    cleared: Sequence[LossRecord] = ()
    culprit: LossRecord | None = None


def assign_blame(ran: Sequence[Attempt], report: LossReport, *, max_lost_workers: int) -> Verdict:
    """Give strikes to requests that may have run on a lost worker, and find the culprit.

    If there was a suspect among them, requests that had made progress on this worker are not blamed. Only a request that was a
    suspect before can be the culprit, and only if no other request, of this router or another one, can have killed the worker.
    """
    strength = EVIDENCE[report.cause]
    if strength == "none":
        return Verdict()
    suspects = [attempt.record for attempt in ran if attempt.record.is_suspect]
    may_be_it = [one.record for one in ran if one.record.is_suspect or one.num_new_tokens < RELEASE_TOKENS]
    blamed = may_be_it if suspects else [attempt.record for attempt in ran]
    loss, suspected = Loss([]), []
    for record in blamed:
        if record.is_suspect and len(suspects) > 1:
            continue  # several suspects were lost together, so the loss does not show which of them caused it
        if not record.is_suspect:
            if strength == "weak" and record.num_free < FREE_LOSSES:
                record.num_free += 1
                continue
            suspected.append(record)
        record.strikes.append(loss)
        loss.suspects.append(record)
    was_alone = len(suspects) == len(blamed) == 1 and (report.num_lost is None or report.num_lost <= len(ran))
    if not was_alone or len(suspects[0].strikes) < max_lost_workers:
        return Verdict(suspected)
    return Verdict(suspected, _clear_others(suspects[0]), suspects[0])


def _clear_others(culprit: LossRecord) -> list[LossRecord]:
    """Clear all other suspects of the culprit's losses, and return those that are no longer suspects."""
    cleared = []
    for loss in culprit.strikes:
        others = [record for record in loss.suspects if record is not culprit]
        for record in others:
            record.clear(loss)
        cleared += [record for record in others if not record.is_suspect]
        loss.suspects = [culprit]
    return cleared


Cause = Literal["lost", "torn", "moved"]
"""Why attempts cannot continue at their worker: `lost`, the worker was lost; `torn`, a part of the output is missing; `moved`, the
worker drains and has to end."""


class Attempt(Protocol):
    """The state of one attempt at a lost worker."""

    record: LossRecord
    num_new_tokens: int

    @property
    def is_sent(self) -> bool:
        """Return whether the worker may have the attempt."""

    @property
    def awaits_reply(self) -> bool:
        """Return whether the worker has not replied to its submission."""


AnyAttempt = TypeVar("AnyAttempt", bound=Attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverDecision(Generic[AnyAttempt]):
    """What happens to attempts that cannot continue at their worker.

    `migrating` attempts go to other workers; those that have begun to stream come first. `given_up` attempts have migrated
    `max_resumes` times already. `culprits` are stopped as poison requests.
    """

    migrating: list[AnyAttempt]
    given_up: list[AnyAttempt]
    culprits: list[AnyAttempt]
    verdict: Verdict


def after_loss(
    attempts: Sequence[AnyAttempt], cause: Cause, config: FailoverConfig, report: LossReport
) -> FailoverDecision[AnyAttempt]:
    """Decide what happens to attempts that cannot continue at their worker.

    A drain is not a loss and counts against no request. A loss does not count against a request that was never sent.
    """
    verdict = Verdict()
    if cause == "lost":
        ran = may_have_run(attempts, max_num_seqs=report.max_num_seqs)
        verdict = assign_blame(ran, report, max_lost_workers=config.max_lost_workers)
    decision: FailoverDecision[AnyAttempt] = FailoverDecision(migrating=[], given_up=[], culprits=[], verdict=verdict)
    for attempt in sorted(attempts, key=lambda attempt: not attempt.num_new_tokens):
        is_counted = cause != "moved" and attempt.is_sent
        if attempt.record is verdict.culprit:
            decision.culprits.append(attempt)
        elif is_counted and attempt.record.num_migrations >= config.max_resumes:
            decision.given_up.append(attempt)
        else:
            if is_counted:
                attempt.record.num_migrations += 1
            decision.migrating.append(attempt)
    return decision


def may_have_run(attempts: Sequence[AnyAttempt], *, max_num_seqs: int | None) -> list[AnyAttempt]:
    """Return the attempts that a worker may have been computing when it was lost.

    If `max_num_seqs` attempts had begun to stream, all slots were taken, so an accepted attempt without a token was only queued.
    Every other attempt that was sent counts as one that ran, even if requests of other routers, unknown here, had the slots.
    """
    num_streaming = sum(attempt.num_new_tokens > 0 for attempt in attempts)
    had_free_slot = max_num_seqs is None or num_streaming < max_num_seqs
    return [
        attempt
        for attempt in attempts
        if attempt.is_sent and (had_free_slot or attempt.num_new_tokens or attempt.awaits_reply)
    ]
