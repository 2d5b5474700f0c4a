"""Splits the few new tokens of a short prompt, or of what a cached prefix leaves of one, into batch rows of one token each.

    sequence   new tokens               rows
    a          position 40              40
    b          positions 16 to 18       16 | 17 | 18    three rows with the block tables of b

Such a step is a decode step with more rows, so a recorded program can run it: layers write the keys and values of all rows before
any row reads them. Each row reads its keys by itself, so that only few tokens over few keys are worth splitting (`is_short`).

A step in which a sequence has a KV policy is not split. Its short prompts get the same bits, since attention computes them row by
row, too: what a sequence's tokens get does not depend on the other sequences of the step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from transom_kernels.paged_attention.cpu.layout import is_short
from transom_worker.scheduling.step import StepPlan

T = TypeVar("T")


def split_rows(plan: StepPlan) -> StepPlan:
    """Return a plan whose short rows are split. It is for the inputs of the forward pass alone: the order of tokens and of logits
    is the plan's, the other fields are not split."""
    if plan.row_window or not any(_is_split(*row) for row in zip(plan.start, plan.count, strict=True)):
        return plan
    starts, counts, logits_from, rows = [], [], [], []
    columns = zip(plan.start, plan.count, plan.logits_from, strict=True)
    for row, (start, count, first_logits) in enumerate(columns):
        if not _is_split(start, count):
            starts.append(start)
            counts.append(count)
            logits_from.append(first_logits)
            rows.append(row)
            continue
        positions = range(start, start + count)
        starts += positions
        counts += [1] * count
        logits_from += [max(position, min(first_logits, position + 1)) for position in positions]
        rows += [row] * count
    return replace(
        plan,
        seq_ids=_of_rows(plan.seq_ids, rows),
        start=starts,
        count=counts,
        logits_from=logits_from,
        write_from=[_of_rows(group, rows) for group in plan.write_from],
        attend_from=[_of_rows(group, rows) for group in plan.attend_from],
    )


def _is_split(start: int, count: int) -> bool:
    return count > 1 and is_short(start, count)


def _of_rows(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[row] for row in rows]
