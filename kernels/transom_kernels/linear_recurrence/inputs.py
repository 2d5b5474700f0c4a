"""The arguments of `linear_recurrence` and `gated_rms_norm`, and the checks that the former fit together.

Legend: T tokens of a step, B sequences, H heads of values and states, Hk heads of keys and queries (each serves H / Hk neighbouring
heads), D key width, Dv value width, L tokens of the convolution's kernel, C = 2 Hk D + H Dv channels of the convolution.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class GatedNorm(NamedTuple):
    """What `gated_rms_norm` computes: rms_norm(x) * weight * silu(gate) [T, N], each `size` neighbours normed alone.

    With `gates_first` it is rms_norm(x * silu(gate)) * weight; with `by_sigmoid` the factor is sigmoid(gate).
    """

    x: torch.Tensor  # [T, N]
    gate: torch.Tensor  # [T, N]
    weight: torch.Tensor | None  # [N] or [size]; without it there is no norm
    eps: float
    size: int
    gates_first: bool
    by_sigmoid: bool


@dataclass(slots=True, kw_only=True)
class StateBatch:
    """Which tokens of a step belong to which sequence, and which blocks of the cache hold its states before and after the step.

    No sequence may write a block that another one reads in the same step; a sequence may write the block that it reads. A sequence
    without tokens reads and writes nothing. Tokens from `query_offset[B]` on only pad the step.
    """

    query_offset: torch.Tensor  # [B + 1] int32: tokens of sequence b are [query_offset[b], query_offset[b + 1])
    read_block: torch.Tensor  # [B] int32: the block of the state before the sequence's first token; below 0: all zeros
    write_block: torch.Tensor  # [B] int32: the block for the state after its last token; below 0: the state is not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceInputs:
    """The arguments of `linear_recurrence`. Tensors of T rows may be slices of one projection: only a row must be contiguous.

    A gated delta net calls `step_size` a, and `strength` b. Mamba-2 calls queries C, keys B, values x and `step_size` dt; it has
    groups instead of key heads, and no `strength`.
    """

    projected: torch.Tensor  # [T, C]: queries of all key heads, their keys, values of all heads; before the convolution
    weight: torch.Tensor  # [L, C]; the last row belongs to the token itself
    bias: torch.Tensor | None  # [C]
    step_size: torch.Tensor  # [T, H], or [T, H * D] where each row of a state decays by itself (Kimi Linear)
    step_bias: torch.Tensor  # [H] or [H * D] float32, dt_bias: added before the softplus
    log_rate: torch.Tensor  # [H] float32, A_log
    strength: torch.Tensor | None = None  # [T, H]; its sigmoid is the delta rule's beta
    skip: torch.Tensor | None = None  # [H] float32, D of Mamba-2
    key_heads: int  # Hk
    state: torch.Tensor  # [ids, H, D, Dv] float32, Dv contiguous
    rows: torch.Tensor  # [ids, L - 1, C], C contiguous: `projected` of the last tokens, the earliest first
    batch: StateBatch

    @property
    def is_delta_rule(self) -> bool:
        """Whether the state is corrected by the delta rule, as in gated delta nets; Mamba-2 only adds to it."""
        return self.strength is not None

    @property
    def decays_by_row(self) -> bool:
        """Whether each row of a state has a decay of its own."""
        return self.is_delta_rule and self.step_bias.numel() > self.state.shape[1]

    def check(self) -> None:
        """Raise ValueError unless shapes and dtypes fit together."""
        (tokens, channels), (heads, width, value_width) = self.projected.shape, self.state.shape[1:]
        length, key_heads = len(self.weight), self.key_heads
        if heads % key_heads or channels != 2 * key_heads * width + heads * value_width:
            raise ValueError(
                f"{channels} channels do not fit {key_heads} key heads and states {tuple(self.state.shape[1:])}: give queries and "
                "keys of each key head and values of each head, and a multiple of key heads as heads."
            )
        wanted = {"weight": (length, channels), "rows": (len(self.rows), length - 1, channels)}
        steps = heads * width if self.decays_by_row else heads
        wanted |= {"bias": (channels,), "step_size": (tokens, steps), "strength": (tokens, heads)}
        wanted |= {"step_bias": (steps,), "log_rate": (heads,), "skip": (heads,)}
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {shape}.")
        alike = (self.projected, self.weight, self.bias, self.step_size, self.strength, self.rows)
        exact = (self.step_bias, self.log_rate, self.skip, self.state)
        if len({tensor.dtype for tensor in alike if tensor is not None}) > 1:
            raise ValueError("give projections, weight, bias and rows of one dtype.")
        if any(tensor is not None and tensor.dtype != torch.float32 for tensor in exact):
            raise ValueError("step_bias, log_rate, skip and state must be float32.")
