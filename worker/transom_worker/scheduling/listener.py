"""`SchedulerListener`: the base class through which metrics, timelines and the block map hear what happens to requests."""

from collections.abc import Mapping

from transom_worker.scheduling.sequence import Sequence


class SchedulerListener:
    """The scheduler calls these methods on the engine's thread, while it takes a request or plans a step.

    A listener overrides those that it needs. It must not block, raise, or change the sequence (one request inside the scheduler).
    """

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        """The scheduler has queued a request; `num_ahead` waiting requests of the same client stand before it."""

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        """The scheduler has admitted a request, for the first time or after a preemption.

        `tokens` counts tokens by outcome of the search in the prefix cache: `hit`, `repaired` (cached, and computed again for
        sliding windows) or `missed_<reason>`. At the first admission these are the prompt's tokens; at a later one only hit and
        repaired tokens are counted. The request is computed from position `sequence.scheduled` on.
        """

    def preempted(self, sequence: Sequence, *, mode: str) -> None:
        """The scheduler preempts a request. `mode` is `recompute` (its KV blocks are released after this call, and it is computed
        again later) or `swap` (its blocks are moving to the host tier)."""
