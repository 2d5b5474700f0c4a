"""Experts from a checkpoint, one by one into stacked tensors, in each of the forms that checkpoints have.

Legend: E experts, N hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transom_worker.layers.experts import ExpertWeights
from transom_worker.models.loading import Loader
from transom_worker.models.mixture import Mixture


def experts_by_name(load: Loader, names: Sequence[str], mixture: Mixture, hidden_size: int) -> ExpertWeights:
    """A matrix each: `names` of gate, up and down, with the expert's number in the place of {}."""
    gate, up, down = (load.prefix + name for name in names)
    inner = mixture.inner_size

    def gate_up(expert: int) -> torch.Tensor:
        return torch.cat([load.weights(name.format(expert), shape=(inner, hidden_size)) for name in (gate, up)])

    def back(expert: int) -> torch.Tensor:
        return load.weights(down.format(expert), shape=(hidden_size, inner))

    return ExpertWeights(
        gate_up=_stack(load, gate_up, (mixture.num_experts, 2 * inner, hidden_size)),
        down=_stack(load, back, (mixture.num_experts, hidden_size, inner)),
    )


def experts_by_stack(
    load: Loader, mixture: Mixture, hidden_size: int, *, interleaved: bool = False, biased: bool = False
) -> ExpertWeights:
    """Two tensors of all experts, `gate_up_proj` [E, N, 2I] and `down_proj` [E, I, N], and their biases.

    `interleaved`: each gate is followed by its up.
    """
    experts, inner = mixture.num_experts, mixture.inner_size

    def gate_up(expert: int) -> torch.Tensor:
        rows = one("gate_up_proj", (experts, hidden_size, 2 * inner), expert).t()
        return _gates_first(rows) if interleaved else rows

    def gate_up_bias(expert: int) -> torch.Tensor:
        rows = one("gate_up_proj_bias", (experts, 2 * inner), expert)
        return _gates_first(rows) if interleaved else rows

    def down(expert: int) -> torch.Tensor:
        return one("down_proj", (experts, inner, hidden_size), expert).t()

    def down_bias(expert: int) -> torch.Tensor:
        return one("down_proj_bias", (experts, hidden_size), expert)

    def one(name: str, shape: tuple[int, ...], expert: int) -> torch.Tensor:
        return load.weights(load.prefix + name, shape=shape, part=(slice(expert, expert + 1),))[0]

    return ExpertWeights(
        gate_up=_stack(load, gate_up, (experts, 2 * inner, hidden_size)),
        down=_stack(load, down, (experts, hidden_size, inner)),
        gate_up_bias=_stack(load, gate_up_bias, (experts, 2 * inner)) if biased else None,
        down_bias=_stack(load, down_bias, (experts, hidden_size)) if biased else None,
    )


def _gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Rows 0, 2, 4 .. and then 1, 3, 5 .."""
    return torch.cat([rows[::2], rows[1::2]])


def _stack(load: Loader, one: Callable[[int], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """All experts, no more than one of which is in memory twice."""
    stacked = torch.empty(shape, dtype=load.dtype, device=load.device)
    for expert in range(shape[0]):
        stacked[expert].copy_(one(expert))
    return stacked
