"""`SequenceMoves`: moves sequences between the device and the host tier: it swaps preempted ones, and keeps track of loading ones.

Terms:

    swap out   copy a preempted sequence's blocks to the host tier, instead of computing them again later
    swap in    load them back
    load       copies from the host tier to the device; the ranks make them while steps run, and report the load's number, its
               *ticket*. A load that is sent again gets a new ticket, so a loading sequence is found by its blocks

A sequence whose load the ranks have not reported is LOADING: it holds its blocks on the device and computes nothing. If it is
preempted or ended meanwhile, its blocks are released when the load is reported, as with a step in flight.
"""

from collections.abc import Iterable

from transom_core.config import PreemptionMode
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.tiers.loads import Load
from transom_worker.scheduling.sequence import InQueue, Sequence, SequenceStatus
from transom_worker.scheduling.work_counts import WorkCounts


class SequenceMoves:
    """Swapped and loading sequences of one worker; `mode` says which preempted ones are swapped."""

    def __init__(self, cache: KvCache, work: WorkCounts, *, mode: PreemptionMode) -> None:
        self._cache = cache
        self._work = work
        self._mode = mode
        # id() of its blocks -> a sequence whose load the ranks have not reported
        self._loading: dict[int, Sequence] = {}

    # Loads

    @property
    def is_loading(self) -> bool:
        """Whether there is a load that the ranks have not reported yet."""
        return bool(self._loading)

    def begin_load(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """Note that an admitted sequence has become LOADING; the next plan brings its load to the ranks."""
        sequence.num_in_flight += 1
        self._loading[id(blocks)] = sequence

    def end_load(self, ticket: int) -> tuple[Sequence, Load] | None:
        """Note that the ranks have made a load; return its sequence and the load, None for an unknown ticket.

        The sequence is RUNNING from now on, unless it was preempted or has ended meanwhile.
        """
        load = self._cache.finish_load(ticket)
        if load is None:
            return None
        sequence = self._loading.pop(id(load.blocks))
        _stop_loading(sequence)
        return sequence, load

    def abandon_loads(self) -> list[Sequence]:
        """Forget all loads, since the ranks were restarted; return the sequences that were preempted or have ended meanwhile."""
        sequences = list(self._loading.values())
        self._loading.clear()
        self._cache.tiers.loads.abandon()
        for sequence in sequences:
            _stop_loading(sequence)
        return [sequence for sequence in sequences if sequence.status is not SequenceStatus.RUNNING]

    # Swaps

    def swap_out(self, sequence: Sequence, blocks: SequenceBlocks) -> bool:
        """Move a preempted sequence's blocks to the host tier, if that is better than computing it again and there is room.

        Return whether they moved.
        """
        if not (self._prefers_swap(sequence, blocks) and self._cache.swap_out(blocks)):
            return False
        self._work.swapped(blocks)
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Release the swapped blocks of a waiting sequence, if it has any; its tokens are computed again."""
        if isinstance(sequence.wait, InQueue) and sequence.wait.swapped is not None:
            self._cache.drop_swapped(sequence.wait.swapped)
            sequence.wait.swapped = sequence.history = sequence.prompt_logprobs = None
            sequence.hidden_sum = []

    def lose_swapped(self, sequences: Iterable[Sequence]) -> None:
        """Drop the swapped blocks of these sequences, so that they are computed again, because the host tier's contents are
        unknown."""
        for sequence in sequences:
            if sequence.swapped is not None:
                self._work.swap_lost(sequence, sequence.swapped)
                self.drop_swapped(sequence)

    def _prefers_swap(self, sequence: Sequence, blocks: SequenceBlocks) -> bool:
        """Return whether to swap a sequence, if there is room.

        With "auto" a sequence is swapped if copying its blocks twice, out and back, takes no longer than computing its tokens
        again. A sequence with private blocks is always swapped then: its KV policy chose them by sums of attention. If its tokens
        were computed again in other steps, these sums would be rounded differently, and the policy could choose other blocks.
        """
        rates = self._cache.changes.rates
        # A step that failed may have changed a recurrent state in place, which is then that of another position.
        if self._cache.state_group is not None and sequence.scheduled != blocks.processed:
            return False
        never_ran = not (sequence.num_tokens_on_ranks or blocks.was_swapped)
        if self._mode == "recompute" or rates is None or never_ran or not blocks.can_be_swapped:
            return False
        if self._mode == "swap" or blocks.is_private:
            return True
        num_live = [len(of_group) for of_group in blocks.live_blocks()]
        return 2 * rates.load_ns(num_live) <= blocks.processed * rates.token_ns


def _stop_loading(sequence: Sequence) -> None:
    """Note that a sequence's load is over; it runs from now on, unless it was preempted or has ended meanwhile."""
    sequence.num_in_flight -= 1
    if sequence.status is SequenceStatus.LOADING:
        sequence.move_to(SequenceStatus.RUNNING)
