"""The experts of a GGUF file, three stacks of matrices a layer, by the names and in the forms that Hugging Face has them.

Legend: E experts, N hidden width, I inner width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from transom_worker.weights.checkpoint import ALL, WHOLE, Part, Weights

# By model_type. A matrix for each expert: its name after the expert's number -> the stack's.
_ONE_BY_ONE: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"w1": "gate", "w3": "up", "w2": "down"},
    "qwen3_moe": {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
}
# One tensor of gates and ups, [E, N, 2I], and one of the ways back, [E, I, N]; True: each gate is followed by its up.
_JOINED: Mapping[str, bool] = {"gpt_oss": True, "llama4_text": False}
_STACK = re.compile(r"(.*\.experts)\.(gate|up|down)\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_JOINT = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")


def with_hf_experts(stacks: Weights, family: str, *, num_experts: int) -> Weights:
    """The weights of a file whose stacks of experts are called `experts.gate`, `experts.up` and `experts.down`."""
    if family in _ONE_BY_ONE:
        return PerExpertNames(stacks, _ONE_BY_ONE[family], num_experts=num_experts)
    return FusedGateUp(stacks, interleaved=_JOINED[family]) if family in _JOINED else stacks


class PerExpertNames:
    """Gives each expert's matrices names of their own."""

    def __init__(self, stacks: Weights, parts: Mapping[str, str], *, num_experts: int) -> None:
        self._stacks, self._parts, self._num_experts = stacks, parts, num_experts
        back = {stack: ours for ours, stack in parts.items()}
        names = [name for name in stacks.names if not _STACK.fullmatch(name)]
        for found in filter(None, map(_STACK.fullmatch, stacks.names)):
            names += [f"{found[1]}.{expert}.{back[found[2]]}.{found[3]}" for expert in range(num_experts)]
        self.names = tuple(sorted(names))

    @property
    def unread(self) -> tuple[str, ...]:
        """See `Weights`."""
        return self._stacks.unread

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor; see `Weights`. No other expert of its stack is dequantised."""
        found = _EXPERT.fullmatch(name)
        if found is None or found[3] not in self._parts:
            return self._stacks(name, shape=shape, part=part)
        expert, stack = int(found[2]), f"{found[1]}.{self._parts[found[3]]}.weight"
        whole = None if shape is None else (self._num_experts, *shape)
        return self._stacks(stack, shape=whole, part=(slice(expert, expert + 1), *part))[0]

    def close(self) -> None:
        """Close the file."""
        self._stacks.close()


class FusedGateUp:
    """Puts gates and ups together and turns each matrix round."""

    def __init__(self, stacks: Weights, *, interleaved: bool) -> None:
        self._stacks, self._interleaved = stacks, interleaved
        self.names = tuple(sorted({_joint_name(name) for name in stacks.names}))

    @property
    def unread(self) -> tuple[str, ...]:
        """See `Weights`."""
        return self._stacks.unread

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor; see `Weights`. A part of gates and ups needs `shape`."""
        found = _JOINT.fullmatch(name)
        if found is None:
            return self._stacks(name, shape=shape, part=part)
        place, is_bias, joins = found[1], found[3] is not None, found[2] == "gate_up"
        kind, one = "bias" if is_bias else "weight", _stack_shape(shape, halves=2 if joins else 1)
        experts, *across, along = (*part, *[ALL] * ((2 if is_bias else 3) - len(part)))
        halves = self._halves(along, shape) if joins else [("down", along)]
        rows = [
            self._stacks(f"{place}.{half}.{kind}", shape=one, part=(experts, chosen, *across))
            for half, chosen in halves
        ]
        joined = self._join(rows, along) if joins else rows[0]
        return joined if is_bias else joined.transpose(-1, -2)

    def close(self) -> None:
        """Close the file."""
        self._stacks.close()

    def _halves(self, along: slice, shape: tuple[int, ...] | None) -> list[tuple[str, slice]]:
        """The rows of gates and of ups that hold these rows of both together."""
        if along == ALL:
            return [("gate", ALL), ("up", ALL)]
        if shape is None:
            raise ValueError("A part of gates and ups together was asked for without the shape of the whole.")
        start, stop, _ = along.indices(shape[-1])
        if self._interleaved:
            both = slice(start // 2, -(-stop // 2))
            return [("gate", both), ("up", both)]
        half = shape[-1] // 2
        spans = {"gate": slice(start, min(stop, half)), "up": slice(max(0, start - half), stop - half)}
        return [(name, span) for name, span in spans.items() if span.start < span.stop]

    def _join(self, parts: list[torch.Tensor], along: slice) -> torch.Tensor:
        if not self._interleaved:
            return torch.cat(parts, dim=1)
        start = along.start or 0
        inside = slice(start % 2, None if along.stop is None else start % 2 + along.stop - start)
        return torch.stack(parts, dim=2).flatten(1, 2)[:, inside]


def _joint_name(name: str) -> str:
    found = _STACK.fullmatch(name)
    if found is None:
        return name
    part = "down" if found[2] == "down" else "gate_up"
    return f"{found[1]}.{part}_proj{'_bias' if found[3] == 'bias' else ''}"


def _stack_shape(shape: tuple[int, ...] | None, *, halves: int) -> tuple[int, ...] | None:
    """What each stack must have if the joined tensor is to have `shape`: the last axis joins, and comes first in a matrix."""
    if shape is None:
        return None
    *experts_and_width, joined = shape
    return (experts_and_width[0], joined // halves, *experts_and_width[1:])
