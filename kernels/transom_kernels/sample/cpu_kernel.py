"""The CPU kernel `sample`: picks one token id for each row of logits, by the records of a `SampleTable`. `cpu.py` launches it.

A work item is a *piece* of a row's ids. A thread reads the piece once and writes a summary. The thread that finishes the last
piece of a row chooses the row's token from the summaries, and reads little more of the row:

    greedy row   a summary is the piece's largest logit. The first id that has the row's largest logit is then searched in its piece
    random row   the id with the largest score = scaled logit + Gumbel noise wins. A summary has three numbers of each block of 64
                 ids: the largest logit, the largest noise, and the logit of the id that has this noise (the *noisiest* id). The
                 first two bound the block's scores from above, and the best score of all noisiest ids bounds the winner's score
                 from below: blocks whose bound is lower are skipped. `gumbel_max.py` has an example

A *scaled* logit is divided by the temperature. Filters keep the ids whose scaled logits reach a *cut*:

    min-p   the cut lies below the largest scaled logit by log(1 / min_p)
    top-k   the cut is the k-th largest scaled logit. The k-th largest of the blocks' maxima bounds it from below: ids that reach
            the bound are listed, and the k-th largest among them is searched by halving the range of float32 bits
    top-p   the winner of all ids is the sample if the ids more likely than it have less than the share p of all mass; if not, the
            cut rises above the winner and the next winner is found. The *mass* of an id is exp(scaled logit - largest scaled logit)

Rows with adjustments (bias, bans, penalties, a grammar's mask) are copied piece by piece, and the copy is adjusted.

Pieces always begin at multiples of 8192 token ids, so a row's result does not depend on other rows or on the number of threads.

Legend: V ids (columns) of a row, B blocks of 64 ids, P pieces of 128 blocks.
"""

import math
from typing import Any

from transom_kernels.cpu.rows import kth_largest, next_float
from transom_kernels.cpu.simd import (
    atomic_add,
    exp,
    float32,
    keep_lanes,
    keep_part,
    lane_max,
    lane_sum,
    lanes_at_least,
    lanes_greater,
    load_f32,
    load_i64,
    load_part_f32,
    load_scalar_f32,
    load_scalar_f64,
    load_u8,
    lowest_bit,
    splat,
    store_f32,
    store_i64,
    store_i64_unchecked,
    store_part_f32,
    store_scalar_f32,
    store_scalar_f64,
    vector_max,
    vector_max_or_nan,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.sample.cpu import AREA_BYTES, AT, PIECE_BLOCKS
from transom_kernels.sample.cpu_noise import exponential, least_exponential, mixed, negative_log, store_noise
from transom_kernels.sample.reference import NOISE_BLOCK
from transom_kernels.sample.table import KEY_IS_FINAL, RECORD_BYTES, Word

BLOCK = NOISE_BLOCK
PIECE = BLOCK * PIECE_BLOCKS

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # `reference.GOLDEN` as an int64
INFINITE = math.inf
LOWEST = -INFINITE
# more than the rounding error of a score: a bound and a score take logarithms of differently rounded numbers
ROUNDING = 1e-9

# byte offsets of a record's words
_KEY, _POSITION, _TEMPERATURE = 8 * Word.KEY, 8 * Word.POSITION, 8 * Word.TEMPERATURE
_TOP_K, _TOP_P, _LOG_MIN_P, _IS_ADJUSTED = 8 * Word.TOP_K, 8 * Word.TOP_P, 8 * Word.LOG_MIN_P, 8 * Word.IS_ADJUSTED
_BIAS_IDS, _NUM_BIAS, _BIAS_VALUES = 8 * Word.BIAS_IDS, 8 * Word.NUM_BIAS, 8 * Word.BIAS_VALUES
_BANNED_IDS, _NUM_BANNED, _MIN_TOKENS = 8 * Word.BANNED_IDS, 8 * Word.NUM_BANNED, 8 * Word.MIN_TOKENS
_TOKEN_IDS, _NUM_TOKENS, _COUNTS = 8 * Word.TOKEN_IDS, 8 * Word.NUM_TOKENS, 8 * Word.OUTPUT_COUNTS
_REPETITION, _PRESENCE, _FREQUENCY = 8 * Word.REPETITION, 8 * Word.PRESENCE, 8 * Word.FREQUENCY

# A row's summaries are five arrays over all of its P pieces: noise (float64), offset of the noisiest id (int64), largest logit and
# noisiest logit (float32) of each block; then largest logit and mass (float64) of each piece. The arrays after the first begin at
# P times these bytes.
OFFSETS, MAXIMA, NOISIEST, OF_PIECES = (PIECE_BLOCKS * size for size in (8, 16, 20, 24))


@helper
def _lanes(row, column, end):
    """Load 16 logits from `column` on; those at `end` and after it become -inf."""
    if column + 16 <= end:
        return load_f32(row + 4 * column)
    return keep_part(load_part_f32(row + 4 * column, end - column), end - column, LOWEST)


# --- a piece


@helper
def _summarise(arguments, record, logits, area, piece, temperature, key):
    """Read a piece of a row and write its summary."""
    shift = argument(arguments, AT.first_id) & BLOCK - 1  # the first block begins before column 0 by this
    begin, end = max(0, piece * PIECE - shift), min(argument(arguments, AT.num_ids), (piece + 1) * PIECE - shift)
    of_piece = area + argument(arguments, AT.num_pieces) * OF_PIECES + 16 * piece
    if temperature == 0.0:
        store_scalar_f64(of_piece, _largest_or_nan(logits, begin, end))
        return
    largest = _summarise_blocks(arguments, logits, area, piece, temperature, key)
    store_scalar_f64(of_piece, largest)
    if load_scalar_f64(record + _TOP_P) < 1.0 and load_i64(record + _TOP_K) == 0:
        store_scalar_f64(of_piece + 8, _mass_of_range(logits, begin, end, temperature, largest))


@helper
def _largest_or_nan(logits, begin, end):
    """Return the largest number of [begin, end), or NaN if there is one. Four maxima at once keep the processor busy."""
    a = b = c = d = splat(LOWEST)
    column = begin
    while column + 64 <= end:
        a = vector_max_or_nan(a, load_f32(logits + 4 * column))
        b = vector_max_or_nan(b, load_f32(logits + 4 * column + 64))
        c = vector_max_or_nan(c, load_f32(logits + 4 * column + 128))
        d = vector_max_or_nan(d, load_f32(logits + 4 * column + 192))
        column += 64
    while column < end:
        a = vector_max_or_nan(a, _lanes(logits, column, end))
        column += 16
    a = vector_max_or_nan(vector_max_or_nan(a, b), vector_max_or_nan(c, d))
    return lane_max(a) if lanes_at_least(a, a) == 0xFFFF else float32(math.nan)


@helper
def _largest(logits, begin, end):
    """Return the largest number of [begin, end); NaN counts as -inf."""
    largest = splat(LOWEST)
    for column in range(begin, end, 16):
        largest = vector_max(largest, _lanes(logits, column, end))
    return lane_max(largest)


@helper
def _summarise_blocks(arguments, logits, area, piece, temperature, key):
    """Write the summaries of a piece's blocks; return the piece's largest scaled logit."""
    num_ids, first_id, pieces = (
        argument(arguments, AT.num_ids),
        argument(arguments, AT.first_id),
        argument(arguments, AT.num_pieces),
    )
    offsets, maxima, noisiest = area + pieces * OFFSETS, area + pieces * MAXIMA, area + pieces * NOISIEST
    first = piece * PIECE_BLOCKS
    for block in range(first, first + PIECE_BLOCKS, 8):
        store_noise(key, first_id // BLOCK + block, area + 8 * block, offsets + 8 * block)
    for block in range(first, first + PIECE_BLOCKS):
        begin = block * BLOCK - (first_id & BLOCK - 1)
        store_scalar_f32(maxima + 4 * block, _largest(logits, max(0, begin), min(num_ids, begin + BLOCK)))
        column = begin + load_i64(offsets + 8 * block)
        inside = column >= 0 and column < num_ids
        store_scalar_f32(noisiest + 4 * block, load_scalar_f32(logits + 4 * column) if inside else LOWEST)
    largest = splat(LOWEST)
    for at in range(4 * first, 4 * (first + PIECE_BLOCKS), 64):
        scaled = load_f32(maxima + at) / splat(temperature)
        largest = vector_max(largest, scaled)
        store_f32(maxima + at, scaled)
        store_f32(noisiest + at, load_f32(noisiest + at) / splat(temperature))
    return lane_max(largest)


@helper
def _mass_of_range(logits, begin, end, temperature, anchor):
    """Return the sum of exp(scaled logit - anchor): in float32 over each 64 ids, then in float64 over those sums."""
    anchor = anchor if anchor > LOWEST else float32(0.0)
    total = 0.0
    for first in range(begin, end, BLOCK):
        part = splat(0.0)
        for column in range(first, min(first + BLOCK, end), 16):
            part = part + exp(_lanes(logits, column, end) / splat(temperature) - splat(anchor))
        total += lane_sum(part)
    return total


@helper
def _copy_adjusted(arguments, row, record, source, target, piece):
    """Copy a piece of a row's logits, and apply grammar, bias, bans and penalties to the copy."""
    masks, num_ids = argument(arguments, AT.masks), argument(arguments, AT.num_ids)
    masks += row * ((num_ids + 7) >> 3) if masks else 0
    begin, end = piece * PIECE, min(num_ids, (piece + 1) * PIECE)
    for column in range(begin, end, 16):
        lanes = _lanes(source, column, end)
        if masks:
            allowed = load_u8(masks + (column >> 3))
            if column + 8 < num_ids:
                allowed |= load_u8(masks + (column >> 3) + 1) << 8
            lanes = keep_lanes(lanes, allowed, LOWEST)
        store_part_f32(target + 4 * column, lanes, min(16, end - column))
    if load_i64(record + _IS_ADJUSTED) == 0:
        return
    for index in range(load_i64(record + _NUM_BIAS)):
        token = load_i64(load_i64(record + _BIAS_IDS) + 8 * index)
        if begin <= token and token < end:
            bias = load_scalar_f32(load_i64(record + _BIAS_VALUES) + 4 * index)
            store_scalar_f32(target + 4 * token, load_scalar_f32(target + 4 * token) + bias)
    if load_i64(record + _POSITION) < load_i64(record + _MIN_TOKENS):
        for index in range(load_i64(record + _NUM_BANNED)):
            token = load_i64(load_i64(record + _BANNED_IDS) + 8 * index)
            if begin <= token and token < end:
                store_scalar_f32(target + 4 * token, LOWEST)
    _penalise(record, target, begin, end)


@helper
def _penalise(record, target, begin, end):
    """Apply repetition, presence and frequency penalties to the ids of [begin, end)."""
    factor = load_scalar_f32(record + _REPETITION)
    presence, frequency = load_scalar_f32(record + _PRESENCE), load_scalar_f32(record + _FREQUENCY)
    token_ids, counts = load_i64(record + _TOKEN_IDS), load_i64(record + _COUNTS)
    for index in range(load_i64(record + _NUM_TOKENS)):
        token = load_i64(token_ids + 8 * index)
        if begin <= token and token < end:
            logit = load_scalar_f32(target + 4 * token)
            logit = logit * factor if logit < 0.0 else logit / factor
            count = load_i64(counts + 8 * index)
            if count > 0:
                logit = logit - float32(presence + float32(frequency * float32(count)))
            store_scalar_f32(target + 4 * token, logit)


# --- a row


@helper
def _first_largest(arguments, logits, area):
    """Return the first column with the row's largest logit, and that logit; if the row has NaN, the first NaN."""
    of_pieces = area + argument(arguments, AT.num_pieces) * OF_PIECES
    piece, largest = 0, load_scalar_f64(of_pieces)
    for other in range(1, argument(arguments, AT.num_pieces)):
        value = load_scalar_f64(of_pieces + 16 * other)
        if largest == largest and (value > largest or value != value):
            piece, largest = other, value
    shift = argument(arguments, AT.first_id) & BLOCK - 1
    end = min(argument(arguments, AT.num_ids), (piece + 1) * PIECE - shift)
    wanted = splat(float32(largest))
    for column in range(max(0, piece * PIECE - shift), end, 16):
        lanes = _lanes(logits, column, end)
        found = lanes_at_least(lanes, wanted) if largest == largest else 0xFFFF - lanes_at_least(lanes, lanes)
        if found:
            return column + lowest_bit(found), largest
    return 0, largest


@helper
def _sample_random(arguments, listed, record, logits, area, temperature, key):
    """Return the column that wins among those that the filters keep, and its score; column -1 if all logits are -inf."""
    num_ids, pieces = argument(arguments, AT.num_ids), argument(arguments, AT.num_pieces)
    maxima, num_blocks = area + pieces * MAXIMA, pieces * PIECE_BLOCKS
    best = _largest(maxima, 0, num_blocks)
    # filters: the cut, and top-p's limit (an id is out if the ids above it have this mass or more)
    cut, limit, num_listed = LOWEST, INFINITE, 0
    log_min_p = load_scalar_f64(record + _LOG_MIN_P)
    if log_min_p > -INFINITE:
        cut = _least_float(best + log_min_p)
    top_k, top_p = load_i64(record + _TOP_K), load_scalar_f64(record + _TOP_P)
    if top_k > 0:
        floor = kth_largest(maxima, num_blocks, top_k, LOWEST, best)
        num_listed = _list_from(logits, num_ids, maxima, temperature, floor, listed)
        kth = kth_largest(listed, num_listed, top_k, floor, best)
        if top_p < 1.0:
            limit = top_p * _mass_of_list(listed, num_listed, kth, best, True)
        cut = max(cut, kth)
    elif top_p < 1.0:
        total, of_pieces = 0.0, area + pieces * OF_PIECES
        for piece in range(pieces):
            largest = load_scalar_f64(of_pieces + 16 * piece)
            if largest > -INFINITE:
                total += load_scalar_f64(of_pieces + 16 * piece + 8) * math.exp(largest - best)
        limit = top_p * total
    # find winners until one is inside top-p
    while True:
        column, score, value = _winner(arguments, logits, area, temperature, key, cut)
        if column < 0 or limit == INFINITE or value >= best:
            return column, score
        if num_listed:
            above = _mass_of_list(listed, num_listed, value, best, False)
        else:
            above = _mass_above(logits, num_ids, maxima, temperature, value, best)
        if above < limit:
            return column, score
        cut = next_float(value)


@helper
def _winner(arguments, logits, area, temperature, key, cut):
    """Return column, score and scaled logit of the best score among scaled logits >= `cut`; of equal scores the lowest column."""
    num_ids, first_id, pieces = (
        argument(arguments, AT.num_ids),
        argument(arguments, AT.first_id),
        argument(arguments, AT.num_pieces),
    )
    offsets, maxima, noisiest = area + pieces * OFFSETS, area + pieces * MAXIMA, area + pieces * NOISIEST
    shift, first_block = first_id & BLOCK - 1, first_id // BLOCK
    num_blocks = (num_ids + shift + BLOCK - 1) // BLOCK
    reached = -INFINITE  # a lower bound of the winner's score
    for block in range(num_blocks):
        value = load_scalar_f32(noisiest + 4 * block)
        if value >= cut and value > LOWEST:
            reached = max(reached, value + load_scalar_f64(area + 8 * block))
    best_column, best_score, best_value = -1, -INFINITE, LOWEST
    for block in range(num_blocks):
        largest, noise = load_scalar_f32(maxima + 4 * block), load_scalar_f64(area + 8 * block)
        if largest < cut or not largest > LOWEST or largest + noise < reached - ROUNDING:
            continue
        floor = max(cut, _safely_below(reached - noise))
        least = least_exponential(key, first_block + block)
        begin, end = block * BLOCK - shift, min(num_ids, (block + 1) * BLOCK - shift)
        for first in range(max(0, begin), end, 16):
            chosen = lanes_at_least(_lanes(logits, first, end) / splat(temperature), splat(floor))
            while chosen:
                column = first + lowest_bit(chosen)
                chosen &= chosen - 1
                value = float32(load_scalar_f32(logits + 4 * column) / temperature) if column < end else LOWEST
                if value > LOWEST:
                    own = noise
                    if column - begin != load_i64(offsets + 8 * block):
                        own = negative_log(least + exponential(key, first_id + column))
                    if value + own > best_score:
                        best_column, best_score, best_value = column, value + own, value
        reached = max(reached, best_score)
    return best_column, best_score, best_value


@helper
def _list_from(logits, num_ids, maxima, temperature, floor, listed):
    """List the scaled logits that are `floor` or more, padded with -inf to a multiple of 16; return how many there are."""
    count = 0
    for block in range((num_ids + BLOCK - 1) // BLOCK):
        largest = load_scalar_f32(maxima + 4 * block)
        if largest < floor or not largest > LOWEST:
            continue
        end = min(num_ids, (block + 1) * BLOCK)
        for first in range(block * BLOCK, end, 16):
            chosen = lanes_at_least(_lanes(logits, first, end) / splat(temperature), splat(floor))
            while chosen:
                column = first + lowest_bit(chosen)
                chosen &= chosen - 1
                value = float32(load_scalar_f32(logits + 4 * column) / temperature) if column < end else LOWEST
                if value > LOWEST:
                    store_scalar_f32(listed + 4 * count, value)
                    count += 1
    store_f32(listed + 4 * count, splat(LOWEST))
    return count


@helper
def _mass_above(logits, num_ids, maxima, temperature, bound, best):
    """Return the mass of the ids whose scaled logits are larger than `bound`."""
    total = 0.0
    for block in range((num_ids + BLOCK - 1) // BLOCK):
        if load_scalar_f32(maxima + 4 * block) > bound:
            part, end = splat(0.0), min(num_ids, (block + 1) * BLOCK)
            for column in range(block * BLOCK, end, 16):
                scaled = _lanes(logits, column, end) / splat(temperature)
                above = lanes_greater(scaled, splat(bound))
                part = part + keep_lanes(exp(scaled - splat(best)), above, float32(0.0))
            total += lane_sum(part)
    return total


@helper
def _mass_of_list(listed, count, bound, best, with_bound):
    """Return the mass of the listed scaled logits that are larger than `bound`, or equal to it if `with_bound`."""
    total = 0.0
    for at in range(0, 4 * count, 64):
        scaled, bounds = load_f32(listed + at), splat(bound)
        kept = lanes_at_least(scaled, bounds) if with_bound else lanes_greater(scaled, bounds)
        total += lane_sum(keep_lanes(exp(scaled - splat(best)), kept, float32(0.0)))
    return total


# --- floats


@helper
def _least_float(bound):
    """Return the least float32 that is not below `bound`, a float64."""
    rounded = float32(bound)
    return next_float(rounded) if rounded < bound else rounded


@helper
def _safely_below(x):
    """Return a float32 that is below x by more than rounding errors; x itself if it is infinite."""
    return float32(x - (1e-6 + 1e-6 * abs(x))) if abs(x) < INFINITE else float32(x)


def make_sample() -> Any:
    """Build the kernel. A work item is a piece of a row; scratch has room for V + 16 float32 numbers."""

    @each_item
    def sample(arguments, thread, item):
        pieces = argument(arguments, AT.num_pieces)
        row, piece = item // pieces, item % pieces
        record = argument(arguments, AT.table) + load_i64(argument(arguments, AT.numbers) + 8 * row) * RECORD_BYTES
        logits = row_address(arguments, AT.logits, row)
        if argument(arguments, AT.masks) != 0 or load_i64(record + _IS_ADJUSTED) != 0:
            copy = argument(arguments, AT.copies) + row * argument(arguments, AT.num_ids) * 4
            _copy_adjusted(arguments, row, record, logits, copy, piece)
            logits = copy
        area = argument(arguments, AT.area) + row * pieces * AREA_BYTES
        temperature = load_scalar_f32(record + _TEMPERATURE)
        key = load_i64(record + _KEY)
        if load_i64(record + _POSITION) != KEY_IS_FINAL:
            key = mixed((key ^ load_i64(record + _POSITION)) + GOLDEN)
        _summarise(arguments, record, logits, area, piece, temperature, key)
        if atomic_add(argument(arguments, AT.counters) + 8 * row, 1) < pieces - 1:
            return
        # this was the last piece of the row
        store_i64_unchecked(argument(arguments, AT.counters) + 8 * row, 0)
        if temperature == 0.0:
            column, score = _first_largest(arguments, logits, area)
        else:
            column, score = _sample_random(arguments, scratch(thread), record, logits, area, temperature, key)
        store_i64(argument(arguments, AT.out) + 8 * row, argument(arguments, AT.first_id) + max(0, column))
        if argument(arguments, AT.scores):
            store_scalar_f64(argument(arguments, AT.scores) + 8 * row, score)

    return sample
