"""`GrammarMasks`: computes the tokens that may come next in each of many answers, as rows of bits.

Legend: S rows of a step that sample a token, V vocabulary. A *plan* is what the engine has a step compute.
"""

import os
import time
from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from transom_core.grammar.matcher import GrammarMatcher

MAX_THREADS = 8
LEAST_ROWS = 16  # rows that are allocated first; the number then doubles
INLINE_S = 0.001  # a step whose masks take less CPU time than this has them computed on the calling thread
MEASURED_PERIOD = 16  # one call in 16 runs on the calling thread in any case, to measure the CPU time of a mask
NEWEST_SHARE = 0.3  # the weight of the newest measurement in the estimate, which is an exponential average


class GrammarMasks:
    """Keeps a row for each matcher, and computes the rows of many matchers at once, without the GIL.

    A mask mostly takes a few microseconds, so all masks of a step take less time than waking up another thread on a busy machine.
    Several threads compute them only if they are expected to take longer than INLINE_S.

    A matcher's row is computed after each token, and read by every plan that samples the next token: a plan that is made again
    after a preemption needs no new mask. `seconds` is the time that computing took; `num_computed` counts the rows.
    """

    def __init__(self, vocab_size: int, *, num_threads: int | None = None) -> None:
        """`num_threads` is the number of threads; None: the number that this process may use, up to MAX_THREADS."""
        self._vocab_size = vocab_size
        self._num_bytes = -(-vocab_size // 8)  # bytes of a row in a plan
        self._num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._executor: LLExecutor | None = None
        self._bits = np.zeros((0, -(-vocab_size // 32)), dtype=np.int32)  # [rows, ceil(V / 32)]
        self._rows: dict[GrammarMatcher, int] = {}
        self._free: list[int] = []
        self._mask_s = 0.0  # recent average CPU time of one mask
        self._num_calls = 0
        self.seconds = 0.0
        self.num_computed = 0

    def __len__(self) -> int:
        return len(self._rows)

    def compute(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Compute the rows of these matchers, none of which may be complete. If a row is too costly, its matcher fails."""
        if not matchers:
            return
        begin_s = time.perf_counter()
        rows = [(matcher.library_matcher, self._row(matcher)) for matcher in matchers]
        self._num_calls += 1
        is_measured = self._num_calls % MEASURED_PERIOD == 0
        if self._num_threads == 1 or is_measured or len(rows) * self._mask_s <= INLINE_S:
            self._compute_here(rows)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._num_threads)
            fill_next_token_bitmask_par(self._executor, rows, self._bits)
        self.seconds += time.perf_counter() - begin_s
        self.num_computed += len(rows)

    def _compute_here(self, rows: Sequence[tuple[LLMatcher, int]]) -> None:
        """Compute rows on this thread, and update the average time of a mask."""
        begin_s = time.thread_time()
        for library_matcher, row in rows:
            fill_next_token_bitmask(library_matcher, self._bits, row)
        mask_s = (time.thread_time() - begin_s) / len(rows)
        self._mask_s += NEWEST_SHARE * (mask_s - self._mask_s)

    def forbid(self, matcher: GrammarMatcher, token_ids: Collection[int]) -> bool:
        """Remove tokens from a matcher's row. Return False if no token is left."""
        bits = self._bytes(matcher)
        for token_id in token_ids:
            bits[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
        return self.has_tokens(matcher)

    def has_tokens(self, matcher: GrammarMatcher) -> bool:
        """Return whether a matcher's row allows a token that has a logit."""
        bits = self._bytes(matcher)
        last_bits = self._vocab_size % 8
        if last_bits and bits[-1] & ((1 << last_bits) - 1):
            return True
        return bool(bits[: len(bits) - bool(last_bits)].any())

    def plan_mask(self, rows: Sequence[tuple[int, GrammarMatcher]], num_rows: int) -> bytes:
        """Return the mask of a plan, `num_rows` rows of ceil(V / 8) bytes; all tokens are allowed in rows without a matcher."""
        mask = np.full((num_rows, self._num_bytes), 0xFF, dtype=np.uint8)  # [S, ceil(V / 8)]
        for row, matcher in rows:
            mask[row] = self._bytes(matcher)
        return mask.tobytes()

    def remove(self, matcher: GrammarMatcher) -> None:
        """Free a matcher's row, if it has one."""
        row = self._rows.pop(matcher, None)
        if row is not None:
            self._free.append(row)

    def _bytes(self, matcher: GrammarMatcher) -> NDArray[np.uint8]:
        """Return a matcher's row, [ceil(V / 8)]. Its last byte may have bits beyond the vocabulary, which mean nothing."""
        row: NDArray[np.uint8] = self._bits[self._rows[matcher]].view(np.uint8)[: self._num_bytes]
        return row

    def _row(self, matcher: GrammarMatcher) -> int:
        row = self._rows.get(matcher)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[matcher] = self._free.pop()
        return row

    def _grow(self) -> None:
        num_rows = len(self._bits)
        more = max(LEAST_ROWS, num_rows)
        self._bits = np.concatenate([self._bits, np.zeros((more, self._bits.shape[1]), dtype=np.int32)])
        self._free += range(num_rows + more - 1, num_rows - 1, -1)
