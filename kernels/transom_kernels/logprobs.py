"""The operator `logprobs`: log-probabilities and ranks of each row's chosen token and of its most likely tokens.

The CPU kernel reads memory once for each row's logits. A work item is a *piece* of a row: 8192 ids. The thread that reads it writes
a summary: the largest logit of each block of 64 ids, the sum of exp(logit - largest logit of the piece), and how many logits are
larger than the chosen token's. The thread that finishes the last piece of a row adds the sums, and finds the likely tokens in the
blocks whose largest logit is large enough.

Legend: L rows, V vocabulary, K likely tokens, P pieces of a row.
"""

import math
from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import counters, empty, launch
from transom_kernels.cpu.simd import (
    atomic_add,
    count_bits,
    exp,
    float32,
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
    lowest_bit,
    splat,
    store_i64,
    store_i64_unchecked,
    store_scalar_f32,
    store_scalar_f64,
    vector_max,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address
from transom_kernels.launch import uses_cpu_kernels


class RowLogprobs(NamedTuple):
    """Column 0 is each row's chosen token; the others are its K most likely tokens, best first, equal logits by ascending id.

    A rank is one plus the number of tokens with a strictly larger logit.
    """

    ids: torch.Tensor  # [L, 1 + K] int64
    logprobs: torch.Tensor  # [L, 1 + K] float32, natural logarithms
    ranks: torch.Tensor  # [L, 1 + K] int64


def logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> RowLogprobs:
    """Return the log-probabilities of `chosen` [L] int64 and of the K = min(`num_top`, V) most likely tokens of `logits` [L, V].

    Raises:
        ValueError: shapes do not fit.
    """
    if logits.dim() != 2 or not logits.shape[1] or chosen.shape != (len(logits),):
        raise ValueError(
            f"logits {tuple(logits.shape)} and chosen {tuple(chosen.shape)}: give [rows, vocabulary], [rows]."
        )
    num_top = min(num_top, logits.shape[1])
    if uses_cpu_kernels(logits) and logits.dtype == torch.float32 and logits.stride(1) == 1:
        return RowLogprobs(*logprobs_cpu(logits, chosen, num_top))
    return RowLogprobs(*logprobs_reference(logits, chosen, num_top))


def logprobs_reference(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of `RowLogprobs`: the specification of `logprobs`, in torch."""
    logprobs = logits.to(torch.float32).log_softmax(-1)
    top = logits.topk(num_top, -1).indices.sort(-1).values  # ids ascending, so that the stable sort orders ties by id
    top = top.gather(1, logits.gather(1, top).sort(dim=-1, descending=True, stable=True).indices)
    top_logits, chosen_logits = logits.gather(1, top), logits.gather(1, chosen[:, None])
    num_above_top = (top_logits[:, None, :] > top_logits[:, :, None]).sum(-1)
    num_above_chosen = (logits > chosen_logits).sum(-1, keepdim=True)
    ids = torch.cat([chosen[:, None], top], 1)
    return ids, logprobs.gather(1, ids), torch.cat([num_above_chosen, num_above_top], 1) + 1


# --- the CPU kernel and its launch

BLOCK = 64  # ids of a block
PIECE_BLOCKS = 128  # blocks of a piece, which is a work item
PIECE = BLOCK * PIECE_BLOCKS
# A piece's summary: the maxima of its blocks (float32); then its largest logit, its sum (float64), and how many of its logits are
# larger than the chosen one (int64).
SUMS = 4 * PIECE_BLOCKS
AREA_BYTES = SUMS + 24
LOWEST = -math.inf


class LogprobsArguments(NamedTuple):
    """The argument words of the kernel `logprobs`."""

    logits: RowArguments  # [L, V] float32
    num_ids: int  # V
    chosen: torch.Tensor  # [L] int64
    num_top: int  # K
    ids: torch.Tensor  # [L, 1 + K] int64
    logprobs: torch.Tensor  # [L, 1 + K] float32
    ranks: torch.Tensor  # [L, 1 + K] int64
    area: torch.Tensor  # [L, P, AREA_BYTES] uint8: summaries of the pieces
    num_pieces: int  # P
    counters: torch.Tensor  # [L] int64 of zeros, which the kernel leaves at zero: finished pieces of each row


AT = numbers_of(LogprobsArguments)


def logprobs_cpu(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of `RowLogprobs`: ids, log-probabilities and ranks, each [L, 1 + K].

    Column 0 is the token `chosen` [L]; the others are the K = `num_top` most likely tokens of `logits` [L, V].
    """
    num_rows, num_ids = logits.shape
    num_pieces = -(-num_ids // PIECE)
    shape = (num_rows, 1 + num_top)
    ids, logprobs, ranks = empty(shape, torch.int64), empty(shape, torch.float32), empty(shape, torch.int64)
    launch(
        cpu_kernel("transom_kernels.logprobs", "make_logprobs"),
        num_rows * num_pieces,
        LogprobsArguments(
            logits=RowArguments.of(logits),
            num_ids=num_ids,
            chosen=chosen.contiguous(),
            num_top=num_top,
            ids=ids,
            logprobs=logprobs,
            ranks=ranks,
            area=empty((num_rows * num_pieces * AREA_BYTES,), torch.uint8),
            num_pieces=num_pieces,
            counters=counters(num_rows),
        ),
    )
    return ids, logprobs, ranks


@helper
def _lanes(row, column, end):
    """Load 16 logits from `column` on. Lanes that are NaN, or at `end` and after it, become -inf."""
    if column + 16 <= end:
        return vector_max(load_f32(row + 4 * column), splat(LOWEST))
    return vector_max(keep_part(load_part_f32(row + 4 * column, end - column), end - column, LOWEST), splat(LOWEST))


@helper
def _summarise(row, begin, end, chosen, area):
    """Read the logits [begin, end) of a row and write their summary to `area`."""
    largest, above, bound = splat(LOWEST), 0, splat(chosen)
    for first in range(begin, end, BLOCK):
        of_block = splat(LOWEST)
        for column in range(first, min(first + BLOCK, end), 16):
            lanes = _lanes(row, column, end)
            of_block = vector_max(of_block, lanes)
            above += count_bits(lanes_greater(lanes, bound))
        largest = vector_max(largest, of_block)
        store_scalar_f32(area + 4 * ((first - begin) // BLOCK), lane_max(of_block))
    anchor, total = lane_max(largest), 0.0
    store_scalar_f64(area + SUMS, anchor)
    if anchor > LOWEST:
        for first in range(begin, end, BLOCK):
            part = splat(0.0)
            for column in range(first, min(first + BLOCK, end), 16):
                part = part + exp(_lanes(row, column, end) - splat(anchor))
            total += lane_sum(part)
    store_scalar_f64(area + SUMS + 8, total)
    store_i64(area + SUMS + 16, above)


@helper
def _log_total(area, pieces):
    """Return the logarithm of a row's sum of exp(logit), and how many logits are larger than the chosen token's."""
    largest, total, above = LOWEST, 0.0, 0
    for piece in range(pieces):
        largest = max(largest, load_scalar_f64(area + piece * AREA_BYTES + SUMS))
        above += load_i64(area + piece * AREA_BYTES + SUMS + 16)
    for piece in range(pieces):
        of_piece = load_scalar_f64(area + piece * AREA_BYTES + SUMS)
        if of_piece > LOWEST:
            total += load_scalar_f64(area + piece * AREA_BYTES + SUMS + 8) * math.exp(of_piece - largest)
    return largest + math.log(total), above


@helper
def _list_top(row, num_ids, area, num_top, ids, logits):
    """List the `num_top` largest logits and their ids, largest first. Ids are tried in order, so that ties keep the lower id."""
    # A full list takes a logit above the bound, its last logit; until then any logit, since the bound is -inf.
    count, bound = 0, float32(LOWEST)
    for block in range((num_ids + BLOCK - 1) // BLOCK):
        if count == num_top:
            largest = load_scalar_f32(area + (block // PIECE_BLOCKS) * AREA_BYTES + 4 * (block % PIECE_BLOCKS))
            if not largest > bound:
                continue
        end = min(num_ids, (block + 1) * BLOCK)
        for first in range(block * BLOCK, end, 16):
            lanes = _lanes(row, first, end)
            found = lanes_greater(lanes, splat(bound)) if count == num_top else lanes_at_least(lanes, splat(bound))
            while found:
                column = first + lowest_bit(found)
                found &= found - 1
                logit = load_scalar_f32(row + 4 * column) if column < end else float32(LOWEST)
                logit = logit if logit == logit else float32(LOWEST)
                if column >= end or (count == num_top and not logit > bound):
                    continue
                place = min(count, num_top - 1)
                while place > 0 and logit > load_scalar_f32(logits + 4 * place - 4):
                    store_scalar_f32(logits + 4 * place, load_scalar_f32(logits + 4 * place - 4))
                    store_i64(ids + 8 * place, load_i64(ids + 8 * place - 8))
                    place -= 1
                store_scalar_f32(logits + 4 * place, logit)
                store_i64(ids + 8 * place, column)
                count = min(count + 1, num_top)
                if count == num_top:
                    bound = load_scalar_f32(logits + 4 * count - 4)


def make_logprobs() -> Any:
    """Build the kernel. A work item is a piece of a row."""

    @each_item
    def logprobs(arguments, thread, item):
        pieces, num_ids = argument(arguments, AT.num_pieces), argument(arguments, AT.num_ids)
        num_top = argument(arguments, AT.num_top)
        row, piece = item // pieces, item % pieces
        logits = row_address(arguments, AT.logits, row)
        area = argument(arguments, AT.area) + row * pieces * AREA_BYTES
        token = load_i64(argument(arguments, AT.chosen) + 8 * row)
        chosen = load_scalar_f32(logits + 4 * token)
        begin, end = piece * PIECE, min(num_ids, (piece + 1) * PIECE)
        _summarise(logits, begin, end, chosen, area + piece * AREA_BYTES)
        if atomic_add(argument(arguments, AT.counters) + 8 * row, 1) < pieces - 1:
            return
        # this was the last piece of the row
        store_i64_unchecked(argument(arguments, AT.counters) + 8 * row, 0)
        log_total, above = _log_total(area, pieces)
        first = row * (1 + num_top)
        ids, ranks = argument(arguments, AT.ids) + 8 * first, argument(arguments, AT.ranks) + 8 * first
        found = argument(arguments, AT.logprobs) + 4 * first
        store_i64(ids, token)
        store_scalar_f32(found, chosen)
        store_i64(ranks, above + 1)
        if num_top:
            _list_top(logits, num_ids, area, num_top, ids + 8, found + 4)
        before, rank = chosen, 1
        for place in range(1 + num_top):
            logit = load_scalar_f32(found + 4 * place)
            if place >= 1:
                # tokens with equal logits have the rank of the first of them
                rank = place if place == 1 or logit < before else rank
                store_i64(ranks + 8 * place, rank)
            before = logit
            store_scalar_f32(found + 4 * place, logit - log_total)

    return logprobs
