"""Gives the experts of a GGUF file the names and shapes that Hugging Face checkpoints of the model family have.

A GGUF layer has three stacks of matrices: the gates, the ups and the downs of all experts. Hugging Face checkpoints have two forms:

- per expert: a tensor for each matrix of each expert (Mixtral, Qwen 3 MoE).
- fused: one tensor of all gates and ups, [E, N, 2I], and one of all downs, [E, I, N] (gpt-oss, Llama 4). In gpt-oss gates and
  ups are interleaved: gate 0, up 0, gate 1, up 1, ...; in Llama 4 all gates come before all ups.

Legend: E experts, N hidden width, I inner width.
"""

import re
from collections.abc import Mapping

import torch

from transom_kernels.quantised_linear import StoredRows
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Part, Weights, WeightsView

# Families with a tensor for each matrix of each expert: model_type -> (name of the matrix -> name of its stack).
_PER_EXPERT: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"w1": "gate", "w3": "up", "w2": "down"},
    "qwen3_moe": {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
}
# Families with fused gates and ups: model_type -> whether gates and ups are interleaved.
_FUSED: Mapping[str, bool] = {"gpt_oss": True, "llama4_text": False}
_STACK = re.compile(r"(.*\.experts)\.(gate|up|down)\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_FUSED_NAME = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")


def with_hf_experts(stacks: Weights, family: str, *, num_experts: int) -> Weights:
    """Return the weights under Hugging Face's names. In `stacks`, a layer's experts are named `experts.gate`, `experts.up` and
    `experts.down`."""
    if family in _PER_EXPERT:
        return PerExpertNames(stacks, _PER_EXPERT[family], num_experts=num_experts)
    return FusedGateUp(stacks, interleaved=_FUSED[family]) if family in _FUSED else stacks


class PerExpertNames(WeightsView):
    """Weights in which each matrix of each expert has a name of its own."""

    def __init__(self, stacks: Weights, parts: Mapping[str, str], *, num_experts: int) -> None:
        super().__init__(stacks)
        self._parts, self._num_experts = parts, num_experts
        back = {stack: hf_name for hf_name, stack in parts.items()}
        names = [name for name in stacks.names if not _STACK.fullmatch(name)]
        for found in filter(None, map(_STACK.fullmatch, stacks.names)):
            names += [f"{found[1]}.{expert}.{back[found[2]]}.{found[3]}" for expert in range(num_experts)]
        self.names = tuple(sorted(names))

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor; see `Weights.__call__`. Only the requested expert of a stack is dequantised."""
        found = _EXPERT.fullmatch(name)
        if found is None or found[3] not in self._parts:
            return self._weights(name, shape=shape, part=part)
        expert, stack = int(found[2]), f"{found[1]}.{self._parts[found[3]]}.weight"
        whole = None if shape is None else (self._num_experts, *shape)
        return self._weights(stack, shape=whole, part=(slice(expert, expert + 1), *part))[0]

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """Return a matrix as stored (`Weights.groups`); None for an expert's matrix, which can only be read dequantised."""
        return None if _EXPERT.fullmatch(name) else super().groups(name, shape=shape, part=part)


class FusedGateUp(WeightsView):
    """Weights in which the stacks of gates and ups are one tensor, and each expert's matrix is transposed."""

    def __init__(self, stacks: Weights, *, interleaved: bool) -> None:
        super().__init__(stacks)
        self._interleaved = interleaved
        self.names = tuple(sorted({_fused_name(name) for name in stacks.names}))

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor; see `Weights.__call__`. A part of the fused gates and ups can be read only if `shape` is given."""
        found = _FUSED_NAME.fullmatch(name)
        if found is None:
            return self._weights(name, shape=shape, part=part)
        prefix, is_bias, is_fused = found[1], found[3] is not None, found[2] == "gate_up"
        kind, stack_shape = "bias" if is_bias else "weight", _stack_shape(shape, halves=2 if is_fused else 1)
        # `along` are the fused columns: the last axis of the fused tensor, but the first one after the experts in a stack.
        experts, *across, along = (*part, *[ALL] * ((2 if is_bias else 3) - len(part)))
        halves = self._halves(along, shape) if is_fused else [("down", along)]
        rows = [
            self._weights(f"{prefix}.{half}.{kind}", shape=stack_shape, part=(experts, chosen, *across))
            for half, chosen in halves
        ]
        fused = self._fuse(rows, along) if is_fused else rows[0]
        return fused if is_bias else fused.transpose(-1, -2)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """Return a matrix as stored (`Weights.groups`); None for experts, which can only be read dequantised."""
        return None if _FUSED_NAME.fullmatch(name) else super().groups(name, shape=shape, part=part)

    def _halves(self, along: slice, shape: tuple[int, ...] | None) -> list[tuple[str, slice]]:
        """Return the rows of the gates' stack and of the ups' stack that make up these columns of the fused tensor."""
        if along == ALL:
            return [("gate", ALL), ("up", ALL)]
        if shape is None:
            raise ValueError("A part of the fused gates and ups was requested without the shape of the whole tensor.")
        start, stop, _ = along.indices(shape[-1])
        if self._interleaved:  # all pairs that the columns touch; `_fuse` cuts a first or last half pair off
            pairs = slice(start // 2, -(-stop // 2))
            return [("gate", pairs), ("up", pairs)]
        half = shape[-1] // 2
        spans = {"gate": slice(start, min(stop, half)), "up": slice(max(0, start - half), stop - half)}
        return [(name, span) for name, span in spans.items() if span.start < span.stop]

    def _fuse(self, parts: list[torch.Tensor], along: slice) -> torch.Tensor:
        if not self._interleaved:
            return torch.cat(parts, dim=1)
        start = along.start or 0
        inside = slice(start % 2, None if along.stop is None else start % 2 + along.stop - start)
        return torch.stack(parts, dim=2).flatten(1, 2)[:, inside]


def _fused_name(name: str) -> str:
    found = _STACK.fullmatch(name)
    if found is None:
        return name
    part = "down" if found[2] == "down" else "gate_up"
    return f"{found[1]}.{part}_proj{'_bias' if found[3] == 'bias' else ''}"


def _stack_shape(shape: tuple[int, ...] | None, *, halves: int) -> tuple[int, ...] | None:
    """Return the shape of each stack for a fused tensor of `shape`, whose last axis is fused and comes first in a stack."""
    if shape is None:
        return None
    *experts_and_width, fused = shape
    return (experts_and_width[0], fused // halves, *experts_and_width[1:])
