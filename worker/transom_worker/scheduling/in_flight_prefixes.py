"""`InFlightPrefixes`: lets a sequence wait for a prefix that a running sequence computes now, or that a load brings from the host
tier, instead of computing or loading it a second time.

Terms:

    hash block       `--block-size` tokens; its *digest* names it and all tokens before it. A prompt's *chain* is its digests
    publish          put a computed hash block into the prefix cache, when the step that computed its last token has answered
    hit              the cached prefix of a sequence's tokens
    order            sequences are served in the order of their keys: by arrival or priority
    load             copies of a sequence's blocks from the host tier to the device, which the ranks make at the moment
    producer         a running sequence that will publish hash blocks which are not in the prefix cache yet, or a load
    waiter           a waiting sequence that needs those hash blocks; it holds no KV blocks, but counts as using a running slot
    reserved tokens  tokens that a waiter will compute itself; when it is back in the queue, running sequences that stand after it
                     in order leave it that many tokens of a step

Example with hash blocks of 16 tokens. Sequence P computes a prompt of 640 tokens (40 hash blocks), 128 tokens a step. Sequence W
arrives after it, and the first 400 tokens (25 hash blocks) of its prompt of 450 tokens are those of P's:

    P   |##########|..............|......................|    # published   . in flight or still to compute
    W   |==========|==============|++++|                      = shared with P   + W's own tokens
        0         10             25    29      40  hash blocks

W becomes a waiter of P for 25 hash blocks, not for all 40 of P's. When the step that fills P's 25th hash block has answered,
the hash blocks are published; W returns to the queue, hits 400 tokens and computes the other 50. W's reserved tokens are those 50,
rounded up to whole hash blocks: 29 - 25 = 4 hash blocks, 64 tokens.

The rule: a sequence waits only for a producer that stands before it in order, and that has been scheduled at least as far as
the sequence's own hit reaches. Such a producer is served first in each step, so the sequence itself would publish these hash
blocks later than the producer.

A load goes on even if its sequence is preempted; if the sequence ends, the load goes on as long as others wait for it. The ranks
make one load after the other, so a second load of the same blocks would end later. Therefore a sequence may wait for any other
sequence's load, whatever their order, until the ranks have reported it. If the load brings all blocks that the sequence would load
itself, waiting costs no time. If it brings many of them, the sequence begins to load the rest a step or two later than it could.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from transom_core.kv_cache.prefix_search import PrefixHit
from transom_worker.kvcache.tiers.loads import Load
from transom_worker.scheduling.clients import WaitingSequences
from transom_worker.scheduling.sequence import AwaitsPrefix, InQueue, Sequence

# Waiting costs a sequence a step or two. Computing this many tokens takes about as long as a GPU takes to read a model's weights.
MIN_SHARED_TOKENS = 128
MAX_AWAITS_OTHERS = 32  # steps for which a sequence may await producers of other clients, in all


@dataclass(slots=True)
class UnpublishedRange:
    """The hash blocks `[begin, end)` of a running sequence's prompt that it has not published yet."""

    begin: int
    end: int


class InFlightPrefixes:
    """Knows which running sequence produces which hash block, and which sequences wait for it.

        register(p)                       p was admitted: it will publish hash blocks
        producer_for(w, hit)              should w wait, and for which producer?
        wait_for(w, p, num_hash_blocks)   w leaves the queue
        published(p)                      p has published hash blocks: waiters that need no more of it return to the queue
        stopped_running(p), ended(load)   all waiters of a producer or load return to the queue

    If two running sequences compute the same hash block, the first to be admitted is its producer. The other one replaces it if it
    has been scheduled further or comes first in order, since waiting for it takes less time.
    """

    def __init__(self, block_size: int, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self.min_shared_tokens = MIN_SHARED_TOKENS
        self.producer_by_digest: dict[bytes, Sequence] = {}
        self.ranges: dict[Sequence, UnpublishedRange] = {}  # by running producer
        self.waiters_of: dict[Sequence | Load, list[Sequence]] = {}  # producer -> those that wait for it
        # Sequences that have awaited another client's producer, in the order of the steps until which they may.
        self._awaiting_others: deque[Sequence] = deque()
        self._block_size = block_size

    def register(self, sequence: Sequence) -> None:
        """Make an admitted sequence the producer of the hash blocks that it is going to publish."""
        blocks, chain, producer_by_digest = sequence.blocks, sequence.chain, self.producer_by_digest
        assert blocks is not None
        unpublished = UnpublishedRange(blocks.first_hash_block_to_publish, len(chain))
        if unpublished.begin >= unpublished.end:
            return
        self.ranges[sequence] = unpublished
        for digest in chain[unpublished.begin : unpublished.end]:
            other = producer_by_digest.setdefault(digest, sequence)
            if other is not sequence and (other.scheduled < sequence.scheduled or sequence.order_key < other.order_key):
                producer_by_digest[digest] = sequence

    def producer_for(self, sequence: Sequence, hit: PrefixHit) -> tuple[Sequence, int] | None:
        """Return the producer that a sequence with this hit should wait for, and how many leading hash blocks the two share.

        None: no running sequence computes what this one lacks, or waiting would save computing fewer than `min_shared_tokens`
        tokens.
        """
        block_size, chain = self._block_size, sequence.chain
        min_blocks = -(-(hit.start + self.min_shared_tokens) // block_size)
        # The hash block after the hit is the next to compute. If the hit needs a window repair (computing the tokens of a sliding
        # window again), another sequence may be repairing the same windows: it is the producer of the hit's last hash block.
        lacking = (
            (hit.num_hash_blocks, hit.num_hash_blocks - 1) if hit.needs_repair(block_size) else (hit.num_hash_blocks,)
        )
        for index in lacking:
            if max(index + 1, min_blocks) > hit.limit:
                continue
            producer = self.producer_by_digest.get(chain[index])
            if producer is None or producer.order_key > sequence.order_key or producer.scheduled < hit.start:
                continue
            num_shared = _num_shared(chain, producer.chain, index + 1, min(hit.limit, self.ranges[producer].end))
            if num_shared >= min_blocks:
                return producer, num_shared
        return None

    def is_worth_waiting(self, sequence: Sequence, hit: PrefixHit, num_blocks: list[int]) -> bool:
        """Return whether a sequence with this hit should wait for a load that brings `num_blocks[group]` of its blocks.

        It should if these are all the blocks that it would load itself, or at least `min_shared_tokens` tokens of one group.
        """
        return tuple(num_blocks) == hit.num_loaded or any(
            count * retention.block_size >= self.min_shared_tokens
            for count, retention in zip(num_blocks, sequence.retentions, strict=True)
        )

    def wait_for(self, sequence: Sequence, producer: Sequence | Load, num_hash_blocks: int) -> None:
        """Let a sequence wait until the producer has published the first `num_hash_blocks` hash blocks of the sequence's prompt.

        If the producer is a load, the sequence waits until its end; `num_hash_blocks` is the length of the sequence's hit then.
        """
        self.waiters_of.setdefault(producer, []).append(sequence)
        # Rounded up to whole blocks, since a step's budget also counts the blocks of sliding windows.
        num_known_blocks = -(-len(sequence.token_ids) // self._block_size)
        reserved = (num_known_blocks - num_hash_blocks) * self._block_size
        wait = AwaitsPrefix(producer=producer, num_hash_blocks=num_hash_blocks, reserved_tokens=reserved)
        self._waiting.put(sequence, wait)

    def published(self, sequence: Sequence) -> None:
        """Note that a running sequence has published hash blocks; waiters that need no others of it return to the queue."""
        unpublished = self.ranges.get(sequence)
        if unpublished is None:
            return
        assert sequence.blocks is not None
        num_published = sequence.blocks.processed // self._block_size
        self._remove_below(sequence, unpublished, num_published)
        for waiter in list(self.waiters_of.get(sequence, ())):
            if isinstance(waiter.wait, AwaitsPrefix) and waiter.wait.num_hash_blocks <= num_published:
                self.stop_waiting(waiter)
        if unpublished.begin >= unpublished.end:
            del self.ranges[sequence]

    def stopped_running(self, sequence: Sequence) -> None:
        """Note that a sequence does not run any more, so it produces nothing; its waiters return to the queue."""
        unpublished = self.ranges.pop(sequence, None)
        if unpublished is not None:
            self._remove_below(sequence, unpublished, unpublished.end)
            self.ended(sequence)

    def ended(self, producer: Sequence | Load) -> None:
        """Note that a load or a running producer has ended; its waiters return to the queue."""
        for waiter in list(self.waiters_of.get(producer, ())):
            self.stop_waiting(waiter)

    def may_await(self, sequence: Sequence, producer: Sequence, *, step: int) -> bool:
        """Return whether a sequence may await this producer now.

        It may await producers of other clients only until `MAX_AWAITS_OTHERS` steps after the first such wait, since the speed of
        another client's producer depends on what else that client sends.
        """
        if producer.request.client == sequence.request.client:
            return True
        if sequence.awaits_others_until is None:
            sequence.awaits_others_until = step + MAX_AWAITS_OTHERS
            self._awaiting_others.append(sequence)
        return step <= sequence.awaits_others_until

    def end_long_waits(self, step: int) -> None:
        """Let sequences return to the queue that have awaited other clients' prefixes for `MAX_AWAITS_OTHERS` steps."""
        while self._awaiting_others and (self._awaiting_others[0].awaits_others_until or 0) < step:
            sequence = self._awaiting_others.popleft()
            producer = sequence.wait.producer if isinstance(sequence.wait, AwaitsPrefix) else None
            if isinstance(producer, Sequence) and producer.request.client != sequence.request.client:
                self.stop_waiting(sequence)

    def forget_waiter(self, sequence: Sequence) -> None:
        """Remove a sequence from its producer's waiters, if it is a waiter; the caller changes its `wait`."""
        if isinstance(sequence.wait, AwaitsPrefix):
            waiters = self.waiters_of[sequence.wait.producer]
            waiters.remove(sequence)
            if not waiters:
                del self.waiters_of[sequence.wait.producer]

    def stop_waiting(self, waiter: Sequence) -> None:
        """Let a waiter return to the queue; it keeps its reserved tokens there, until it is admitted."""
        reserved_tokens = waiter.reserved_tokens
        self.forget_waiter(waiter)
        self._waiting.put(waiter, InQueue(reserved_tokens=reserved_tokens))

    def _remove_below(self, producer: Sequence, unpublished: UnpublishedRange, end: int) -> None:
        """Remove the hash blocks before `end` from a producer's unpublished range."""
        for digest in producer.chain[unpublished.begin : end]:
            if self.producer_by_digest.get(digest) is producer:
                del self.producer_by_digest[digest]
        unpublished.begin = max(unpublished.begin, end)


def _num_shared(chain: list[bytes], other: list[bytes], low: int, high: int) -> int:
    """Return how many leading hash blocks two chains share: at least `low`, as the caller knows, and at most `high`."""
    return bisect_left(range(high), True, lo=low, key=lambda index: chain[index] != other[index])
