"""Loads this rank's inner columns of every expert into stacked tensors, from each of the layouts that checkpoints have.

    experts_by_name    one tensor per expert and matrix (Mixtral, Qwen3-MoE, MiMo, DeepSeek V4)
    experts_by_stack   two tensors of all experts, input axis first (gpt-oss, Llama 4, Qwen3-VL)
    experts_by_rows    two tensors of all experts, output axis first (Gemma 4, Qwen3.5)

Each rank loads a range of the inner columns of every expert (`own` in this file). *Packed* experts stay in MXFP4 as stored, on
devices that compute with MXFP4.

Legend: E experts, N hidden width, I inner width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from transom_core.model_config.mixture import Mixture
from transom_kernels.moe import ExpertTensors, MxTensor
from transom_kernels.quantised_linear import GpuRows, StoredRows, concatenated
from transom_worker.models.layers.experts import StoredExperts, runs_grouped
from transom_worker.models.loading import Loader, alike_rows
from transom_worker.models.weights.checkpoint import ALL, Mxfp4Tensors, Part


def experts_by_name(
    load: Loader, names: Sequence[str], mixture: Mixture, hidden_size: int
) -> ExpertTensors | StoredExperts:
    """Load experts stored as one tensor per expert and matrix: as stored, if layers take them so.

    `names` are those of the gate, up and down matrix, or of up and down, in which {} stands for the expert's number.
    """
    inner, own = mixture.inner_size, load.share(mixture.inner_size)
    into, out = (inner, hidden_size), (hidden_size, inner)
    matrices: list[tuple[str, tuple[int, int], Part]] = [(name, into, (own,)) for name in names[:-1]]
    matrices.append((names[-1], out, (ALL, own)))
    if stored := _stored_experts(load, mixture.num_experts, matrices):
        return stored
    *gate_and_up, down = (load.prefix + name for name in names)
    if _takes_packed(load):
        stacks = [
            _packed_stack(load, mixture.num_experts, load.prefix + name, shape, part) for name, shape, part in matrices
        ]
        if all(stacks):
            return _joined(list(filter(None, stacks)))

    def gate_up(expert: int) -> torch.Tensor:
        parts = [load.weights(name.format(expert), shape=into, part=(own,)) for name in gate_and_up]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def back(expert: int) -> torch.Tensor:
        return load.weights(down.format(expert), shape=(hidden_size, inner), part=(ALL, own))

    return _stacked(load, mixture, hidden_size, gate_up, back, kinds=len(gate_and_up))


def experts_by_stack(
    load: Loader, mixture: Mixture, hidden_size: int, *, interleaved: bool = False, biased: bool = False
) -> ExpertTensors:
    """Load experts stored as two tensors, `gate_up_proj` [E, N, 2 I] and `down_proj` [E, I, N], and their biases if `biased`.

    `interleaved` says that gate and up columns alternate. Experts in MXFP4 stay packed on devices that compute with MXFP4.
    """
    experts, inner, own = mixture.num_experts, mixture.inner_size, load.share(mixture.inner_size)
    # The columns of this rank's gates and ups: one range if they alternate, which can stay packed; else usually two.
    halves = [slice(2 * own.start, 2 * own.stop)] if interleaved else _gates_and_ups(own, inner)
    packed = _packed_pair(load, mixture, hidden_size, halves[0], own) if interleaved and _takes_packed(load) else None

    def gate_up(expert: int) -> torch.Tensor:
        shape = (experts, hidden_size, 2 * inner)
        rows = torch.cat([one("gate_up_proj", shape, expert, ALL, half).t() for half in halves])
        return _gates_first(rows) if interleaved else rows

    def gate_up_bias(expert: int) -> torch.Tensor:
        # Packed weights keep the alternating order, so their bias keeps it too.
        rows = torch.cat([one("gate_up_proj_bias", (experts, 2 * inner), expert, half) for half in halves])
        return _gates_first(rows) if interleaved and packed is None else rows

    def down(expert: int) -> torch.Tensor:
        return one("down_proj", (experts, inner, hidden_size), expert, own).t()

    def one(name: str, shape: tuple[int, ...], expert: int, *part: slice) -> torch.Tensor:
        return load.weights(load.prefix + name, shape=shape, part=(slice(expert, expert + 1), *part))[0]

    weights = packed or _stacked(load, mixture, hidden_size, gate_up, down)
    if not biased:
        return weights
    width = 2 * (own.stop - own.start)
    return replace(
        weights,
        gate_up_bias=_stack(load, gate_up_bias, (experts, width)),
        down_bias=load.first_alone("down_proj_bias", shape=(experts, hidden_size)),
    )


def experts_by_rows(load: Loader, mixture: Mixture, hidden_size: int) -> ExpertTensors:
    """Load experts stored as two tensors, `gate_up_proj` [E, 2 I, N] and `down_proj` [E, N, I]."""
    experts, inner, own = mixture.num_experts, mixture.inner_size, load.share(mixture.inner_size)
    shape = (experts, 2 * inner, hidden_size)
    halves = [load.tensor("gate_up_proj", shape=shape, part=(ALL, half)) for half in _gates_and_ups(own, inner)]
    return ExpertTensors(
        gate_up=halves[0] if len(halves) == 1 else torch.cat(halves, dim=1),
        down=load.tensor("down_proj", shape=(experts, hidden_size, inner), part=(ALL, ALL, own)),
    )


def experts_by_stack_or_name(
    load: Loader, names: Sequence[str], mixture: Mixture, hidden_size: int, *, takes_input_first: bool = False
) -> ExpertTensors | StoredExperts:
    """Load the tensors below `experts.` as `experts_by_rows` does if the checkpoint has such stacks or `names` is empty, else as
    `experts_by_name` does: tools that quantise write one tensor per expert and matrix. With `takes_input_first` stacks that have
    the input axis first are loaded as `experts_by_stack` does."""
    # A name may begin with "language_model.", which ends with "model." itself.
    stack = f"{load.prefix}experts.gate_up_proj"
    if not names or any(name.endswith(stack) for name in load.weights.names):
        load = load.under("experts.")
        if takes_input_first and not _has_rows_first(load, mixture, hidden_size):
            return experts_by_stack(load, mixture, hidden_size)
        return experts_by_rows(load, mixture, hidden_size)
    return experts_by_name(load, [f"experts.{{}}.{name}.weight" for name in names], mixture, hidden_size)


def _has_rows_first(load: Loader, mixture: Mixture, hidden_size: int) -> bool:
    """Return whether stacks have the output axis first. Both are asked, since one may be square."""
    inner, rows = mixture.inner_size, hidden_size
    first = [load.weights(f"{load.prefix}{name}_proj", part=(slice(0, 1),))[0] for name in ("gate_up", "down")]
    return [tuple(matrix.shape) for matrix in first] == [(2 * inner, rows), (rows, inner)]


def _takes_packed(load: Loader) -> bool:
    """Return whether the loader's device and quantisation compute with packed experts."""
    return runs_grouped(torch.empty(0, dtype=load.dtype, device=load.device), load.quantization)


def _packed_pair(load: Loader, mixture: Mixture, hidden_size: int, rows: slice, own: slice) -> ExpertTensors | None:
    """Return `gate_up_proj` and `down_proj` as stored, with alternating gates and ups; None if they are not in MXFP4."""
    experts, inner = mixture.num_experts, mixture.inner_size
    prefix, read = load.prefix, load.weights.mxfp4
    gate_up = read(f"{prefix}gate_up_proj", shape=(experts, hidden_size, 2 * inner), part=(ALL, ALL, rows))
    down = read(f"{prefix}down_proj", shape=(experts, inner, hidden_size), part=(ALL, own))
    if gate_up is None or down is None:
        return None
    return ExpertTensors(gate_up=_on_device(load, gate_up), down=_on_device(load, down), interleaved=True)


def _stored_experts(
    load: Loader, num_experts: int, matrices: Sequence[tuple[str, tuple[int, int], Part]]
) -> StoredExperts | None:
    """Return experts as stored in groups; `matrices` has names, shapes and parts of gates (if any), ups and downs. None if the
    matrices of an expert are not stored so, or GPU kernels do not take them: they take experts of one format."""
    gate_up: list[StoredRows] = []
    down: list[StoredRows] = []
    for expert in range(num_experts):
        *gate_and_up, back = (load.stored(name.format(expert), shape, part) for name, shape, part in matrices)
        pair = alike_rows(gate_and_up)
        if pair is None or back is None:
            return None
        parts = [part for part in (pair[0], back) if isinstance(part, GpuRows)]
        if parts and (not _takes_packed(load) or any(part.order is not None for part in parts)):
            return None
        gate_up.append(concatenated(pair))
        down.append(back)
    if isinstance(down[0], GpuRows) and None in (alike_rows(gate_up), alike_rows(down)):
        return None
    return StoredExperts(gate_up, down)


def _packed_stack(load: Loader, num_experts: int, name: str, shape: tuple[int, int], part: Part) -> MxTensor | None:
    """Return one matrix of every expert as stored; None if the first expert's is not in MXFP4."""
    found = [
        load.weights.mxfp4(name.format(expert), shape=shape, part=part)
        for expert in range(num_experts if load.weights.mxfp4(name.format(0), shape=shape, part=part) else 0)
    ]
    blocks, scales = ([half[at] for half in filter(None, found)] for at in range(2))
    return _on_device(load, (torch.stack(blocks), torch.stack(scales))) if blocks else None


def _joined(stacks: Sequence[MxTensor]) -> ExpertTensors:
    """Return packed experts whose gates, if any, and ups are joined to one tensor, gates first; the last stack has the downs."""
    *into, down = stacks
    both = (torch.cat([part.blocks for part in into], dim=1), torch.cat([part.scales for part in into], dim=1))
    return ExpertTensors(gate_up=MxTensor(blocks=both[0], scales=both[1]), down=down)


def _on_device(load: Loader, packed: Mxfp4Tensors) -> MxTensor:
    """Return a packed tensor on the loader's device, contiguous."""
    blocks, scales = (half.to(load.device).contiguous() for half in packed)
    return MxTensor(blocks=blocks, scales=scales)


def _gates_and_ups(own: slice, inner: int) -> list[slice]:
    """Return the slices of a rank's gates and ups in a tensor with all gates before all ups; one slice if the rank has them all."""
    if own == slice(0, inner):
        return [slice(0, 2 * inner)]
    return [own, slice(inner + own.start, inner + own.stop)]


def _gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Return alternating rows in the order 0, 2, 4, ... (gates), then 1, 3, 5, ... (ups)."""
    return torch.cat([rows[::2], rows[1::2]])


def _stacked(
    load: Loader,
    mixture: Mixture,
    hidden_size: int,
    gate_up: Callable[[int], torch.Tensor],
    down: Callable[[int], torch.Tensor],
    *,
    kinds: int = 2,
) -> ExpertTensors:
    """Return unpacked tensors of all experts; `gate_up` and `down` load one expert's matrix. `kinds` is 1 if there are no gates."""
    own = load.share(mixture.inner_size)
    experts, width = mixture.num_experts, own.stop - own.start
    return ExpertTensors(
        gate_up=_stack(load, gate_up, (experts, kinds * width, hidden_size)),
        down=_stack(load, down, (experts, hidden_size, width)),
    )


def _stack(load: Loader, one: Callable[[int], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Return one tensor of all experts. They are copied one by one, so that at most one expert is in memory twice."""
    stacked = torch.empty(shape, dtype=load.dtype, device=load.device)
    for expert in range(shape[0]):
        stacked[expert].copy_(one(expert))
    return stacked
