"""`LoadReports`: collects which loads have ended on which ranks, until a result is delivered that can report them.

A *load* copies KV blocks beside the steps, under a *ticket*. Each rank loads its own part, so a load has ended when every rank has
said so, and it has failed if it has failed on any. A result may be dropped before the engine sees it; a later one reports its tickets.
"""

from __future__ import annotations

from transom_worker.scheduling.step import StepResult


class LoadReports:
    """What `num_ranks` ranks have said."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_ended: dict[int, int] = {}  # by ticket, in ranks
        self._failed: set[int] = set()

    def add(self, loaded: list[int], failed: list[int]) -> None:
        """Note the tickets of one rank's report."""
        for ticket in (*loaded, *failed):
            self._num_ended[ticket] = self._num_ended.get(ticket, 0) + 1
        self._failed.update(failed)

    def deliver(self, result: StepResult) -> StepResult:
        """Return a result, which was added before, with the tickets that all ranks have reported and no result yet."""
        ended = [ticket for ticket, count in self._num_ended.items() if count == self._num_ranks]
        result.loaded = [ticket for ticket in ended if ticket not in self._failed]
        result.failed = [ticket for ticket in ended if ticket in self._failed]
        for ticket in ended:
            del self._num_ended[ticket]
        self._failed.difference_update(ended)
        return result
