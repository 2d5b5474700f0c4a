"""Changes logits before temperature is applied: by logit bias, banned tokens and a grammar's bit mask; also gathers penalties.

- banned token: a token that would end the sequence before `min_tokens`. Its logit becomes -inf.
- grammar mask: bits packed into bytes, ceil(V / 8) for each row, lowest bit first; a bit of 0 forbids the token. A row is *held*
  if its mask forbids any token.

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
    """Keeps, on the device, the changes that sequences make to their logits."""

    def __init__(self) -> None:
        self._table = TokenTable()

    def remove(self, state: SequenceState) -> None:
        """Forget a sequence."""
        for pairs in state.all_pairs:
            self._table.remove(pairs)

    def apply_bias_and_bans(
        self, logits_SV: torch.Tensor, states: Sequence[SequenceState], held: HeldRows, uploads: Uploads
    ) -> None:
        """Apply bias, bans and grammars to `logits_SV` in place; row s belongs to `states[s]`.

        Penalties are not applied here. They may come later, because a logit of -inf stays -inf.
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
        """Return the penalised tokens of these rows; None if there are none.

        A row's number (`row_value`) is its repetition penalty. A token's number (`value`) is subtracted from its logit.
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
    """The rows of a step in which a grammar forbids some tokens."""

    def __init__(self, grammar_mask: bytes | None, num_rows: int) -> None:
        """`grammar_mask` is the mask of all rows, as in `StepPlan`; a row without a grammar has only ones."""
        self._mask = grammar_mask
        self._bits = np.frombuffer(grammar_mask or b"", dtype=np.uint8).reshape(num_rows, -1)
        self.rows: list[int] = np.flatnonzero((self._bits != 0xFF).any(axis=1)).tolist()

    def mask(self, rows: Sequence[int]) -> bytes | None:
        """Return the mask of these rows; None if no grammar forbids a token in any of them."""
        return None if set(self.rows).isdisjoint(rows) else self._bits[list(rows)].tobytes()

    def apply(self, logits_SV: torch.Tensor, uploads: Uploads) -> None:
        """Change the logits of forbidden tokens to -inf, in place. Raises ValueError if the mask has the wrong length."""
        check_mask(self._mask or b"", logits_SV)
        # The device unpacks the bits, so that only an eighth of the bytes is copied to it.
        on = uploads.tensors({"rows": np.array(self.rows), "bits": self._bits[self.rows]})
        shifts = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
        allowed_RV = ((on["bits"][:, :, None] >> shifts) & 1).flatten(1)[:, : logits_SV.shape[1]].bool()
        if len(self.rows) == len(logits_SV):
            logits_SV.masked_fill_(~allowed_RV, -torch.inf)
        else:
            logits_RV = logits_SV.index_select(0, on["rows"])
            logits_SV.index_copy_(0, on["rows"], logits_RV.masked_fill_(~allowed_RV, -torch.inf))


def check_mask(grammar_mask: bytes, logits_SV: torch.Tensor) -> None:
    """Check that a grammar's mask of these rows has the right length.

    Raises:
        ValueError: it has another length.
    """
    num_rows, vocab_size = logits_SV.shape
    if len(grammar_mask) != num_rows * -(-vocab_size // 8):
        raise ValueError(f"The grammar mask has {len(grammar_mask)} bytes for {num_rows} rows of {vocab_size} tokens.")


@contextmanager
def changeable(logits_SV: torch.Tensor, rows: Sequence[int], uploads: Uploads) -> Iterator[torch.Tensor]:
    """Yield logits whose `rows` may be changed in place; when the context ends, `logits_SV` is as before.

    Only these rows are copied, so that a few rows with a grammar do not cost a copy of all logits.
    """
    if len(rows) == len(logits_SV):
        yield logits_SV.clone()
        return
    rows_R = uploads.tensors({"rows": np.array(rows, dtype=np.int64)})["rows"]
    kept_RV = logits_SV.index_select(0, rows_R)
    yield logits_SV
    logits_SV.index_copy_(0, rows_R, kept_RV)
