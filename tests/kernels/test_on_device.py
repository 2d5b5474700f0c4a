"""`on_device` copies tensors to the device and results back, tested in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.kernels.on_device import on_device
from tests.kernels.paged_case import Shape, empty_caches


@dataclass(frozen=True)
class Options:
    weight: torch.Tensor
    scale: float


def test_views_of_one_slab_are_written_where_they_lie_and_results_come_back() -> None:
    shape = Shape()
    k, v = empty_caches(shape, 3)
    seen: list[int] = []

    def launch(k: torch.Tensor, pair: tuple[torch.Tensor, int], *, options: Options) -> tuple[torch.Tensor, int]:
        seen.extend((k.untyped_storage().data_ptr(), pair[0].untyped_storage().data_ptr()))
        assert (k.stride(), k.storage_offset()) == (outer.stride(), outer.storage_offset())
        k[1, 2] = 5.0
        pair[0][2, 3, 1] = options.weight * options.scale
        return k[1, 2], pair[1]

    outer, weight = k, torch.ones(shape.size)
    result, number = on_device(launch, torch.device("cpu"))(k, (v, 7), options=Options(weight, 2.0))
    assert seen[0] == seen[1] != k.untyped_storage().data_ptr()
    assert number == 7
    assert torch.equal(result, torch.full((2, shape.size), 5.0))
    assert torch.equal(k[1, 2], result)
    assert torch.equal(v[2, 3, 1], torch.full((shape.size,), 2.0))
    assert int((~k.isnan()).sum()) == 2 * shape.size
    assert torch.equal(weight, torch.ones(shape.size))


def test_empty_tensors_go_along() -> None:
    assert on_device(lambda x: x, torch.device("cpu"))(torch.empty(0, 3)).shape == (0, 3)
