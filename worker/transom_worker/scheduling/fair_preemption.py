"""`FairPreemption`: chooses which sequence is preempted when clients share KV memory and running slots.

Terms (see also `clients`):

    running slot  up to `max_num_seqs` sequences run at once, each in a slot; one that awaits a prefix keeps a slot as well
    service       tokens that were computed for a client, divided by its weight
    head          the only running sequence of a client, or the first one in the queue of a client that has no running slot
    slice         a sequence's slice is over when it was admitted `SLICE_STEPS` steps ago and has computed as many new tokens since
                  then. Tokens that it had computed before a preemption are not new, so every slice makes progress
    claim         a waiting sequence takes the slot or the memory of another client's running sequence, which is preempted

With a single client, the last sequence in order is preempted if memory is short, and nothing is claimed. With several clients:

- If a running sequence lacks blocks, each client that runs at least two sequences is compared by the memory that it would still
  hold without its last one, divided by its weight. The last sequence of the client with the most is preempted: so a head is safe
  while another client runs two. Exception: a head whose slice is over and whose client holds more than twice as much as that other
  client is preempted, so that one large request does not get more than a client's share. If all are heads, the last one in order is
  preempted.
- A waiting head claims the last sequence of a client that runs several, at once.
- A waiting head claims another client's head if that one's slice is over and its client has had more service. So clients whose
  requests do not fit beside each other take turns, each for a slice at least.
- Any other waiting sequence claims only from a client that would still have more than its own client after that, for their weights,
  and only a sequence whose slice is over. So two clients do not preempt each other to and fro.

Example with 8 slots: A runs 8 sequences, and B sends 5. B's first one claims the last one of A at once. Three others follow, each
when its victim's slice is over, or when one of A's ends. Then both run 4.
"""

from collections.abc import Sequence as Sequences

from transom_worker.scheduling.clients import Client, Clients, num_computed
from transom_worker.scheduling.sequence import Sequence, SequenceStatus

SLICE_STEPS = 64
HEAD_FACTOR = 2  # a head may hold this many times as much memory as the client that would be preempted otherwise
RETRY_STEPS = 4  # steps after which a claim that has failed is tried again


class FairPreemption:
    """Chooses the sequence to preempt. `block_bytes[group]` is the size of a block; `num_steps` counts the planned steps.

    A choice takes time in proportion to the number of running sequences. It is made only if slots or memory are short; a failed
    claim is tried again only every `RETRY_STEPS` steps.
    """

    def __init__(self, clients: Clients, block_bytes: Sequences[int]) -> None:
        self._clients = clients
        self._block_bytes = tuple(block_bytes)
        self.num_steps = 0
        self._claimed_in_vain: tuple[Client, Sequence] | None = None  # the last claim of a slot, if it failed
        self._try_again_at = 0  # that claim is tried again from this step on

    def last(self) -> Sequence | None:
        """Return the sequence that is preempted if a running one lacks blocks; None if nothing runs."""
        running = [client for client in self._clients.with_slots if client.running]
        several = [client for client in running if len(client.running) > 1]
        loser = max(several, key=lambda client: (self._level(client), _last(client).order_key), default=None)
        # The exception: a head that holds more than `largest`.
        largest = 0.0 if loser is None else HEAD_FACTOR * self.held(loser)
        heads = [client for client in running if len(client.running) == 1 and self._slice_is_over(_last(client))]
        head = max(heads, key=self.held, default=None)
        if head is not None and self.held(head) > largest and len(running) > 1:
            return _last(head)
        if loser is not None:
            return _last(loser)
        return max((_last(client) for client in running), key=lambda sequence: sequence.order_key, default=None)

    def for_slot(self, client: Client) -> Sequence | None:
        """Return the sequence whose running slot this client's first waiting sequence claims; None if it has to wait."""
        if self._claimed_in_vain == (client, client.queue.first) and self.num_steps < self._try_again_at:
            return None
        victim = self._slot_of_other(client)
        self._claimed_in_vain = (client, client.queue.first) if victim is None else None
        self._try_again_at = self.num_steps + RETRY_STEPS
        return victim

    def _slot_of_other(self, client: Client) -> Sequence | None:
        """Return the victim of a claim of a slot, as `for_slot`, without the limit on how often it is tried."""
        others = [other for other in self._clients.with_slots if other is not client]
        if any(one.status is SequenceStatus.PREEMPTING for other in others for one in other.running):
            return None  # its slot becomes free when its step has answered
        several = [other for other in others if other.num_slots > 1]
        loser = max(several, key=lambda other: (other.num_slots - 1) / other.weight, default=None)
        if loser is not None:
            # A sequence that awaits a prefix loses no work.
            victim = loser.awaiting_prefix.last if loser.awaiting_prefix else _last(loser)
            if not client.num_slots or (
                client.level < (loser.num_slots - 1) / loser.weight and self._slice_is_over(victim)
            ):
                return victim
        return self._overdue_head(client, others)

    @property
    def may_try_blocks(self) -> bool:
        """Return whether claims of memory that have failed are tried again in this step."""
        return self.num_steps % RETRY_STEPS == 0

    def for_blocks(self, client: Client) -> Sequence | None:
        """Return the sequence whose memory this client's first waiting sequence claims; None if it has to wait."""
        others = [other for other in self._clients.with_slots if other is not client and other.running]
        several = [other for other in others if len(other.running) > 1]
        loser = max(several, key=self._level, default=None)
        if loser is not None and (
            not client.num_slots or (self.held(client) < self._level(loser) and self._slice_is_over(_last(loser)))
        ):
            return _last(loser)
        return self._overdue_head(client, others)

    def held(self, client: Client) -> float:
        """Return the bytes of KV blocks that a client's running sequences hold, divided by its weight."""
        return sum(map(self._held, client.running)) / client.weight

    def _level(self, client: Client) -> float:
        """Return the bytes that a client would still hold without its last running sequence, divided by its weight."""
        return self.held(client) - self._held(_last(client)) / client.weight

    def _held(self, sequence: Sequence) -> int:
        """Return the bytes of KV blocks that a sequence references on the device."""
        if sequence.blocks is None:
            return 0
        blocks = zip(sequence.blocks.tables, self._block_bytes, strict=True)
        return sum((len(table.sink_blocks) + len(table.run)) * size for table, size in blocks)

    def _overdue_head(self, client: Client, others: Sequences[Client]) -> Sequence | None:
        """Return the head that a waiting head claims: of the heads whose slice is over, that of the client with the most service.

        None if that client has not had more service than this one, or this one's first waiting sequence is not a head.
        """
        if client.num_slots:
            return None
        heads = [
            other for other in others if other.num_slots == 1 and other.running and self._slice_is_over(_last(other))
        ]
        most = max(heads, key=_service_now, default=None)
        return _last(most) if most is not None and _service_now(most) > client.service else None

    def _slice_is_over(self, sequence: Sequence) -> bool:
        """Return whether a sequence has run for a slice; True for one that awaits a prefix, which makes no progress itself."""
        if sequence.blocks is None:
            return True
        begin = max(sequence.num_found_at_admission, sequence.recompute_until)
        num_new = sequence.scheduled - begin
        return self.num_steps - sequence.admitted_step >= SLICE_STEPS and num_new >= SLICE_STEPS


def _last(client: Client) -> Sequence:
    return client.running.last


def _service_now(client: Client) -> float:
    """Return a client's service, including what its running sequences have computed since their admissions."""
    return client.service + sum(map(num_computed, client.running)) / client.weight
