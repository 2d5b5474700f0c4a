"""Collects which loads have ended on which ranks (`LoadReports`), until a result that reaches the engine can report them.

A *load* copies KV blocks beside the steps, under a *ticket*. Each rank loads its own part, so a load has ended when all ranks have
reported its end, and it has failed if it failed on any rank. If a result is dropped before the engine sees it, a later result
reports its tickets.
"""

from collections.abc import Sequence

from transom_worker.scheduling.step import StepResult


class LoadReports:
    """The loads that `num_ranks` ranks have reported."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_ended: dict[int, int] = {}  # ticket -> ranks that have reported its end
        self._load_s: dict[int, float] = {}  # ticket -> seconds of the slowest rank so far
        self._failed: set[int] = set()

    def add(self, loaded: Sequence[int], load_s: Sequence[float], failed: Sequence[int]) -> None:
        """Note one rank's report, with the fields of a `StepResult`."""
        for ticket in (*loaded, *failed):
            self._num_ended[ticket] = self._num_ended.get(ticket, 0) + 1
        for ticket, seconds in zip(loaded, load_s, strict=True):
            self._load_s[ticket] = max(seconds, self._load_s.get(ticket, 0.0))
        self._failed.update(failed)

    def deliver(self, result: StepResult) -> StepResult:
        """Return `result` with the tickets that all ranks have reported and no earlier result had. The loads of `result` itself
        were given to `add` before."""
        ended = [ticket for ticket, count in self._num_ended.items() if count == self._num_ranks]
        result.failed = [ticket for ticket in ended if ticket in self._failed]
        result.loaded = [ticket for ticket in ended if ticket not in self._failed]
        result.load_s = [self._load_s[ticket] for ticket in result.loaded]
        for ticket in ended:
            del self._num_ended[ticket]
            self._load_s.pop(ticket, None)
        self._failed.difference_update(ended)
        return result
