"""Random queries, keys and values of four tokens, to be prepared and written to caches that are NaN elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.kernels.paged_case import Shape, empty_caches
from tests.kernels.quantised_case import FORMATS_BY_NAME, poisoned_caches
from transom_kernels.kv_write import Preparation, QkvInputs

SLOTS = torch.tensor([7, -1, 0, 19])  # the second token is not written
HEADS, KV_HEADS = 6, 2
PREPARATIONS = {
    "plain": Preparation(),
    "norm": Preparation(norm=True),
    "norm after rotation": Preparation(norm_after_rotation=True),
    "value norm": Preparation(value_norm=True, value_factor=0.7),
    "everything": Preparation(
        norm=True, norm_after_rotation=True, value_norm=True, value_factor=1.3, rotates_last=True
    ),
    "interleaved": Preparation(norm=True, interleaved=True),
    "interleaved, last": Preparation(interleaved=True, rotates_last=True),
}


def heads_of(row: torch.Tensor, counts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Parts [T, heads, width] of rows, each after the other."""
    parts = row[:, : sum(heads * width for heads, width in counts)].split([h * w for h, w in counts], dim=1)
    return [part.unflatten(1, pair) for part, pair in zip(parts, counts, strict=True)]


def make_inputs(
    how: Preparation,
    size: int,
    rotated: int,
    *,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    kv_format: str | None = None,
    scaled: bool = True,
) -> tuple[Any, Any]:
    """The same `QkvInputs` twice, each with caches of its own: of `kv_format`, or else of `dtype`. Values are 4 narrower than keys.

    Their type is not said, so that tests need not ask whether keys and values are there.
    """
    row = torch.randn(4, (HEADS + 2 * KV_HEADS) * size + 5).to(dtype)
    q, k, v = heads_of(row, [(HEADS, size), (KV_HEADS, size), (KV_HEADS, size - 4)])
    if how.norm:
        weights = torch.randn(HEADS + KV_HEADS, size).to(weight_dtype or dtype)
        how = replace(how, q_weight=weights[:HEADS], k_weight=weights[HEADS:])
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "slots": SLOTS, "preparation": how}
    if rotated:
        given["tables"] = (torch.randn(4, rotated).to(dtype), torch.randn(4, rotated).to(dtype))
    if scaled:
        given["query_scale"] = torch.rand(4).to(dtype)
    pair = []
    for _ in range(2):
        if kv_format is None:
            shape = Shape(kv_heads=KV_HEADS, size=size, v_size=size - 4, dtype=dtype)
            caches: dict[str, Any] = dict(zip(("k_cache", "v_cache"), empty_caches(shape, 5), strict=True))
        else:
            caches = poisoned_caches(FORMATS_BY_NAME[kv_format], 5, 4, KV_HEADS, (size, size - 4)).arguments
        pair.append(QkvInputs(**given, **caches))
    return pair[0], pair[1]


def keys_alone(heads: int) -> tuple[Any, Any]:
    """The same `QkvInputs` twice: float32 keys for a cache of bfloat16, without values, and `heads` query heads."""
    pair = torch.full((2, 2, 4, 1, 12), float("nan"), dtype=torch.bfloat16)
    how = Preparation(norm=True, k_weight=torch.randn(1, 12), interleaved=True, rotates_last=True)
    inputs = QkvInputs(
        q=torch.randn(3, heads, 12),
        k=torch.randn(3, 1, 12),
        v=None,
        k_cache=pair[0],
        v_cache=None,
        slots=torch.tensor([6, -1, 1]),
        tables=(torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()),
        preparation=how,
    )
    return inputs, replace(inputs, k_cache=pair[1])
