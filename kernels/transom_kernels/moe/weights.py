"""The weights of a layer's experts as `moe` takes them: plain tensors, MXFP4 as stored in checkpoints, or packed into the memory
layout that the CPU kernels read, once, when a model is loaded.

A *panel* is 64 rows (outputs) of a weight matrix. A kernel reads it from beginning to end:

    float32     [4] [columns] [16 rows]
    bfloat16    [4] [columns / 2] [16 rows] [2 columns]                          a 32-bit word holds two columns of a row
    MXFP4       [columns / 32] ([4] [64 rows] [8 columns], then [64] scales)     a word holds columns 0 2 4 6 1 3 5 7, from bit 0 on

A panel of `gate_up` has 16 gates, the 16 ups of the same positions, 16 more gates and their ups, so one panel gives both factors of
32 activations; one of ups alone gives 64. Rows and columns are padded with zeros, columns to a multiple of 32.

Legend: E experts, N hidden width, I inner width.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from transom_kernels.cpu.memory import lazy_bytes
from transom_kernels.quantised_linear.weights import Numbers

MX_GROUP = 32  # elements that share a scale
MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # lower three bits of fp4 -> magnitude; the fourth bit is the sign
ScaleKind = Literal["", "powers", "small", "bfloat16"]  # of GPUs: none, e8m0, e4m3, bfloat16
MX_BIAS = 127  # a scale s stands for 2 ** (s - MX_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MxTensor:
    """A matrix per expert in MXFP4 (OCP microscaling): two fp4 numbers per byte, the first in the low half, and one scale per 32.

    An element is its fp4 number times 2 ** (scale - 127).
    """

    blocks: torch.Tensor  # [E, rows, columns / 2] uint8
    scales: torch.Tensor  # [E, rows, columns / 32] uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns of the dequantised tensor."""
        experts, rows, stored = self.blocks.shape
        return experts, rows, 2 * stored

    def dequantised(self) -> torch.Tensor:
        """Return the elements, [E, rows, columns] float32."""
        table = torch.tensor([*MX_VALUES, *(-value for value in MX_VALUES)], device=self.blocks.device)
        pairs = torch.stack([table[(self.blocks & 15).long()], table[(self.blocks >> 4).long()]], dim=-1)
        scale = torch.ldexp(torch.ones(self.scales.shape, device=table.device), self.scales.to(torch.int32) - MX_BIAS)
        elements = pairs.reshape(*self.scales.shape, MX_GROUP) * scale[..., None]
        return elements.flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMatrix:
    """A quantised matrix per expert in the layout that the Triton kernels read (`gpu_weights.py`). A linear layer has one expert.

    element = (number - zero point) * scale of the group of `group` columns * scale of the row; absent ones are the middle integer
    and 1.
    """

    numbers: Numbers
    shape: tuple[int, int, int]  # experts, rows, columns
    group: int
    words: torch.Tensor  # [E, rows, words] int16
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None  # [E, rows] float32
    scale_kind: ScaleKind = ""

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        parts = (self.words, self.scales, self.zeros, self.row_scales)
        return sum(part.nbytes for part in parts if part is not None)


Matrix = torch.Tensor | MxTensor | GpuMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """The weights of all experts of a layer: `gate_up` [E, 2 I, N] and `down` [E, N, I], plain or quantised.

    Biases are [E, 2 I] and [E, N]. The first I rows of `gate_up` are gates and the others ups; if `interleaved`, rows alternate.
    Experts without gates have ups alone, [E, I, N] and biases [E, I].
    """

    gate_up: Matrix
    down: Matrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False
    prepared: dict[Any, Any] = field(
        init=False, default_factory=dict, compare=False
    )  # checks and launches of these tensors

    @property
    def has_gates(self) -> bool:
        """Whether `gate_up` has gates beside the ups."""
        return self.gate_up.shape[1] != self.down.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """The gated activation of an expert: `activation(gate) * (up + up_offset)`, where silu is `gate * sigmoid(gain * gate)`.

    `limits` (g, u) clamp gates to at most g, and ups to [-u, u]. `relu2` is for experts without gates: relu(up) ** 2.
    """

    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    gain: float = 1.0
    limits: tuple[float, float] | None = None
    up_offset: float = 0.0

    @property
    def has_gates(self) -> bool:
        """Whether the rule is for experts with gates."""
        return self.activation != "relu2"


# --- packed weights

PANEL = 64
LANES = 16
PACKED_DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = PANEL // 2  # of one panel of gates and ups


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """One matrix of every expert, `panels` [E, number of panels, bytes of a panel] uint8."""

    panels: torch.Tensor
    columns: int  # padded
    dtype: torch.dtype | None  # None: MXFP4

    @property
    def num_panels(self) -> int:
        """Panels of an expert."""
        return self.panels.shape[1]

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.panels.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The weights of all experts of a layer. Biases are float32 [E, number of panels, 64], in the order of a panel's rows."""

    num_experts: int
    width: int  # N
    inner: int  # I
    has_gates: bool
    gate_up: PackedMatrix
    down: PackedMatrix
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def pack_experts(tensors: ExpertTensors) -> PackedExperts:
    """Copy the experts' weights into panels, one expert after the other.

    Raises:
        ValueError: the weights are neither bfloat16 nor float32 nor MXFP4.
    """
    num_experts, width, inner = tensors.down.shape
    interleaved, down_rows = tensors.interleaved, _padded_rows(width)
    gate_up_rows = _gate_up_rows(inner, interleaved=interleaved) if tensors.has_gates else _padded_rows(inner)
    return PackedExperts(
        num_experts=num_experts,
        width=width,
        inner=inner,
        has_gates=tensors.has_gates,
        gate_up=_pack(tensors.gate_up, gate_up_rows),
        down=_pack(tensors.down, down_rows),
        gate_up_bias=None if tensors.gate_up_bias is None else _pack_bias(tensors.gate_up_bias, gate_up_rows),
        down_bias=None if tensors.down_bias is None else _pack_bias(tensors.down_bias, down_rows),
    )


def padded_columns(columns: int) -> int:
    """Return the columns of a panel: `columns` padded to a multiple of 32."""
    return -(-columns // MX_GROUP) * MX_GROUP


def _padded_rows(rows: int) -> torch.Tensor:
    """Return the row at each place of the panels; -1 is padding."""
    places = torch.arange(-(-rows // PANEL) * PANEL)
    return torch.where(places < rows, places, -1)


def _gate_up_rows(inner: int, *, interleaved: bool) -> torch.Tensor:
    """Return the row of `gate_up` at each place of its panels; -1 is padding."""
    position = torch.arange(-(-inner // ACTIVATIONS) * ACTIVATIONS).view(-1, 1, LANES)
    is_up = torch.tensor([0, 1]).view(1, 2, 1)
    row = 2 * position + is_up if interleaved else position + is_up * inner
    return torch.where(position < inner, row, -1).flatten()


def _pack(weight: Matrix, rows: torch.Tensor) -> PackedMatrix:
    if isinstance(weight, MxTensor):
        return _pack_mx(weight, rows)
    assert isinstance(weight, torch.Tensor)
    if weight.dtype not in PACKED_DTYPES:
        raise ValueError(f"experts in {weight.dtype} cannot be packed; give bfloat16, float32 or MXFP4.")
    num_experts, _, width = weight.shape
    columns, num_panels = padded_columns(width), len(rows) // PANEL
    words = columns * weight.itemsize // 4
    panels = _empty((num_experts, num_panels * PANEL // LANES, words, LANES), torch.int32)
    padding, padded = rows < 0, torch.zeros((len(rows), columns), dtype=weight.dtype)
    for expert in range(num_experts):
        padded[:, :width] = weight[expert][rows.clamp(min=0)]
        padded[padding] = 0
        panels[expert] = padded.view(torch.int32).view(-1, LANES, words).transpose(1, 2)
    panels = panels.view(num_experts, num_panels, words * PANEL).view(torch.uint8)
    return PackedMatrix(panels=panels, columns=columns, dtype=weight.dtype)


def _pack_mx(weight: MxTensor, rows: torch.Tensor) -> PackedMatrix:
    num_experts, _, columns = weight.shape
    groups, num_panels = columns // MX_GROUP, len(rows) // PANEL
    panels = _empty((num_experts, num_panels, groups, PANEL * MX_GROUP // 2 + PANEL), torch.uint8)
    padding, rows = rows < 0, rows.clamp(min=0)
    for expert in range(num_experts):
        blocks, scales = weight.blocks[expert][rows], weight.scales[expert][rows]
        blocks[padding], scales[padding] = 0, MX_BIAS
        words = _mx_words(blocks).view(num_panels, PANEL, groups, 4).permute(0, 2, 3, 1)
        panels[expert, ..., :-PANEL] = words.flatten(2).contiguous().view(torch.uint8)
        panels[expert, ..., -PANEL:] = scales.view(num_panels, PANEL, groups).transpose(1, 2)
    return PackedMatrix(panels=panels.flatten(2), columns=columns, dtype=None)


def _mx_words(blocks: torch.Tensor) -> torch.Tensor:
    """Return words of eight columns each, the even columns in the low half."""
    bytes_ = blocks.view(len(blocks), -1, 4).to(torch.int32)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32)
    words = ((bytes_ & 15) << shifts) + ((bytes_ >> 4) << (shifts + 16))
    return words.sum(dim=2, dtype=torch.int32)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for weights, in huge pages if there are any, since each step reads much of it."""
    return lazy_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _pack_bias(bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    packed = bias.float()[:, rows.clamp(min=0)]
    packed[:, rows < 0] = 0
    return packed.view(len(bias), -1, PANEL).contiguous()
