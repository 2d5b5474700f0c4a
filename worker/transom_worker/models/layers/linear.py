"""Linear layers, by torch or by kernels with packed weights in the model's dtype, 8 bits or 4 bits; and the feed-forward layer
that is made of them: down(activation(gate(x)) * up(x)), or down(relu(up(x)) ** 2).

In a row-parallel layer each rank has some columns of the weight [N, K], and an all-reduce sums the ranks' products. A
column-parallel layer needs no class of its own: each rank has some rows of the weight, which is a linear layer with fewer rows.

Legend: M rows, K input width, N output width; H heads; of feed-forward layers: T tokens, N hidden width, I inner width of
this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from transom_kernels.gated_mlp import Activation, Limits, gated_activation
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.linear import PackedWeight, can_pack, gated_linear, heads_linear, linear, pack_weight
from transom_kernels.linear.gpu import GpuWeight, gpu_weight
from transom_kernels.quantised_linear import GpuRows, PackedPanels, QuantisedRows, concatenated, pack, pack_gated
from transom_worker.models.layers.quantisation import Quantization, Weight, quantised_rows
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator


class Linear(ABC):
    """`x @ weight.T + bias`, alone or added to a residual. `weight_bytes` is the size of the weight."""

    weight_bytes: int
    adds_in_product = False  # whether `add_to` adds the residual within the product, without another pass over memory

    @abstractmethod
    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [M, N]; `residual` is not changed."""
        return residual_MN + self(x_MK)

    def logits(self, x_MK: torch.Tensor, *, scale: float, soft_cap: float | None) -> torch.Tensor:
        """Return `cap(scale * self(x))` in float32, [M, N], where cap(y) is `soft_cap * tanh(y / soft_cap)`."""
        y_MN = self(x_MK).float()
        if scale != 1.0:
            y_MN = y_MN.mul_(scale)
        return y_MN if soft_cap is None else y_MN.div_(soft_cap).tanh_().mul_(soft_cap)


def make_linear(
    weight_NK: Weight, bias_N: torch.Tensor | None = None, *, quantization: Quantization = "none"
) -> Linear:
    """Return the fastest linear layer for this weight's device and dtype.

    Raises:
        ConfigError: a quantisation was requested, but the weight is not on a CPU in bfloat16 or float32.
    """
    rows = quantised_rows(weight_NK, quantization)
    if rows is not None:
        return KernelLinear(gpu_weight(rows, bias_N) if isinstance(rows, GpuRows) else pack(rows, bias_N))
    assert isinstance(weight_NK, torch.Tensor)
    if runs_packed(weight_NK):
        return KernelLinear(pack_weight(weight_NK, bias_N))
    return PlainLinear(weight_NK, bias_N)


def runs_packed(weight_NK: torch.Tensor) -> bool:
    """Return whether a weight that is not quantised will be packed for the CPU kernels."""
    return uses_cpu_kernels(weight_NK) and can_pack(weight_NK)


class PlainLinear(Linear):
    """torch's own linear layer."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self.weight_NK, self._bias_N = weight_NK.contiguous(), bias_N
        self.weight_bytes = weight_NK.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return F.linear(x_MK, self.weight_NK, self._bias_N)


class KernelLinear(Linear):
    """A linear layer over a packed weight. CPU kernels add bias and residual, or scale and cap logits, in the same pass."""

    def __init__(self, weight: PackedWeight | PackedPanels | GpuWeight) -> None:
        """`weight` is packed, with its bias: in the model's dtype (`PackedWeight`), or quantised, for CPUs or GPUs."""
        self.weight = weight
        self.adds_in_product = not isinstance(weight, GpuWeight)
        self.weight_bytes = weight.nbytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, [M, N]."""
        return linear(x_MK, self.weight)

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, rounded once, [M, N]."""
        return linear(x_MK, self.weight, residual_MN)

    def logits(self, x_MK: torch.Tensor, *, scale: float, soft_cap: float | None) -> torch.Tensor:
        """See `Linear.logits`."""
        return linear(x_MK, self.weight, scale=scale, soft_cap=soft_cap, out_dtype=torch.float32)


class RowParallelLinear(Linear):
    """`x @ weight.T + bias`, summed over the ranks. Only rank 0 has a bias.

    The residual is added after the sum. It may be far larger than the ranks' products, so adding it to one of them would round
    that product's low bits away.
    """

    def __init__(self, linear: Linear, comm: Communicator) -> None:
        self._linear, self._comm = linear, comm
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, [M, N]."""
        return self._comm.all_reduce_(self._linear(x_MK))

    def add_to(self, residual_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [M, N]."""
        return self(x_MK).add_(residual_MN)


def row_parallel(linear: Linear, comm: Communicator) -> Linear:
    """Return the layer for this rank's columns of a weight. With `SINGLE_RANK` as `comm` it does not sum over the ranks; if there
    are several, the caller does.

    A weight is divided among ranks before it is quantised, so a rank's groups of columns begin at its first column.
    """
    return linear if comm is SINGLE_RANK else RowParallelLinear(linear, comm)


class HeadsLinear:
    """A matrix for each of H heads, packed for the CPU kernels or as torch has it: y[t, h] = weight[h] @ x[t, h]."""

    def __init__(self, weight_HNK: torch.Tensor, *, is_anothers: bool = False) -> None:
        """Unless it is packed, the weight's memory may be `is_anothers`: a view of other matrices, whose bytes count there."""
        self._packed = [pack_weight(head_NK.contiguous()) for head_NK in weight_HNK] if runs_packed(weight_HNK) else []
        self._weight_HKN = None if self._packed else weight_HNK.transpose(1, 2)
        self.weight_bytes = 0 if is_anothers and not self._packed else weight_HNK.nbytes

    def __call__(self, x_THK: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Return the products of these heads, whose inputs `x` has, [T, H, N], contiguous."""
        if self._weight_HKN is None:
            return heads_linear(x_THK, self._packed[heads])
        return torch.bmm(x_THK.transpose(0, 1), self._weight_HKN[heads]).transpose(0, 1).contiguous()


# Gate and up as one projection: packed for one kernel with the activation, or not.
GateUp = PackedWeight | PackedPanels | Linear


class GatedMlp:
    """A feed-forward layer. One projection computes gate and up; with packed weights, the same kernel also applies the activation
    and multiplies the two. The activation `relu2` has no gate."""

    def __init__(self, gate_up: GateUp, down: Linear, activation: Activation, limits: Limits | None = None) -> None:
        """`gate_up` is fused: gates before ups, or ups alone if the activation has no gate. `down` sums over the ranks. With
        `limits`, which clamp gates and ups, `gate_up` is a `Linear`."""
        self._gate_up, self._down, self._activation, self._limits = gate_up, down, activation, limits
        self.weight_bytes = gate_up.weight_bytes if isinstance(gate_up, Linear) else gate_up.nbytes
        self.weight_bytes += down.weight_bytes

    @property
    def adds_in_product(self) -> bool:
        """Return whether `add_to` adds the residual within the layer's last matrix product."""
        return self._down.adds_in_product

    def add_to(self, residual_TN: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `residual + mlp(x)`, [T, N]."""
        return self._down.add_to(residual_TN, self._inner(x_TN))

    def __call__(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return `mlp(x)`, [T, N]."""
        return self._down(self._inner(x_TN))

    def _inner(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return activation(gate(x)) * up(x), or relu(up(x)) ** 2, [T, I]."""
        if isinstance(self._gate_up, PackedWeight | PackedPanels):  # to ask for Linear, an abstract class, takes longer
            return gated_linear(x_TN, self._gate_up, self._activation)
        return gated_activation(self._gate_up(x_TN), self._activation, self._limits)


def gate_and_up(weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, quantization: Quantization) -> GateUp:
    """Return a gate [I, N] and an up [I, N] fused. Both weights must be plain tensors, or be stored in the same format."""
    gate_IN, up_IN = weights
    both = None if biases is None else (biases[0], biases[1])
    gate, up = (quantised_rows(weight, quantization) for weight in weights)
    if isinstance(gate, GpuRows) and isinstance(up, GpuRows):
        return make_linear(concatenated([gate, up]), None if both is None else torch.cat(both))
    if isinstance(gate, QuantisedRows) and isinstance(up, QuantisedRows):
        return pack_gated(gate, up, both)
    assert isinstance(gate_IN, torch.Tensor)
    assert isinstance(up_IN, torch.Tensor)
    if runs_packed(gate_IN):
        return pack_weight(gate_IN, both and both[0], up=up_IN, up_bias=both and both[1])
    return make_linear(
        torch.cat([gate_IN, up_IN]), None if both is None else torch.cat(both), quantization=quantization
    )
