"""A batch's programs by what layers ask for: cut by the first layer that asks, or given before the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tuning import tilings
from transom_kernels.paged_attention.work import Tiling, Work, plan_work

_KEPT = "paged_attention_gpu"  # in a batch's scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All that programs depend on beside the batch. Layers that agree in it share them."""

    rule: MaskRule
    group: int  # query heads of a KV head
    key_size: int
    element_bytes: int  # of queries
    cache_bytes: int  # of an element of the cache

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """How sequences are cut, by their new tokens; the first is for one token."""
        return tilings(
            group=self.group, key_size=self.key_size, element_bytes=self.element_bytes, cache_bytes=self.cache_bytes
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that are cut alike."""

    work: Work
    most_tokens: int  # of a tile


def parts_of(batch: PagedBatch, asked: Asked, device: torch.device) -> list[Part]:
    """The batch's programs, which stay with it."""
    kept = _kept(batch)
    if asked not in kept:
        kept[asked] = [
            Part(plan_work(batch, asked.rule, tiling).on(device), tiling.tile_tokens)
            for tiling in asked.tilings
            if any(tiling.least <= count <= tiling.most for count in batch.count_host)
        ]
    return kept[asked]


def give_parts(batch: PagedBatch, asked: Asked, parts: list[Part]) -> None:
    """Have layers that ask for this take these."""
    _kept(batch)[asked] = parts


def asked_of(batch: PagedBatch) -> tuple[Asked, ...]:
    """What layers have asked of the batch until now."""
    return tuple(_kept(batch))


def _kept(batch: PagedBatch) -> dict[Asked, list[Part]]:
    kept: dict[Asked, list[Part]] = batch.scratch.setdefault(_KEPT, {})
    return kept
