"""Everything that changes logits before temperature: bias, penalties, forbidden tokens, a grammar's mask.

Legend: S rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transom_worker.sampling.penalties import PenaltyChanges, apply_changes, penalty_changes
from transom_worker.sampling.sequence_state import SequenceState


def adjust_logits(logits_SV: torch.Tensor, states: Sequence[SequenceState], grammar_mask: bytes | None) -> None:
    """Change `logits_SV` in place, row s by `states[s]`; `grammar_mask` is as in StepPlan, lowest bit first."""
    apply_bias_and_bans(logits_SV, states, grammar_mask)
    _penalise(logits_SV, states)


def apply_bias_and_bans(logits_SV: torch.Tensor, states: Sequence[SequenceState], grammar_mask: bytes | None) -> None:
    """`adjust_logits` but for penalties, which come after a bias and leave what is forbidden forbidden."""
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


def penalties(states: Sequence[SequenceState], device: torch.device) -> PenaltyChanges | None:
    """What penalties change; None where no row has any."""
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


def _penalise(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> None:
    changes = penalties(states, logits_SV.device)
    if changes is not None:
        apply_changes(logits_SV, changes)


def _allowed(grammar_mask: bytes, logits_SV: torch.Tensor) -> torch.Tensor:
    """The mask as bools [S, V]. Raises ValueError when its length is not S * ceil(V / 8)."""
    num_rows, vocab_size = logits_SV.shape
    if len(grammar_mask) != num_rows * -(-vocab_size // 8):
        raise ValueError(f"The grammar mask has {len(grammar_mask)} bytes for {num_rows} rows of {vocab_size} tokens.")
    bits = np.frombuffer(grammar_mask, dtype=np.uint8).reshape(num_rows, -1)
    allowed = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(allowed.view(np.bool_)).to(logits_SV.device)
