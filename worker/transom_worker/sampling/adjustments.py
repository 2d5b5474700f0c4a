"""Applies everything that changes logits before temperature: logit bias, banned tokens, a grammar's bit mask, penalties.

- banned token: one that would end the sequence before `min_tokens`. Its logit becomes -inf.
- grammar mask: bits packed into bytes, ceil(V / 8) for each row, lowest bit first; bit 0 means that the token is not allowed.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transom_worker.sampling.penalties import PenaltyChanges, apply_changes, penalty_changes
from transom_worker.sampling.sequence_state import SequenceState


def adjust_logits(logits_SV: torch.Tensor, states: Sequence[SequenceState], grammar_mask: bytes | None) -> None:
    """Change `logits_SV` in place, row s as `states[s]` asks. `grammar_mask` is the mask of all rows, as in StepPlan."""
    apply_bias_and_bans(logits_SV, states, grammar_mask)
    _apply_penalties(logits_SV, states)


def apply_bias_and_bans(logits_SV: torch.Tensor, states: Sequence[SequenceState], grammar_mask: bytes | None) -> None:
    """Apply everything but penalties. Penalties may come afterwards: a logit of -inf stays -inf."""
    _add_bias(logits_SV, states)
    pairs = [(row, token) for row, state in enumerate(states) for token in state.banned if token < logits_SV.shape[1]]
    if pairs:
        row_token = torch.tensor(pairs, device=logits_SV.device)
        logits_SV[row_token[:, 0], row_token[:, 1]] = -torch.inf
    if grammar_mask is not None:
        logits_SV.masked_fill_(~_allowed(grammar_mask, logits_SV), -torch.inf)


def _add_bias(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> None:
    vocab_size, device = logits_SV.shape[1], logits_SV.device
    triples = [
        (row, token, bias)
        for row, state in enumerate(states)
        for token, bias in state.params.logit_bias.items()
        if token < vocab_size
    ]
    if triples:
        rows, tokens, biases = zip(*triples, strict=True)
        logits_SV[torch.tensor(rows, device=device), torch.tensor(tokens, device=device)] += torch.tensor(
            biases, dtype=logits_SV.dtype, device=device
        )


def batch_penalties(states: Sequence[SequenceState], device: torch.device) -> PenaltyChanges | None:
    """Return what penalties change in these rows; None where no row has any."""
    rows = [row for row, state in enumerate(states) if state.counts is not None]
    if not rows:
        return None
    params = [states[row].params for row in rows]
    return penalty_changes(
        rows,
        [counts for row in rows if (counts := states[row].counts) is not None],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
        device,
    )


def _apply_penalties(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> None:
    changes = batch_penalties(states, logits_SV.device)
    if changes is not None:
        apply_changes(logits_SV, changes)


def _allowed(grammar_mask: bytes, logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the mask as bools [S, V].

    Raises:
        ValueError: its length is not S * ceil(V / 8).
    """
    num_rows, vocab_size = logits_SV.shape
    if len(grammar_mask) != num_rows * -(-vocab_size // 8):
        raise ValueError(f"The grammar mask has {len(grammar_mask)} bytes for {num_rows} rows of {vocab_size} tokens.")
    bits = np.frombuffer(grammar_mask, dtype=np.uint8).reshape(num_rows, -1)
    allowed = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(allowed.view(np.bool_)).to(logits_SV.device)
