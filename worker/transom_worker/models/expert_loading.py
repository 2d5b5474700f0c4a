"""A rank's columns of every expert, one by one into stacked tensors, from each of the forms that checkpoints have.

Legend: E experts, N hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from transom_worker.layers.experts import ExpertWeights
from transom_worker.models.loading import Loader
from transom_worker.models.mixture import Mixture
from transom_worker.weights import ALL


def experts_by_name(load: Loader, names: Sequence[str], mixture: Mixture, hidden_size: int) -> ExpertWeights:
    """A matrix each: `names` of gate, up and down, with the expert's number in the place of {}."""
    gate, up, down = (load.prefix + name for name in names)
    inner, own = mixture.inner_size, load.cut(mixture.inner_size)

    def gate_up(expert: int) -> torch.Tensor:
        shape = (inner, hidden_size)
        return torch.cat([load.weights(name.format(expert), shape=shape, part=(own,)) for name in (gate, up)])

    def back(expert: int) -> torch.Tensor:
        return load.weights(down.format(expert), shape=(hidden_size, inner), part=(ALL, own))

    return _stacked(load, mixture, hidden_size, gate_up, back)


def experts_by_stack(
    load: Loader, mixture: Mixture, hidden_size: int, *, interleaved: bool = False, biased: bool = False
) -> ExpertWeights:
    """Two tensors of all experts, `gate_up_proj` [E, N, 2I] and `down_proj` [E, I, N], and their biases.

    `interleaved`: each gate is followed by its up.
    """
    experts, inner, own = mixture.num_experts, mixture.inner_size, load.cut(mixture.inner_size)
    halves = [slice(2 * own.start, 2 * own.stop)] if interleaved else _gates_and_ups(own, inner)

    def gate_up(expert: int) -> torch.Tensor:
        shape = (experts, hidden_size, 2 * inner)
        rows = torch.cat([one("gate_up_proj", shape, expert, ALL, half).t() for half in halves])
        return _gates_first(rows) if interleaved else rows

    def gate_up_bias(expert: int) -> torch.Tensor:
        rows = torch.cat([one("gate_up_proj_bias", (experts, 2 * inner), expert, half) for half in halves])
        return _gates_first(rows) if interleaved else rows

    def down(expert: int) -> torch.Tensor:
        return one("down_proj", (experts, inner, hidden_size), expert, own).t()

    def one(name: str, shape: tuple[int, ...], expert: int, *part: slice) -> torch.Tensor:
        return load.weights(load.prefix + name, shape=shape, part=(slice(expert, expert + 1), *part))[0]

    weights = _stacked(load, mixture, hidden_size, gate_up, down)
    if not biased:
        return weights
    width = 2 * (own.stop - own.start)
    return replace(
        weights,
        gate_up_bias=_stack(load, gate_up_bias, (experts, width)),
        down_bias=load.first_alone("down_proj_bias", shape=(experts, hidden_size)),
    )


def experts_by_rows(load: Loader, mixture: Mixture, hidden_size: int) -> ExpertWeights:
    """Two tensors of all experts, `gate_up_proj` [E, 2I, N] and `down_proj` [E, N, I]."""
    experts, inner, own = mixture.num_experts, mixture.inner_size, load.cut(mixture.inner_size)
    shape = (experts, 2 * inner, hidden_size)
    halves = [load.tensor("gate_up_proj", shape=shape, part=(ALL, half)) for half in _gates_and_ups(own, inner)]
    return ExpertWeights(
        gate_up=halves[0] if len(halves) == 1 else torch.cat(halves, dim=1),
        down=load.tensor("down_proj", shape=(experts, hidden_size, inner), part=(ALL, ALL, own)),
    )


def _gates_and_ups(own: slice, inner: int) -> list[slice]:
    """A rank's gates and its ups among all gates followed by all ups; one run where it has them all."""
    if own == slice(0, inner):
        return [slice(0, 2 * inner)]
    return [own, slice(inner + own.start, inner + own.stop)]


def _gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Rows 0, 2, 4 .. and then 1, 3, 5 .."""
    return torch.cat([rows[::2], rows[1::2]])


def _stacked(
    load: Loader,
    mixture: Mixture,
    hidden_size: int,
    gate_up: Callable[[int], torch.Tensor],
    down: Callable[[int], torch.Tensor],
) -> ExpertWeights:
    own = load.cut(mixture.inner_size)
    experts, width = mixture.num_experts, own.stop - own.start
    return ExpertWeights(
        gate_up=_stack(load, gate_up, (experts, 2 * width, hidden_size)),
        down=_stack(load, down, (experts, hidden_size, width)),
    )


def _stack(load: Loader, one: Callable[[int], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """All experts, no more than one of which is in memory twice."""
    stacked = torch.empty(shape, dtype=load.dtype, device=load.device)
    for expert in range(shape[0]):
        stacked[expert].copy_(one(expert))
    return stacked
