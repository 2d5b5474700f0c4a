"""The arguments of `linear_recurrence`, `causal_convolution` and `gated_rms_norm`, and the checks that they fit together.

Legend: T tokens of a step, B sequences, H heads of values and states, Hk heads of keys and queries (each serves H / Hk neighbouring
heads), D key width, Dv value width, L tokens of the convolution's kernel, C its channels: 2 Hk D + H Dv, in Mamba-1 H Dv.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


class GatedNorm(NamedTuple):
    """What `gated_rms_norm` computes: rms_norm(x) * weight * silu(gate) [T, N], each `size` neighbours normed alone.

    With `gates_first` it is rms_norm(x * silu(gate)) * weight; with `by_sigmoid` the factor is sigmoid(gate). Without a weight all
    numbers of a group may share a gate.
    """

    x: torch.Tensor  # [T, N]
    gate: torch.Tensor  # [T, N], or [T, N / size] without a weight
    weight: torch.Tensor | None  # [N] or [size]; without it there is no norm
    eps: float
    size: int
    gates_first: bool
    by_sigmoid: bool

    @property
    def shares_gates(self) -> bool:
        """Return whether there is a gate for each group, not for each number."""
        return self.gate.shape[1] < self.x.shape[1]


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
class Convolution:
    """The causal convolution before a recurrence: silu(bias + the sum over the last L tokens), and the rows that it keeps."""

    weight: torch.Tensor  # [L, C], contiguous; the last row belongs to the token itself
    bias: torch.Tensor | None  # [C]
    rows: torch.Tensor  # [ids, L - 1, C], C contiguous: the inputs of the last tokens, the earliest first

    def check(self, projected: torch.Tensor) -> None:
        """Raise ValueError unless it fits these inputs [T, C]."""
        length, channels = len(self.weight), projected.shape[1]
        wanted = {"weight": (length, channels), "rows": (len(self.rows), length - 1, channels), "bias": (channels,)}
        _check_shapes(self, wanted)
        tensors = (projected, self.weight, self.bias, self.rows)
        if len({tensor.dtype for tensor in tensors if tensor is not None}) > 1:
            raise ValueError("give projections, weight, bias and rows of one dtype.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceInputs:
    """The arguments of `linear_recurrence`. Tensors of T rows may be slices of one projection: only a row must be contiguous.

    A gated delta net calls `step_size` a, and `strength` b. Mamba calls queries C, keys B, values x and `step_size` dt; it has
    groups instead of key heads, and no `strength`. Mamba-1 computes queries and keys from the convolution's result, so that is
    `projected`, the values alone, there is no `convolution`, and all heads have one query and one key (`selection`).
    """

    projected: torch.Tensor  # [T, C]: queries of all key heads, their keys, values of all heads; before the convolution
    convolution: Convolution | None = None
    selection: tuple[torch.Tensor, torch.Tensor] | None = None  # Mamba-1's queries and keys, [T, D] each
    # [T, H], or of rows of a state [T, H * D] (Kimi Linear), or of its columns [T, H * Dv] (Mamba-1)
    step_size: torch.Tensor
    step_bias: torch.Tensor  # [H], [H * D] or [H * Dv] float32, dt_bias: added before the softplus
    rate: torch.Tensor  # [H] float32, or with a step for each column [H, D, Dv], contiguous: exp(A_log)
    most_decay: float = 0.0  # the bound of a row's -log(decay) (Ling 3: 5); 0: there is none
    strength: torch.Tensor | None = None  # [T, H]; its sigmoid, times the next field, is the delta rule's beta
    most_strength: float = 1.0  # with 2 (Olmo Hybrid) a change may turn a state's sign
    skip: torch.Tensor | None = None  # [H] float32, or with a step for each column [H * Dv]: D of Mamba
    key_heads: int  # Hk
    state: torch.Tensor  # [ids, H, D, Dv] float32, Dv contiguous
    batch: StateBatch

    @property
    def is_delta_rule(self) -> bool:
        """Whether the state is corrected by the delta rule, as in gated delta nets; Mamba only adds to it."""
        return self.strength is not None

    @property
    def decays_by(self) -> Literal["head", "row", "column"]:
        """What of a state has a decay of its own."""
        if self.selection is not None:
            return "column"
        return "row" if self.is_delta_rule and self.step_bias.numel() > self.state.shape[1] else "head"

    def parts(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys of all key heads and values of all heads, views; `mixed` is the convolution's result."""
        if self.selection is not None:
            return (*self.selection, mixed)
        keys = self.key_heads * self.state.shape[2]
        return mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]

    def check(self) -> None:
        """Raise ValueError unless shapes and dtypes fit together."""
        (tokens, channels), (heads, width, value_width) = self.projected.shape, self.state.shape[1:]
        key_heads, values = self.key_heads, heads * value_width
        by_column = self.selection is not None
        if heads % key_heads or channels != values + (0 if by_column else 2 * key_heads * width):
            raise ValueError(
                f"{channels} channels do not fit {key_heads} key heads and states {tuple(self.state.shape[1:])}: give queries and "
                "keys of each key head and values of each head, and a multiple of key heads as heads."
            )
        if by_column and (self.convolution is not None or self.is_delta_rule or key_heads != 1):
            raise ValueError("a selection needs one key head, and neither a convolution nor a delta rule.")
        steps = {"head": heads, "row": heads * width, "column": values}[self.decays_by]
        wanted = {"step_size": (tokens, steps), "strength": (tokens, heads), "step_bias": (steps,)}
        wanted |= {"rate": tuple(self.state.shape[1:]) if by_column else (heads,)}
        _check_shapes(self, wanted | {"skip": (values if by_column else heads,)})
        if self.most_decay and self.decays_by != "row":
            raise ValueError("most_decay needs steps of rows.")
        if any(one.shape != (tokens, width) for one in self.selection or ()):
            raise ValueError(f"give a selection of {tokens} queries and keys of {width}.")
        alike = (self.projected, self.step_size, self.strength, *(self.selection or ()))
        exact = (self.step_bias, self.rate, self.skip, self.state)
        if len({tensor.dtype for tensor in alike if tensor is not None}) > 1:
            raise ValueError("give projections, steps and strengths of one dtype.")
        if any(tensor is not None and tensor.dtype != torch.float32 for tensor in exact):
            raise ValueError("step_bias, rate, skip and state must be float32.")
        if self.convolution is not None:
            self.convolution.check(self.projected)


def _check_shapes(inputs: object, wanted: dict[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {shape}.")
