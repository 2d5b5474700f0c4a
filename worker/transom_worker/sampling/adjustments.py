"""What changes logits before temperature: applies logit bias, banned tokens and a grammar's bit mask, and gathers penalties.

- banned token: one that would end the sequence before `min_tokens`. Its logit becomes -inf.
- grammar mask: bits packed into bytes, ceil(V / 8) for each row, lowest bit first; bit 0 means that the token is not allowed.

Legend: S rows that are sampled, R some of these rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.token_table import RowPairs, TokenPairs, TokenTable
from transom_worker.uploads import Uploads


class Adjustments:
    """Keeps on the device which logits the sequences change."""

    def __init__(self) -> None:
        self._table = TokenTable()

    def remove(self, state: SequenceState) -> None:
        """Forget a sequence."""
        for pairs in state.all_pairs:
            self._table.remove(pairs)

    def apply_bias_and_bans(
        self, logits_SV: torch.Tensor, states: Sequence[SequenceState], held: HeldRows, uploads: Uploads
    ) -> None:
        """Change `logits_SV` in place, row s as `states[s]` and its grammar ask, by everything but penalties.

        Penalties may come afterwards: a logit of -inf stays -inf.
        """
        vocab_size = logits_SV.shape[1]
        bias = self._gather([state.bias_pairs(vocab_size) for state in states], uploads)
        if bias is not None:
            logits_SV[bias.row, bias.token] += bias.value.to(logits_SV.dtype)
        bans = self._gather([state.banned_pairs(vocab_size) for state in states], uploads)
        if bans is not None:
            logits_SV[bans.row, bans.token] = -torch.inf
        if held.rows:
            held.apply(logits_SV, uploads)

    def penalties(self, states: Sequence[SequenceState], uploads: Uploads) -> RowPairs | None:
        """Return what penalties change in these rows; None where they change nothing.

        The number of a row is its repetition penalty, that of a token what is subtracted from its logit.
        """
        return self._gather([state.counts for state in states], uploads, [s.params.repetition_penalty for s in states])

    def _gather(
        self, pairs: Sequence[TokenPairs | None], uploads: Uploads, row_values: Sequence[float] | None = None
    ) -> RowPairs | None:
        rows = [row for row, one in enumerate(pairs) if one is not None]
        if not rows:
            return None
        values = [0.0] * len(rows) if row_values is None else [row_values[row] for row in rows]
        return self._table.gather(rows, [one for one in pairs if one is not None], values, uploads)


class HeldRows:
    """The rows of a step whose grammar does not allow every token; all ones stand for a row without a grammar."""

    def __init__(self, grammar_mask: bytes | None, num_rows: int) -> None:
        """`grammar_mask` is the mask of all rows, as in `StepPlan`."""
        self._mask = grammar_mask
        self._bits = np.frombuffer(grammar_mask or b"", dtype=np.uint8).reshape(num_rows, -1)
        self.rows: list[int] = np.flatnonzero((self._bits != 0xFF).any(axis=1)).tolist()

    def mask(self, rows: Sequence[int]) -> bytes | None:
        """Return the mask of some rows; None where no row has one."""
        return None if set(self.rows).isdisjoint(rows) else self._bits[list(rows)].tobytes()

    def apply(self, logits_SV: torch.Tensor, uploads: Uploads) -> None:
        """Change the logits of tokens that are not allowed to -inf, in place. Raises ValueError: the mask has another length."""
        check_mask(self._mask or b"", logits_SV)
        # The bits are unpacked on the device: an eighth of the bytes to copy.
        on = uploads.tensors({"rows": np.array(self.rows), "bits": self._bits[self.rows]})
        places = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
        allowed_RV = ((on["bits"][:, :, None] >> places) & 1).flatten(1)[:, : logits_SV.shape[1]].bool()
        if len(self.rows) == len(logits_SV):
            logits_SV.masked_fill_(~allowed_RV, -torch.inf)
        else:
            logits_RV = logits_SV.index_select(0, on["rows"])
            logits_SV.index_copy_(0, on["rows"], logits_RV.masked_fill_(~allowed_RV, -torch.inf))


def check_mask(grammar_mask: bytes, logits_SV: torch.Tensor) -> None:
    """Check that a grammar's mask of these rows has the right length.

    Raises:
        ValueError: it has another one.
    """
    num_rows, vocab_size = logits_SV.shape
    if len(grammar_mask) != num_rows * -(-vocab_size // 8):
        raise ValueError(f"The grammar mask has {len(grammar_mask)} bytes for {num_rows} rows of {vocab_size} tokens.")


@contextmanager
def changeable(logits_SV: torch.Tensor, rows: Sequence[int], uploads: Uploads) -> Iterator[torch.Tensor]:
    """Within this context these rows of the logits may be changed in place; afterwards the caller's logits are as before.

    Only these rows are copied: a few rows with a grammar must not cost a copy of everything.
    """
    if len(rows) == len(logits_SV):
        yield logits_SV.clone()
        return
    rows_R = uploads.tensors({"rows": np.array(rows, dtype=np.int64)})["rows"]
    kept_RV = logits_SV.index_select(0, rows_R)
    yield logits_SV
    logits_SV.index_copy_(0, rows_R, kept_RV)
