"""Finds steps in which every running sequence gets its next token and nothing else happens; skipping them speeds up replays.

Terms:

    quiet step   a step that the real scheduler would plan with one token for each running sequence, in which no block is
                 allocated, published or freed, no answer ends and no request arrives
    known answer a simulated request's output, whose token ids are known before they are sampled (`stub_executor`)

Hash blocks have 16 tokens, so about 14 of 16 decode steps of a lone sequence are quiet. Skipping them leaves every sequence, every
block and the virtual clock in the state that they would have after the steps.
"""

from __future__ import annotations

from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import Sequence, SequenceStatus


def num_quiet_steps(scheduler: Scheduler) -> int:
    """Return how many of the next steps are quiet, provided that no request arrives before them."""
    admission = scheduler.admission
    cache = scheduler.cache
    if not admission.running or admission.waiting.queue or admission.moves.is_loading or scheduler.steps_in_flight:
        return 0
    if (
        cache.copies.waiting
        or cache.tiers.imports.is_fetching
        or len(admission.running) > scheduler.config.max_num_batched_tokens
    ):
        return 0
    return max(0, min(map(_num_quiet_tokens, admission.running)))


def _num_quiet_tokens(sequence: Sequence) -> int:
    """Return how many tokens a running sequence can get one by one before anything else happens to it."""
    blocks = sequence.blocks
    if sequence.status is not SequenceStatus.RUNNING or sequence.num_ready != 1 or sequence.num_pending:
        return 0
    if blocks is None or blocks.tables_changed or sequence.history is not None or not sequence.has_output:
        return 0
    done = sequence.scheduled
    before_end = sequence.max_tokens_total - len(sequence.token_ids) - 1  # the last token ends the request
    return min(blocks.capacity_tokens - done, blocks.next_event_at - 1 - done, before_end)
