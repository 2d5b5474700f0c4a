"""`Retention`: which blocks of a KV cache group a sequence must keep after a number of tokens.

Terms:

    logical block  a block's index in its sequence: with blocks of 16 tokens, logical block 3 has tokens 48 to 63
    live tokens    the tokens that the next token's query reads in this group (`GroupSpec.live`)
    live blocks    the blocks that have live tokens; the sequence must keep them
    sink blocks    the first logical blocks of a group with attention sinks; they never slide out
    run            the consecutive logical blocks after the sink blocks; blocks are only ever freed at its front
    boundary b     the position after the first `b` blocks of a sequence
    compressor     makes an entry of every `ratio` tokens, from these tokens and those of the `overlap` entries before
    state          a snapshot of recurrent layers: one block, for any number of tokens

Example, a window of W = 33 tokens (the query included), blocks of 16:

    processed tokens    live tokens     first live block
    40                  [8, 40)         0
    47                  [15, 47)        0
    48                  [16, 48)        1: block 0 may be freed

Methods compute their results from `n`, without a table by boundary: a client may send a new window with each request, and for a
prompt of a million tokens each table would have 65,536 entries. Only `peak_blocks` has a table, for chunked attention and
compressors, whose sizes the model fixes.
"""

import math

from transom_core.kv_cache.groups import GroupSpec


class Retention:
    """One group's live blocks. Not thread-safe: the table of `peak_blocks` grows on use."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.num_sink_blocks = spec.num_sink_blocks
        self.keeps_everything = spec.keeps_everything
        # From `reach` processed tokens on, no live range is cut off at token 0. So the live blocks after `n + period` tokens are
        # those after `n` tokens, shifted, and no sequence holds more blocks than one of `reach + period` tokens.
        self.period = math.lcm(spec.block_size, spec.chunk or 1, spec.ratio or 1)
        reach = spec.sinks + spec.window + (1 + spec.overlap) * spec.ratio
        self._steady_blocks = -(-(reach + self.period) // spec.block_size) + 1
        self._is_window = spec.is_window
        self._peak = [1]  # boundary -> the most blocks that a sequence holds at once up to there; unused for windows

    def first_live_block(self, n: int) -> int:
        """Return the first logical block of the run that must stay after `n` processed tokens; at least `num_sink_blocks`."""
        return 0 if self.keeps_everything else self.spec.first_live_block(n)

    def next_change(self, n: int) -> int:
        """Return the smallest m > n at which more blocks may be freed than at `n`; at most the next boundary between blocks."""
        boundary = (n // self.block_size + 1) * self.block_size
        if self.keeps_everything:
            return boundary
        # In a window the first live token is m - W + 1, which enters a new block at m = W - 1, W - 1 + block_size and so on. In the
        # other groups it moves at each multiple of the chunk or ratio. So m is `remainder` modulo `stride`.
        stride = self.block_size if self._is_window else self.spec.chunk or self.spec.ratio
        remainder = self.spec.window - 1 if self._is_window else 0
        first = self.first_live_block(n)
        for change in range(n + 1 + (remainder - (n + 1)) % stride, boundary, stride):
            if self.first_live_block(change) > first:
                return change
        return boundary

    def largest_free_boundary(self, boundary: int) -> int:
        """Return the largest boundary, up to `boundary`, at which the sequence needs no block of the run.

        At boundary 0 it needs none. Example: with chunked attention, a sequence at the start of a chunk needs no block.
        """
        # only a window of one token reads no token before a boundary; the run begins after the sinks
        if self._is_window:
            return boundary if self.spec.window <= 1 else min(boundary, self.num_sink_blocks)
        if self.spec.overlap:  # each compressed entry reads tokens of the entry before
            return 0
        return boundary - boundary % (self.period // self.block_size)  # a chunk, or an entry, begins at this boundary

    def allocated_blocks(self, n: int, *, lag: int = 0) -> int:
        """Return how many blocks a sequence holds while token `n` is computed and the last `lag` tokens before it are still in
        flight. A state needs one block; the sequence keeps further snapshots only if there is room."""
        if self.spec.is_state:
            return 1
        last = n // self.block_size
        first = self.first_live_block(max(0, n - lag))
        # the sink blocks, as far as the sequence has them, and the run from its first live block to the block of token n
        return min(self.num_sink_blocks, last + 1) + max(0, last + 1 - max(first, self.num_sink_blocks))

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at once, if each step computes one token."""
        last = max(0, num_tokens - 1) // self.block_size
        if self.spec.is_state:  # the cached snapshot that it starts from, and the one that it updates
            return min(2, last + 1)
        if self.keeps_everything:
            return last + 1
        if self._is_window:  # a longer sequence never holds fewer blocks at a boundary
            return self.allocated_blocks(last * self.block_size)
        last = min(last, self._steady_blocks)
        for boundary in range(len(self._peak), last + 1):
            self._peak.append(max(self._peak[-1], self.allocated_blocks(boundary * self.block_size)))
        return self._peak[last]
