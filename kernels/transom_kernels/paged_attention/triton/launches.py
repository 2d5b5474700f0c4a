"""Plans the Triton launches of a batch once a step; all layers that need an equal plan share it.

A *launch key* is everything that the plan depends on besides the batch. The first layer with a key plans its launches. A CUDA
graph cannot plan while it replays, so its owner writes the plan beforehand and hands it over with `set_launches`.

A batch has at most one launch per `Tiling`: sequences with one new token, with a few, and with a prompt's chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.tuning import tilings
from transom_kernels.paged_attention.triton.work_items import Tiling, Work, plan_work

_SCRATCH_KEY = "paged_attention_gpu"  # of `PagedBatch.scratch`


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKey:
    """All that launches depend on besides the batch. Layers with equal keys share their launches."""

    rule: MaskRule
    group: int  # query heads per KV head
    key_size: int  # elements of a key
    element_bytes: int  # of a query's element
    cache_bytes: int  # of a cache's element

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """How sequences are tiled, by their number of new tokens; the first tiling is for one new token (decoding)."""
        return tilings(
            group=self.group, key_size=self.key_size, element_bytes=self.element_bytes, cache_bytes=self.cache_bytes
        )


@dataclass(slots=True)
class AttentionLaunch:
    """One launch of the `attend` kernel: all sequences of one tiling."""

    work: Work
    max_tile_tokens: int  # query tokens of the tiling's largest tile
    num_items: int = field(init=False)
    num_combine_items: int = field(init=False)

    def __post_init__(self) -> None:
        """Count once what every layer's launch asks for."""
        self.num_items, self.num_combine_items = len(self.work.items), len(self.work.combine_items)


def launches_of(batch: PagedBatch, key: LaunchKey, device: torch.device) -> list[AttentionLaunch]:
    """The batch's launches for layers with this key; planned at the first call and kept in the batch."""
    planned = _launches(batch)
    if key not in planned:
        planned[key] = [
            AttentionLaunch(plan_work(batch, key.rule, tiling).on(device), tiling.tile_tokens)
            for tiling in key.tilings
            if any(tiling.min_new_tokens <= count <= tiling.max_new_tokens for count in batch.count_host)
        ]
    return planned[key]


def set_launches(batch: PagedBatch, key: LaunchKey, launches: list[AttentionLaunch]) -> None:
    """Make layers with this key use these launches instead of planning their own."""
    _launches(batch)[key] = launches


def launch_keys_of(batch: PagedBatch) -> tuple[LaunchKey, ...]:
    """The keys of all layers that have attended over this batch until now."""
    return tuple(_launches(batch))


def _launches(batch: PagedBatch) -> dict[LaunchKey, list[AttentionLaunch]]:
    planned: dict[LaunchKey, list[AttentionLaunch]] = batch.scratch.setdefault(_SCRATCH_KEY, {})
    return planned
