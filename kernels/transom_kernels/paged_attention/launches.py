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
class LaunchKey:
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
class AttentionLaunch:
    """Sequences that are cut alike."""

    work: Work
    max_tile_tokens: int  # of a tile


def launches_of(batch: PagedBatch, asked: LaunchKey, device: torch.device) -> list[AttentionLaunch]:
    """The batch's programs, which stay with it."""
    kept = _launches(batch)
    if asked not in kept:
        kept[asked] = [
            AttentionLaunch(plan_work(batch, asked.rule, tiling).on(device), tiling.tile_tokens)
            for tiling in asked.tilings
            if any(tiling.least <= count <= tiling.most for count in batch.count_host)
        ]
    return kept[asked]


def set_launches(batch: PagedBatch, asked: LaunchKey, launches: list[AttentionLaunch]) -> None:
    """Have layers that ask for this take these."""
    _launches(batch)[asked] = launches


def launch_keys_of(batch: PagedBatch) -> tuple[LaunchKey, ...]:
    """What layers have asked of the batch until now."""
    return tuple(_launches(batch))


def _launches(batch: PagedBatch) -> dict[LaunchKey, list[AttentionLaunch]]:
    kept: dict[LaunchKey, list[AttentionLaunch]] = batch.scratch.setdefault(_KEPT, {})
    return kept
