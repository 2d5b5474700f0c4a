"""What changes logits before temperature: applies logit bias, banned tokens and a grammar's bit mask, and gathers penalties.

- banned token: one that would end the sequence before `min_tokens`. Its logit becomes -inf.
- grammar mask: bits packed into bytes, ceil(V / 8) for each row, lowest bit first; bit 0 means that the token is not allowed.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.token_table import RowPairs, TokenPairs, TokenTable


class Adjustments:
    """Keeps on the device which logits the sequences change."""

    def __init__(self) -> None:
        self._table = TokenTable()

    def remove(self, state: SequenceState) -> None:
        """Forget a sequence."""
        for pairs in state.all_pairs:
            self._table.remove(pairs)

    def apply_bias_and_bans(
        self, logits_SV: torch.Tensor, states: Sequence[SequenceState], grammar_mask: bytes | None
    ) -> None:
        """Change `logits_SV` in place, row s as `states[s]` asks, by everything but penalties.

        `grammar_mask` is the mask of all rows, as in StepPlan. Penalties may come afterwards: a logit of -inf stays -inf.
        """
        vocab_size, device = logits_SV.shape[1], logits_SV.device
        bias = self._gather([state.bias_pairs(vocab_size) for state in states], device)
        if bias is not None:
            logits_SV[bias.row, bias.token] += bias.value.to(logits_SV.dtype)
        bans = self._gather([state.banned_pairs(vocab_size) for state in states], device)
        if bans is not None:
            logits_SV[bans.row, bans.token] = -torch.inf
        if grammar_mask is not None:
            logits_SV.masked_fill_(~_allowed(grammar_mask, logits_SV), -torch.inf)

    def penalties(self, states: Sequence[SequenceState], device: torch.device) -> RowPairs | None:
        """Return what penalties change in these rows; None where they change nothing.

        The number of a row is its repetition penalty, that of a token what is subtracted from its logit.
        """
        return self._gather([state.counts for state in states], device, [s.params.repetition_penalty for s in states])

    def _gather(
        self, pairs: Sequence[TokenPairs | None], device: torch.device, row_values: Sequence[float] | None = None
    ) -> RowPairs | None:
        rows = [row for row, one in enumerate(pairs) if one is not None]
        if not rows:
            return None
        values = [0.0] * len(rows) if row_values is None else [row_values[row] for row in rows]
        return self._table.gather(rows, [one for one in pairs if one is not None], values, device)


def mask_bytes(grammar_mask: bytes, logits_SV: torch.Tensor) -> torch.Tensor:
    """Return a grammar's mask of these rows as a tensor of bytes, [S * ceil(V / 8)].

    Raises:
        ValueError: it has another length.
    """
    num_rows, vocab_size = logits_SV.shape
    if len(grammar_mask) != num_rows * -(-vocab_size // 8):
        raise ValueError(f"The grammar mask has {len(grammar_mask)} bytes for {num_rows} rows of {vocab_size} tokens.")
    return torch.from_numpy(np.frombuffer(grammar_mask, dtype=np.uint8).copy())


def _allowed(grammar_mask: bytes, logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the mask as bools [S, V]."""
    (num_rows, vocab_size), device = logits_SV.shape, logits_SV.device
    # The bits are unpacked on the device: an eighth of the bytes to copy.
    bits = mask_bytes(grammar_mask, logits_SV).to(device, non_blocking=True)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    allowed = (bits.view(num_rows, -1, 1) >> places) & 1  # [S, ceil(V / 8), 8], lowest bit first
    return allowed.view(num_rows, -1)[:, :vocab_size].bool()
