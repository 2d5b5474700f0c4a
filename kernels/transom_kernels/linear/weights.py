"""Weights [N, K] packed into panels for the CPU kernels (`layout.py`).

Legend: N outputs (of gate and of up each, if the weight is gated), K inputs.
"""

from dataclasses import dataclass

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, launch
from transom_kernels.cpu.memory import weight_memory
from transom_kernels.cpu.target import cpu_target
from transom_kernels.linear.layout import LINE, OUTPUTS, num_panels, panel_bytes

_SCRATCH_BYTES = 2 * OUTPUTS * LINE

_KERNELS = "transom_kernels.linear.table_kernel"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight in panels, and its bias. `pack_weight` makes it."""

    panels: torch.Tensor  # bytes
    bias: torch.Tensor | None  # float32, padded like the panels
    num_outputs: int  # N
    width: int  # K
    dtype: torch.dtype
    is_gated: bool

    @property
    def num_panels(self) -> int:
        """The number of panels; gate and up count separately."""
        return num_panels(self.num_outputs) * (2 if self.is_gated else 1)

    @property
    def panel_bytes(self) -> int:
        """Bytes of each panel."""
        return panel_bytes(self.width, DTYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of the weight without padding."""
        return self.num_outputs * (2 if self.is_gated else 1) * self.width * self.dtype.itemsize

    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the weight's bias [N] float32 twice, or the biases of gate and up; (None, None) if there is none."""
        if self.bias is None:
            return None, None
        split = self.bias.view(-1, 2 if self.is_gated else 1, OUTPUTS).transpose(0, 1).flatten(1)[:, : self.num_outputs]
        return split[0], split[-1]

    def unpack(self) -> tuple[torch.Tensor, ...]:
        """Return the weight as a tuple of one matrix [N, K], or of gate and up."""
        numbers = torch.empty(0, dtype=self.dtype).element_size()
        words = self.panels.view(torch.int32).view(self.num_panels, -1, OUTPUTS).transpose(1, 2).contiguous()
        rows = words.view(torch.uint8).view(self.num_panels, OUTPUTS, -1)[..., : self.width * numbers].contiguous()
        kinds = 2 if self.is_gated else 1
        split = rows.view(-1, kinds, OUTPUTS, self.width * numbers).transpose(0, 1)
        return tuple(
            part.reshape(-1, self.width * numbers)[: self.num_outputs].contiguous().view(self.dtype) for part in split
        )


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether the kernels take weights of this dtype on this processor: float16 needs its conversion instructions."""
    target = cpu_target()
    return weight.dtype in DTYPES and (weight.dtype != torch.float16 or target.avx2 or not target.x86)


def pack_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    up: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> PackedWeight:
    """Pack a weight [N, K] and its bias [N]; with `up`, pack two weights of one shape, gate and up, into a gated one.

    Raises:
        ValueError: the weight is not a matrix on a CPU, its dtype has no kernel, or the shapes do not fit.
    """
    _check(weight, bias, up, up_bias)
    (num_outputs, width), parts = weight.shape, (weight,) if up is None else (weight, up)
    panel, count = panel_bytes(width, DTYPES[weight.dtype]), num_panels(num_outputs)
    panels = weight_memory(count * len(parts) * panel)
    kernel = cpu_kernel(_KERNELS, "make_pack")
    for index, part in enumerate(parts):
        rows = part if part.stride(1) == 1 or width == 1 else part.contiguous()
        size = rows.element_size()
        launch(
            kernel,
            count,
            [rows, rows.stride(0) * size, num_outputs, width * size, panels, panel, index, len(parts)],
            scratch_bytes=_SCRATCH_BYTES,
        )
    return PackedWeight(
        panels=panels,
        bias=_padded_bias((bias, up_bias)[: len(parts)], count),
        num_outputs=num_outputs,
        width=width,
        dtype=weight.dtype,
        is_gated=up is not None,
    )


def _padded_bias(biases: tuple[torch.Tensor | None, ...], count: int) -> torch.Tensor | None:
    """Return the biases in the order of the panels, in float32, padded with zeros."""
    if all(bias is None for bias in biases):
        return None
    padded = torch.zeros(count, len(biases), OUTPUTS)
    for index, bias in enumerate(biases):
        if bias is not None:
            flat = torch.zeros(count * OUTPUTS)
            flat[: len(bias)] = bias
            padded[:, index] = flat.view(count, OUTPUTS)
    return padded.flatten()


def _check(
    weight: torch.Tensor, bias: torch.Tensor | None, up: torch.Tensor | None, up_bias: torch.Tensor | None
) -> None:
    if weight.dim() != 2 or weight.device.type != "cpu" or not can_pack(weight):
        raise ValueError(
            f"A {weight.dtype} weight {tuple(weight.shape)} on {weight.device} cannot be packed; give a matrix on a CPU in "
            "float32, bfloat16 or float16."
        )
    if up is not None and (up.shape != weight.shape or up.dtype != weight.dtype):
        raise ValueError(
            f"up {up.dtype} {tuple(up.shape)} does not fit gate {weight.dtype} {tuple(weight.shape)}; both must be alike."
        )
    for vector in (bias, up_bias):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"A bias {tuple(vector.shape)} does not fit weight {tuple(weight.shape)}.")
